"""Modules whose code reads values of tensors while they are built."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source, make
from piecework.models.zoo import build_blueprint

DIGIT = (1, 8, 8)


class Layers(nn.Module):
    """Linear layers with dropout at given rates."""

    def __init__(self, classes: int, rates: list[float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(rate), nn.ReLU()) for rate in rates))
        self.out = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x.flatten(1)))


class Scaled(Layers):
    """Has a weight and a buffer that are made of series."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, [float(torch.tensor(0.5))])
        self.scale = nn.Parameter(torch.linspace(1, 2, 64))
        self.again = self.scale
        self.register_buffer("places", torch.arange(64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1) * self.scale * self.again + self.places)


class Drawn(Layers):
    """Asks for what no series has."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, [torch.rand(1).item()])


def rising(num_classes: int, input_shape: Any) -> nn.Module:
    """Has the rates of stochastic depth as most code for it computes them."""
    return Layers(num_classes, [rate.item() for rate in torch.linspace(0, 0.3, 4)])


def scaled(num_classes: int, input_shape: Any) -> nn.Module:
    return Scaled(num_classes)


def drawn(num_classes: int, input_shape: Any) -> nn.Module:
    return Drawn(num_classes)


def source_of(function: Callable[..., nn.Module]) -> Source:
    return Source(f"{__file__}:{function.__name__}", 10, DIGIT, "running")


def test_rates_that_are_read_from_a_series_are_those_of_the_module() -> None:
    found = cut(source_of(rising))
    assert found.names == ("layers_0_0", "layers_1_0", "layers_2_0", "layers_3_0"), found.reason
    rates = [layer.p for part in found.parts for layer in part.modules() if isinstance(layer, nn.Dropout)]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])


def test_arrays_that_were_made_of_series_have_no_values_and_stay_one() -> None:
    source = source_of(scaled)
    found = cut(source)
    arrays = [*found.parts[0].parameters(), *found.parts[0].buffers()]
    assert all(array.is_meta for array in arrays)
    assert sorted(tuple(array.shape) for array in arrays) == [(64,), (64,), (64,), (64, 64)]
    blueprint = build_blueprint(source.name, num_classes=10, input_shape=DIGIT, batch_norm="running")
    weights = blueprint.build_unit("atoms.0").state_dict()
    assert torch.equal(weights["scale"], torch.linspace(1, 2, 64)) and torch.equal(weights["places"], torch.arange(64))


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"test_building\.py:drawn' asks for values while it is built"):
        cut(source_of(drawn))
    assert isinstance(make(source_of(drawn)), nn.Module)
