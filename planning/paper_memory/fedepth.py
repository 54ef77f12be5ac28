"""FeDepth's own memory of sub-problems (its Table 1): pytorch-summary's estimate, without the first atom and the head."""

from collections.abc import Sequence
from math import prod

from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.part import Part
from piecework.training.sgd import TrainingConfig


def memory_bytes(part: Part, reference: Blueprint, training_config: TrainingConfig) -> float:
    """FeDepth's own memory (its Table 1): a whole model of width r costs r times the full one, M models M times one."""
    if not part.whole:
        return fedepth_cost(part.blueprint, part.atoms, training_config.batch_size)
    width = part.blueprint.width
    full = fedepth_full_bytes(part.blueprint if width == 1 else reference, training_config.batch_size)
    return part.copies * width * full


def fedepth_cost(blueprint: Blueprint, atoms: Sequence[int], batch_size: int = 32) -> float:
    """The bytes of a sub-problem by pytorch-summary's estimate.

    2 x 4 bytes x the outputs of all layers that are modules, and of each block itself, x batch, + 4 bytes x parameters.
    Neither the stem (atom 0) nor the head is charged, and shortcuts count as if they had no parameters (option A).
    """
    return sum(_block_bytes(blueprint, atom, batch_size, shortcut_parameters=False) for atom in atoms if atom)


def fedepth_full_bytes(blueprint: Blueprint, batch_size: int = 32) -> float:
    """Return FeDepth's bytes of the whole model: all blocks with 1x1 shortcuts, the stem's convolution and the linear layer."""
    blocks = sum(_block_bytes(blueprint, atom, batch_size) for atom in range(1, len(blueprint.atoms)))
    stem = _layer_bytes(blueprint, "atoms.0", batch_size, ("Conv2d",))
    return stem + blocks + _layer_bytes(blueprint, "head", batch_size, ("Linear",))


def _block_bytes(blueprint: Blueprint, atom: int, batch_size: int, *, shortcut_parameters: bool = True) -> float:
    own_output = 2 * 4 * batch_size * prod(blueprint.atoms[atom].shape)
    total = own_output + _layer_bytes(blueprint, f"atoms.{atom}", batch_size, ("Conv2d", "BatchNorm2d", "Linear"))
    on_shortcut = [
        x.parameters for x in layer_statistics(blueprint, f"atoms.{atom}").layers if x.path.startswith("shortcut")
    ]
    return total - (0 if shortcut_parameters else 4 * sum(on_shortcut))


def _layer_bytes(blueprint: Blueprint, unit: str, batch_size: int, kinds: tuple[str, ...]) -> float:
    """2 x 4 bytes x outputs of the layers of these kinds x batch + 4 bytes x their parameters."""
    layers = [layer for layer in layer_statistics(blueprint, unit).layers if layer.kind in kinds]
    return sum(2 * 4 * batch_size * layer.outputs + 4 * layer.parameters for layer in layers)
