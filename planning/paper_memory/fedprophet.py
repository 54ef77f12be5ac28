"""FedProphet's memory of modules, MemReq of its Algorithm 1, and its authors' count of multiply-accumulates."""

from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.part import Part
from piecework.training.sgd import TrainingConfig


def memory_bytes(part: Part, reference: Blueprint, training_config: TrainingConfig) -> float:
    """MemReq: weights, gradients and the optimiser's state, 4 bytes each, and what the backward pass needs of a whole batch.

    The authors charge three values of state for Adam, which keeps two.
    """
    copies = (2, 3, 5)[training_config.moments]
    return 4 * part.copies * (copies * part.parameters + training_config.batch_size * part.features)


def macs(part: Part, batch_size: int) -> int:
    """The authors' count of a batch's forward pass: multiply-accumulates, 5 an element of batch norm, 1 of average pooling."""
    layers = [layer for unit in part.units for layer in layer_statistics(part.blueprint, unit).layers]
    others = {"BatchNorm2d": 5, "AdaptiveAvgPool2d": 1}
    return batch_size * sum(layer.macs + others.get(layer.kind, 0) * layer.inputs for layer in layers)
