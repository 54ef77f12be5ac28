"""The layers of a model with their sizes and costs, from a run of each unit on fake tensors that allocates no weights.

Only servers use it, as everything that needs fake tensors (see `trace` in device_profiles/memory.py).
"""

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from piecework.device_profiles.trace_cache import recall
from piecework.models.cascade import Blueprint, Shape
from piecework.models.masked import Masked

EXAMPLES = 2  # batch norm over one example of one pixel has no variance


@dataclass(frozen=True)
class Layer:
    """A layer without sublayers.

    `inputs` and `outputs` are elements per example, `weight` is the shape of its weight, if any, and `thresholds` the number of
    its SpaFL thresholds.
    """

    kind: str
    path: str
    inputs: int
    outputs: int
    parameters: int
    weight: Shape
    thresholds: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates per example of a convolution or a linear layer; 0 for others."""
        return self.outputs * math.prod(self.weight[1:]) if self.kind in ("Conv2d", "Linear") else 0

    @property
    def on_shortcut(self) -> bool:
        """Whether the layer is on the shortcut of a residual block."""
        return self.path.split(".")[0] in ("downsample", "shortcut")


@dataclass(frozen=True)
class LayerStatistics:
    """A unit's layers, trainable parameters, bytes of its state (including buffers), and forward FLOPs per example."""

    layers: tuple[Layer, ...]
    parameters: int
    state_bytes: int
    flops: int


_KNOWN: dict[Hashable, LayerStatistics] = {}


@lru_cache(maxsize=4096)
def layer_statistics(blueprint: Blueprint, unit: str) -> LayerStatistics:
    """Return the statistics of a unit (`atoms.<i>`, `head`, `exits.<i>`, `aux.<i>`). Units built alike are examined once."""
    key = unit_signature(blueprint, unit)
    if key not in _KNOWN:
        _KNOWN[key] = recall(_examine, blueprint, unit)
    return _KNOWN[key]


@lru_cache(maxsize=4096)  # a plan asks for those of each client's parts in each round
def unit_signature(blueprint: Blueprint, unit: str) -> Hashable:
    """Return a key that is equal for units built alike with inputs of the same shape, so that they cost the same."""
    kind, _, index = unit.partition(".")
    if kind == "head":
        return "head", _call(blueprint.build_head), blueprint.feature_shape
    atom = int(index)
    if kind == "atoms":
        read = blueprint.vocabulary, blueprint.stored_shape
        return "atom", _call(blueprint.atoms[atom].build), blueprint.shape_before(atom), *read
    return kind, blueprint.atoms[atom].shape, blueprint.num_classes, blueprint.batch_norm, blueprint.auxiliary_pool


def _call(build: Any) -> Hashable:
    """Return a key for what a factory does: for a partial, the function and its arguments."""
    if not isinstance(build, partial):
        return cast(Hashable, build)
    function: Hashable = build.func
    call = function, tuple(map(_call, build.args)), tuple((key, _call(v)) for key, v in build.keywords.items())
    try:
        hash(call)
    except TypeError:  # an argument such as a list: the factory is compared by identity
        return cast(Hashable, build)
    return call


def input_of(blueprint: Blueprint, unit: str) -> Shape:
    """Return the shape of one example at the input of a unit."""
    kind, _, index = unit.partition(".")
    if kind == "head":
        return blueprint.feature_shape
    return blueprint.shape_before(int(index)) if kind == "atoms" else blueprint.atoms[int(index)].shape


def _examine(blueprint: Blueprint, unit: str) -> LayerStatistics:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from piecework.device_profiles.memory import FlopCount

    layers: list[Layer] = []

    def note(path: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        weight = getattr(layer, "weight", None)
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
        parameters = sum(p.numel() for p in layer.parameters())
        sizes = inputs[0].numel() // EXAMPLES, first.numel() // EXAMPLES
        own = len(layer.tau) if isinstance(layer, Masked) else 0
        kind = re.sub("^(Masked|Dual|Nested)", "", type(layer).__name__).replace("SilentNorm", "BatchNorm")
        layers.append(Layer(kind, path, *sizes, parameters, shape, own))

    shape = input_of(blueprint, unit)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(), torch.no_grad():
        module = blueprint.build_unit(unit)
        for path, layer in module.named_modules():
            if not any(layer.children()):
                layer.register_forward_hook(partial(note, path))
        tokens = unit == "atoms.0" and blueprint.vocabulary > 0
        example = torch.zeros(EXAMPLES, *shape, dtype=torch.int64 if tokens else torch.float32)
        with FlopCount() as counter:
            module(example)
    return LayerStatistics(
        layers=tuple(layers),
        parameters=sum(p.numel() for p in module.parameters()),
        state_bytes=sum(value.numel() * value.element_size() for value in module.state_dict().values()),
        flops=counter.total // EXAMPLES,
    )
