"""ProFL's blocks and what stands in for the blocks that are not there yet (section 2, and the authors' code).

The output module of step t: a basic layer for every block behind block t, then the model's own pooling and classifier. A
basic layer is one 3 x 3 convolution to the block's channels, without bias, norm or ReLU; its stride is what the block shrinks
its map by: 2 in all of ResNet, as in the authors' code; 4 in VGG-11, of which they say nothing. For a transformer it is one
encoder (section 3.6), for an LSTM one layer.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch import nn

from models.cascade import Atom, Blueprint
from models.layers import map_size
from models.partition import Piece

# Convolutions a block, where channels do not tell blocks apart: the paper's rule for VGG.
BLOCKS = {"vgg11": (4, 4), "vgg16": (4, 4, 5)}
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


def at_step(blueprint: Blueprint, t: int) -> Blueprint:
    """The model of step t (from 1): blocks 1..t, then a basic layer for each later block, then the head."""
    blocks = blocks_of(blueprint)
    atoms = list(blueprint.atoms[: blocks[t - 1][-1] + 1])
    for number, block in enumerate(blocks[t:], start=t + 1):
        first, last = blueprint.atoms[block[0]], blueprint.atoms[block[-1]]
        before, shape = atoms[-1].shape, last.shape
        if len(shape) == 3:
            stride = max(1, round(before[1] / shape[1]))
            shape = (shape[0], *map_size(before[1:], 3, stride, 1))
            build: Callable[[], nn.Module] = partial(nn.Conv2d, before[0], shape[0], 3, stride, 1, bias=False)
        elif first.shape == shape:
            build = first.build
        else:
            raise ValueError(f"{blueprint.name} has no basic layer for the block {first.name}..{last.name}")
        atoms.append(Atom(f"basic{number}", build, shape))
    return replace(blueprint, atoms=tuple(atoms), width=1.0)
