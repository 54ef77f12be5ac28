"""ProFL's blocks, and the basic layers that stand in for blocks not trained yet (section 2 and the authors' code).

The output module of step t has a basic layer for every block after block t, then the model's own pooling and classifier. A
basic layer is one 3 x 3 convolution to the block's channels, without bias or ReLU, and if asked for (ours: the setting
`output-norm`) with a batch norm. Its stride is the factor by which the block shrinks its feature map: 2 throughout ResNet, as
in the authors' code, and 4 in VGG-11, which they do not mention. The basic layer of a transformer is one encoder (section 3.6),
that of an LSTM one layer.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import nn

from piecework.models.cascade import Atom, Blueprint, is_bare, norm_layer
from piecework.models.change import Change, Origin
from piecework.models.layers import map_size
from piecework.models.partition import Piece

# Convolutions per block, for models whose channels do not mark the blocks: the paper's choice for VGG.
BLOCKS = {"vgg11": (4, 4), "vgg16": (4, 4, 5)}
BASIC = "basic"  # prefix of a basic layer's name, followed by the number of its block
PARTS = 3  # blocks of a model whose channels never change: the paper cuts ViT's 12 encoders into three


def blocks_of(blueprint: Blueprint) -> list[Piece]:
    """Return the blocks theta_1 .. theta_T.

    A block is a run of atoms with equal channels, in VGG a given number of convolutions, in ViT a third of the encoders. One
    without arrays, which could not learn, is part of its neighbour.
    """
    count = len(blueprint.atoms)
    if blueprint.name in BLOCKS:
        sizes = BLOCKS[blueprint.name]
        cuts = [sum(sizes[:t]) for t in range(len(sizes) + 1)]
    else:
        channels = [atom.shape[0] if len(atom.shape) == 3 else atom.shape[-1] for atom in blueprint.atoms]
        changes = [i for i in range(1, count) if channels[i] != channels[i - 1]]
        parts = min(PARTS, count - 1)  # the embedding belongs to the first block
        cuts = [0, *changes, count] if changes else [0, *(1 + (count - 1) * t // parts for t in range(1, parts + 1))]
    return without_bare_blocks(blueprint, [tuple(range(start, stop)) for start, stop in pairwise(cuts)])


def without_bare_blocks(blueprint: Blueprint, blocks: Sequence[Piece]) -> list[Piece]:
    """Join each block that has no arrays with the block before it; at the start of a model, with the one after it.

    Raises ValueError if no block has any.
    """
    found: list[Piece] = []
    leading: Piece = ()
    for block in blocks:
        if not all(is_bare(blueprint, f"atoms.{atom}") for atom in block):
            found.append(leading + block)
            leading = ()
        elif found:
            found[-1] += block
        else:
            leading += block
    if not found:
        raise ValueError(f"model {blueprint.name!r}: no atom has parameters, so there are no blocks to train")
    return found


@dataclass(frozen=True)
class BasicLayers(Change):
    """A basic layer for each block but the first (ProFL)."""

    basic_layers: Annotated[tuple[Piece, ...], Field(min_length=1)]  # the blocks, as atoms
    basic_norm: bool = False  # a batch norm behind the convolution of each

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the model with its basic layers."""
        return with_basic_layers(model, self.basic_layers, norm=self.basic_norm)


def with_basic_layers(blueprint: Blueprint, blocks: Sequence[Piece], *, norm: bool = False) -> Blueprint:
    """Return the model with its basic layers appended as replacement atoms: `basic<t>` stands for block t (from 2).

    A block that does not change the shape of its feature map, as parts of the paper's blocks may be, has no basic layer.
    With `norm`, a batch norm of the model's kind follows each basic layer that is a convolution. Raises ValueError for a block
    that no basic layer can stand for.
    """
    basics = []
    for t, block in enumerate(blocks[1:], start=2):
        first, last = blueprint.atoms[block[0]], blueprint.atoms[block[-1]]
        before, shape = blueprint.shape_before(block[0]), last.shape
        if len(shape) == 3 and before == shape:
            continue
        if len(shape) == 3 and len(before) == 3:
            stride = max(1, round(before[1] / shape[1]))
            shape = (shape[0], *map_size(before[1:], 3, stride, 1))
            build: Callable[[], nn.Module] = partial(nn.Conv2d, before[0], shape[0], 3, stride, 1, bias=False)
            if norm:
                build = partial(_with_norm, build, shape[0], blueprint.batch_norm)
        elif first.shape == shape:
            build = first.build
        else:
            raise ValueError(f"{blueprint.name} has no basic layer for the block {first.name}..{last.name}")
        basics.append(Atom(f"{BASIC}{t}", build, shape, before))
    return replace(blueprint, atoms=(*blueprint.atoms, *basics), num_replacement_atoms=len(basics), width=1.0)


def _with_norm(build: Callable[[], nn.Module], channels: int, batch_norm: str) -> nn.Module:
    return nn.Sequential(OrderedDict(conv=build(), bn=norm_layer(channels, batch_norm)))


def basic_atoms(blueprint: Blueprint) -> dict[int, int]:
    """Return, for each block t of a model with basic layers, the atom that stands for it."""
    added = range(len(blueprint.atoms) - blueprint.num_replacement_atoms, len(blueprint.atoms))
    return {int(blueprint.atoms[atom].name.removeprefix(BASIC)): atom for atom in added}


def step_atoms(blueprint: Blueprint, blocks: Sequence[Piece], t: int) -> Piece:
    """Return the atoms of block t (from 1) and the basic layers of its output module, for a model with basic layers."""
    return *blocks[t - 1], *student_atoms(blueprint, t + 1)


def student_atoms(blueprint: Blueprint, t: int) -> Piece:
    """Return the basic layers that stand for block t and all later blocks, for a model with basic layers."""
    return tuple(atom for number, atom in basic_atoms(blueprint).items() if number >= t)


def cascade_at(blueprint: Blueprint, blocks: Sequence[Piece], t: int) -> Piece:
    """Return the model of step t: blocks 1 .. t, then the basic layers of later blocks."""
    return *(atom for block in blocks[: t - 1] for atom in block), *step_atoms(blueprint, blocks, t)
