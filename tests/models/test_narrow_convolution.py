"""Strided 1x1 convolutions of a few channels, with which torch would end in a segmentation fault on some CPUs."""

import copy

import pytest
import torch
from torch import Tensor, nn

from piecework.models.narrow_convolution import is_narrow_and_strided
from piecework.training.loop import channels_last


def gradients(layer: nn.Conv2d, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the gradients of their squares with respect to inputs and weights."""
    x, layer.weight.grad = x.detach().requires_grad_(), None
    out = layer(x)
    out.square().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return out.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("channels", range(2, 8))
@pytest.mark.parametrize("size", [16, 15])
def test_it_computes_what_the_layer_computes(channels: int, size: int) -> None:
    torch.manual_seed(channels)
    layer = nn.Conv2d(channels, 2 * channels, 1, stride=2, bias=channels % 2 == 0)
    exact = copy.deepcopy(layer).double()  # oneDNN has no float64
    x = torch.randn(4, channels, size, size)
    expected = gradients(exact, x.double())
    channels_last(layer)
    for _ in range(20):  # it took a few steps until memory was damaged
        found = gradients(layer, x.contiguous(memory_format=torch.channels_last))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert "_conv_forward" in copy.deepcopy(layer).__dict__


@pytest.mark.parametrize(
    ("layer", "narrow"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), True),
        (nn.Conv2d(4, 8, 1, stride=(1, 2)), True),
        (nn.Conv2d(1, 2, 1, stride=2), False),
        (nn.Conv2d(8, 16, 1, stride=2), False),
        (nn.Conv2d(4, 8, 1), False),
        (nn.Conv2d(4, 8, 3, stride=2), False),
        (nn.Conv2d(4, 8, 1, stride=2, padding=1), False),
        (nn.Conv2d(4, 8, 1, stride=2, groups=2), False),
    ],
)
def test_other_layers_stay_as_they_are(layer: nn.Conv2d, narrow: bool) -> None:
    assert is_narrow_and_strided(layer) == narrow
    assert ("_conv_forward" in channels_last(layer).__dict__) == narrow
