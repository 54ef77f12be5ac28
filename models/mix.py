"""SplitMix's ensemble: narrow nets side by side that have no weights in common ("Efficient Split-Mix Federated Learning for
On-Demand and In-Situ Customization", ICLR 2022).

An atom of a mixed model holds the atoms of all nets, `atoms.<i>.<net>...`. Its features are those of the nets, concatenated
along the channels of maps, else along the last dimension. The model predicts by the mean of the nets' logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from piecework.models.cascade import Atom, Blueprint, Shape
from piecework.models.depth_exits import mean_logits

Build = Callable[[], nn.Module]


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


def mixed(base: Blueprint, nets: Sequence[int]) -> Blueprint:
    """Return the mixed model of these net numbers, each net built as `base`."""

    def wide(shape: Shape) -> Shape:
        return (len(nets) * shape[0], *shape[1:]) if len(shape) == 3 else (*shape[:-1], len(nets) * shape[-1])

    atoms = tuple(
        Atom(atom.name, partial(MixedAtom, atom.build, tuple(nets), number == 0), wide(atom.shape))
        for number, atom in enumerate(base.atoms)
    )
    return replace(base, atoms=atoms, build_head=partial(MixedHead, base.build_head, tuple(nets)), width=1.0)


def net_of(name: str) -> int:
    """Return the net of an array of a mixed model: `atoms.3.2.conv.weight` -> 2, `head.2.fc.bias` -> 2."""
    kind, *rest = name.split(".")
    return int(rest[0] if kind == "head" else rest[1])
