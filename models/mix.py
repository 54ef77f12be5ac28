"""SplitMix's ensemble: narrow nets side by side that have no weights in common ("Efficient Split-Mix Federated Learning for
On-Demand and In-Situ Customization", ICLR 2022).

An atom of a mixed model holds the atoms of all nets, `atoms.<i>.<net>...`. Its features are those of the nets, concatenated
along the channels of maps, else along the last dimension. The model predicts by the mean of the nets' logits.

With a Scaler, nets of width ratio a begin with weights and biases that are sqrt(a) times torch's, as large as those of the full
model, whose layers have 1 / a times the inputs; the first layer, whose inputs are never cut, begins as usual. The outputs of
all convolutions and linear layers but the last one are divided by a, as in HeteroFL.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from pydantic import FailFast, Field
from torch import Tensor, nn

from piecework.models.cascade import Atom, Blueprint, Shape
from piecework.models.change import Change, Origin
from piecework.models.depth_exits import mean_logits
from piecework.models.layers import divide_output

Build = Callable[[], nn.Module]
MOST_NETS = 100  # every net is built, and every number of them traced


class MixedAtom(nn.ModuleDict):
    """An atom of several nets. In the first atom all nets read the same input."""

    def __init__(self, build: Build, nets: Sequence[int], first: bool) -> None:
        super().__init__({str(net): build() for net in nets})
        self.first = first

    def forward(self, z: Tensor) -> Tensor:
        """Return the concatenated outputs of the nets for z."""
        inputs = [z] * len(self) if self.first else parts(z, len(self))
        made = [net(each) for net, each in zip(self.values(), inputs, strict=True)]
        return torch.cat(made, dim=1 if made[0].dim() == 4 else -1)


class MixedHead(nn.ModuleDict):
    """The heads of several nets."""

    def __init__(self, build: Build, nets: Sequence[int]) -> None:
        super().__init__({str(net): build() for net in nets})

    def each(self, z: Tensor) -> list[Tensor]:
        """Return the logits[B, classes] of every net."""
        return [head(features) for head, features in zip(self.values(), parts(z, len(self)), strict=True)]

    def forward(self, z: Tensor) -> Tensor:
        """Return the mean of the nets' logits."""
        return mean_logits(self.each(z))


def parts(z: Tensor, nets: int) -> tuple[Tensor, ...]:
    """Split z into the features of each net."""
    return z.chunk(nets, dim=1 if z.dim() == 4 else -1)


NetNumber = Annotated[int, Field(ge=0, lt=MOST_NETS)]


@dataclass(frozen=True)
class Mix(Change):
    """Narrow nets side by side, each as wide as the variant (SplitMix)."""

    nets: Annotated[tuple[NetNumber, ...], Field(min_length=1, max_length=MOST_NETS), FailFast()]  # their numbers
    scaler: bool = False  # rescales them

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the ensemble of nets, each built as `model`."""
        return mix_nets(model, self.nets, origin.width if self.scaler else 1.0)


def mix_nets(base: Blueprint, nets: Sequence[int], ratio: float = 1.0) -> Blueprint:
    """Return the mixed model of these net numbers, each net built as `base`, with a Scaler if `ratio` is below 1."""

    def wide(shape: Shape) -> Shape:
        return (len(nets) * shape[0], *shape[1:]) if len(shape) == 3 else (*shape[:-1], len(nets) * shape[-1])

    atoms = tuple(
        Atom(
            atom.name,
            partial(MixedAtom, partial(build_rescaled, atom.build, ratio, first=number == 0), tuple(nets), number == 0),
            wide(atom.shape),
        )
        for number, atom in enumerate(base.atoms)
    )
    head = partial(build_rescaled, base.build_head, ratio, last=True)
    return replace(base, atoms=atoms, build_head=partial(MixedHead, head, tuple(nets)), width=1.0)


def build_rescaled(build: Build, ratio: float, *, first: bool = False, last: bool = False) -> nn.Module:
    """Build an atom or head with the Scaler of a net of width ratio `ratio`; `first` has the first layer, `last` the last."""
    module = build()
    if ratio == 1:
        return module
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers[first:]:
        with torch.no_grad():
            for parameter in layer.parameters(recurse=False):
                parameter.mul_(math.sqrt(ratio))
    for layer in layers[: len(layers) - last]:
        divide_output(layer, ratio)
    return module


def net_of(name: str) -> int:
    """Return the net of an array of a mixed model: `atoms.3.2.conv.weight` -> 2, `head.2.fc.bias` -> 2."""
    kind, *rest = name.split(".")
    return int(rest[0] if kind == "head" else rest[1])
