"""ProFL's blocks and what stands in for the blocks that are not there yet (section 2, and the authors' code).

The output module of step t: a basic layer for every block behind block t, then the model's own pooling and classifier. A
basic layer is one 3 x 3 convolution to the block's channels, without bias, norm or ReLU; its stride is what the block shrinks
its map by: 2 in all of ResNet, as in the authors' code; 4 in VGG-11, of which they say nothing. For a transformer it is one
encoder (section 3.6), for an LSTM one layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch import nn

from piecework.models.cascade import Atom, Blueprint
from piecework.models.layers import map_size
from piecework.models.partition import Piece

# Convolutions a block, where channels do not tell blocks apart: the paper's rule for VGG.
BLOCKS = {"vgg11": (4, 4), "vgg16": (4, 4, 5)}
BASIC = "basic"  # what basic layers are called, with the number of the block
PARTS = 3  # of a model whose channels never change: the paper cuts ViT's 12 encoders into three blocks


def blocks_of(blueprint: Blueprint) -> list[Piece]:
    """theta_1 .. theta_T: runs of atoms with equal channels; VGG's are a given number of convolutions, ViT's thirds."""
    count = len(blueprint.atoms)
    if blueprint.name in BLOCKS:
        sizes = BLOCKS[blueprint.name]
        cuts = [sum(sizes[:t]) for t in range(len(sizes) + 1)]
    else:
        channels = [atom.shape[0] if len(atom.shape) == 3 else atom.shape[-1] for atom in blueprint.atoms]
        changes = [i for i in range(1, count) if channels[i] != channels[i - 1]]
        parts = min(PARTS, count - 1)  # of the encoders; the embedding goes with the first
        cuts = [0, *changes, count] if changes else [0, *(1 + (count - 1) * t // parts for t in range(1, parts + 1))]
    return [tuple(range(start, stop)) for start, stop in pairwise(cuts)]


def with_basic_layers(blueprint: Blueprint, blocks: Sequence[Piece]) -> Blueprint:
    """The model, and behind its atoms, as spare ones, the basic layers: `basic<t>` stands for block t (from 2).

    A block that leaves a map its shape, as parts of the paper's blocks may, has none.
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
        elif first.shape == shape:
            build = first.build
        else:
            raise ValueError(f"{blueprint.name} has no basic layer for the block {first.name}..{last.name}")
        basics.append(Atom(f"{BASIC}{t}", build, shape, before))
    return replace(blueprint, atoms=(*blueprint.atoms, *basics), spare=len(basics), width=1.0)


def basic_atoms(blueprint: Blueprint) -> dict[int, int]:
    """The atom that stands for block t, by t, of a model with basic layers."""
    spare = range(len(blueprint.atoms) - blueprint.spare, len(blueprint.atoms))
    return {int(blueprint.atoms[atom].name.removeprefix(BASIC)): atom for atom in spare}


def step_atoms(blueprint: Blueprint, blocks: Sequence[Piece], t: int) -> Piece:
    """Block t (from 1) and the basic layers of its output module, of a model with basic layers."""
    return *blocks[t - 1], *student_atoms(blueprint, t + 1)


def student_atoms(blueprint: Blueprint, t: int) -> Piece:
    """The basic layers that stand for block t and those behind it, of a model with basic layers."""
    return tuple(atom for number, atom in basic_atoms(blueprint).items() if number >= t)


def cascade_at(blueprint: Blueprint, blocks: Sequence[Piece], t: int) -> Piece:
    """The model of step t: blocks 1 .. t, then the basic layers of later blocks."""
    return *(atom for block in blocks[: t - 1] for atom in block), *step_atoms(blueprint, blocks, t)
