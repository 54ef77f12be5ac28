"""The papers' own memory models for a part of a model, by the name that `memory.model` gives them."""

from collections.abc import Callable

from piecework.models.cascade import Blueprint
from piecework.planning.paper_memory import fedepth, fedprophet, prism, profl
from piecework.planning.part import Part
from piecework.training.sgd import TrainingConfig

# Bytes of training a part by a paper's own memory model: (part, the model at width 1, training config) -> bytes
MemoryModel = Callable[[Part, Blueprint, TrainingConfig], float]

MEMORY_MODELS: dict[str, MemoryModel] = {
    "fedepth": fedepth.memory_bytes,
    "fedprophet": fedprophet.memory_bytes,
    "prism": prism.memory_bytes,
    "profl": profl.memory_bytes,
}

# A paper's own count of a batch's forward pass in multiply-accumulates: (part, batch size) -> MACs
MACS: dict[str, Callable[[Part, int], int]] = {"fedprophet": fedprophet.macs}
