"""SplitMix's ensemble: narrow nets beside each other, which share no weight ("Efficient Split-Mix Federated Learning for
On-Demand and In-Situ Customization", ICLR 2022).

In a mixed model an atom is the atoms of all nets, `atoms.<i>.<net>...`; features are those of the nets, one after another: the
channels of maps, else the last dimension. It predicts by the mean of their logits.
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
    """An atom of several nets; the first one's input is the same for all of them."""

    def __init__(self, build: Build, nets: Sequence[int], first: bool) -> None:
        super().__init__({str(net): build() for net in nets})
        self.first = first

    def forward(self, z: Tensor) -> Tensor:
        """What the nets make of z, one after another."""
        inputs = [z] * len(self) if self.first else parts(z, len(self))
        made = [net(each) for net, each in zip(self.values(), inputs, strict=True)]
        return torch.cat(made, dim=1 if made[0].dim() == 4 else -1)


class MixedHead(nn.ModuleDict):
    """The heads of several nets."""

    def __init__(self, build: Build, nets: Sequence[int]) -> None:
        super().__init__({str(net): build() for net in nets})

    def each(self, z: Tensor) -> list[Tensor]:
        """The logits[B, classes] of every net."""
        return [head(features) for head, features in zip(self.values(), parts(z, len(self)), strict=True)]

    def forward(self, z: Tensor) -> Tensor:
        """The mean of their logits."""
        return mean_logits(self.each(z))


def parts(z: Tensor, nets: int) -> tuple[Tensor, ...]:
    """The features of each net."""
    return z.chunk(nets, dim=1 if z.dim() == 4 else -1)


def mixed(base: Blueprint, nets: Sequence[int]) -> Blueprint:
    """The model of these nets, by their numbers; `base` is one of them."""

    def wide(shape: Shape) -> Shape:
        return (len(nets) * shape[0], *shape[1:]) if len(shape) == 3 else (*shape[:-1], len(nets) * shape[-1])

    atoms = tuple(
        Atom(atom.name, partial(MixedAtom, atom.build, tuple(nets), number == 0), wide(atom.shape))
        for number, atom in enumerate(base.atoms)
    )
    return replace(base, atoms=atoms, build_head=partial(MixedHead, base.build_head, tuple(nets)), width=1.0)


def net_of(name: str) -> int:
    """The net that an array of a mixed model belongs to: `atoms.3.2.conv.weight` -> 2, `head.2.fc.bias` -> 2."""
    kind, *rest = name.split(".")
    return int(rest[0] if kind == "head" else rest[1])
