"""PriSM's count of memory (Table 1, "Mem"): outputs of the factorised convolutions and of their norms, of a batch.

Conv_V, Conv_U and the norm count one map each, a whole convolution and its norm one each; neither the first atom, nor
shortcuts, nor the head count, nor zeros for channels that are not computed: the only reading that gives the full ResNet-18's
31.5 M. The table's unit is elements; 4 bytes each are ours.
"""

from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.part import Part
from piecework.training.sgd import TrainingConfig

NORMS = ("BatchNorm2d", "PaddedNorm")


def memory_bytes(part: Part, reference: Blueprint, training_config: TrainingConfig) -> float:
    """Bytes of training a part. Raises ValueError for a model without convolutions behind its first atom."""
    elements = 0
    for atom in part.atoms:
        if atom == 0:
            continue
        for layer in layer_statistics(part.blueprint, f"atoms.{atom}").layers:
            if not layer.on_shortcut:
                elements += layer.outputs * (layer.kind == "Conv2d") + layer.inputs * (layer.kind in NORMS)
    if not elements:
        raise ValueError(
            f"memory.model prism counts convolutions behind the first atom: {part.blueprint.name} has none"
        )
    return 4 * part.copies * training_config.batch_size * elements
