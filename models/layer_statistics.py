"""The layers of a model with their sizes and costs, found by running each unit on fake tensors: no weight is allocated.

A server's affair, like all that uses fake tensors (see `trace` in device_profiles/memory.py).
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from piecework.models.cascade import Blueprint, Shape
from piecework.models.masked import Masked

EXAMPLES = 2  # batch norm over one example of one pixel has no variance


@dataclass(frozen=True)
class Layer:
    """A layer without layers inside. `inputs`, `outputs`: elements of one example; `weight`: its weight's shape, if any.

    `thresholds`: how many SpaFL's has.
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
        """Multiply-accumulates of one example, of a convolution or a linear layer; 0 of others."""
        return self.outputs * math.prod(self.weight[1:]) if self.kind in ("Conv2d", "Linear") else 0

    @property
    def on_shortcut(self) -> bool:
        """Whether the layer is on the shortcut of a residual block."""
        return self.path.split(".")[0] in ("downsample", "shortcut")


@dataclass(frozen=True)
class LayerStatistics:
    """A unit: its layers, trainable parameters, bytes of its state (buffers too), forward FLOPs of one example."""

    layers: tuple[Layer, ...]
    parameters: int
    state_bytes: int
    flops: int


_KNOWN: dict[Hashable, LayerStatistics] = {}


@lru_cache(maxsize=4096)
def layer_statistics(blueprint: Blueprint, unit: str) -> LayerStatistics:
    """What a unit (`atoms.<i>`, `head`, `exits.<i>`, `aux.<i>`) consists of. Units that are built alike are looked at once."""
    key = unit_signature(blueprint, unit)
    if key not in _KNOWN:
        _KNOWN[key] = _examine(blueprint, unit)
    return _KNOWN[key]


def unit_signature(blueprint: Blueprint, unit: str) -> Hashable:
    """Equal for units that are built alike and get inputs of the same shape, so that they cost the same."""
    kind, _, index = unit.partition(".")
    if kind == "head":
        return "head", _call(blueprint.build_head), blueprint.feature_shape
    atom = int(index)
    if kind == "atoms":
        return "atom", _call(blueprint.atoms[atom].build), blueprint.shape_before(atom), blueprint.vocabulary
    return kind, blueprint.atoms[atom].shape, blueprint.num_classes, blueprint.batch_norm


def _call(build: Any) -> Hashable:
    """What a factory does: for a partial, the function and its arguments."""
    if not isinstance(build, partial):
        return cast(Hashable, build)
    function: Hashable = build.func
    call = function, tuple(map(_call, build.args)), tuple((key, _call(v)) for key, v in build.keywords.items())
    try:
        hash(call)
    except TypeError:  # an argument such as a list: this factory is like no other
        return cast(Hashable, build)
    return call


def input_of(blueprint: Blueprint, unit: str) -> Shape:
    """The shape of one example at the entrance of a unit."""
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
        kind = type(layer).__name__.removeprefix("Masked").removeprefix("Dual").replace("SilentNorm", "BatchNorm")
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
