"""Strided 1x1 convolutions of a few channels, with which torch would end in a segmentation fault on some CPUs."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.models.cascade import Blueprint, isolate_rng
from piecework.models.compact import layout
from piecework.models.masked import mask_model
from piecework.models.memory_layout import channels_last
from piecework.models.narrow_convolution import ENOUGH, is_pointwise_and_strided, leave_out_unread
from piecework.models.zoo import build_blueprint
from piecework.strategies.sparse.spafl.forms import SparseModel
from piecework.strategies.width.fjord.client import NestedLoss
from piecework.training.loop import PieceModel, single_loss


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
    channels_last(leave_out_unread(layer))
    for _ in range(20):  # it took a few steps until memory was damaged
        found = gradients(layer, x.contiguous(memory_format=torch.channels_last))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert "_conv_forward" in copy.deepcopy(layer).__dict__


@pytest.mark.parametrize(
    ("layer", "pointwise"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), True),
        (nn.Conv2d(4, 8, 1, stride=(1, 2)), True),
        (nn.Conv2d(8, 16, 1, stride=2), True),
        (nn.Conv2d(4, 8, 1), False),
        (nn.Conv2d(4, 8, 3, stride=2), False),
        (nn.Conv2d(4, 8, 1, stride=2, padding=1), False),
        (nn.Conv2d(4, 8, 1, stride=2, groups=2), False),
    ],
)
def test_other_layers_stay_as_they_are(layer: nn.Conv2d, pointwise: bool) -> None:
    assert is_pointwise_and_strided(layer) == pointwise
    assert ("_conv_forward" in leave_out_unread(layer).__dict__) == pointwise


class Standardised(nn.Conv2d):
    """A convolution of one's own, whose weights are ones."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, torch.ones_like(weight), bias)


def test_a_convolution_of_ones_own_keeps_its_forward() -> None:
    layer = leave_out_unread(Standardised(4, 2, 1, stride=2, bias=False))
    assert torch.equal(layer(torch.ones(1, 4, 3, 3)), torch.full((1, 2, 2, 2), 4.0))


def test_it_takes_one_image_without_a_batch() -> None:
    layer = nn.Conv2d(4, 2, 1, stride=2)
    x = torch.randn(4, 5, 5)
    expected = layer(x)
    torch.testing.assert_close(leave_out_unread(layer)(x), expected)


class Gradients(TorchDispatchMode):
    """Counts the gradients of convolutions, and keeps the channels of those that torch may not be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.narrow = 0, list[int]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.count += 1
            weight, stride, groups = args[2], args[4], args[9]
            if weight.shape[2:] == (1, 1) and max(stride) > 1 and groups == 1 and 1 < weight.shape[1] < ENOUGH:
                self.narrow.append(weight.shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("channels", [2, 8])
def test_a_layer_is_asked_for_as_it_is_if_it_has_enough_channels(channels: int) -> None:
    layer = leave_out_unread(nn.Conv2d(channels, 4, 1, stride=2))
    x = torch.randn(2, channels, 5, 5, requires_grad=True)
    read = layer(x).grad_fn.next_functions[0][0]
    assert ("AccumulateGrad" in read.name()) == (channels == 8)


def residual(width: float) -> Blueprint:
    """A residual net whose shortcuts have 16 and 32 channels, times the width."""
    return build_blueprint("preresnet20", num_classes=10, input_shape=(3, 8, 8), width=width, batch_norm="batch")


def seen_in(loss: Callable[[Tensor, Tensor], Tensor], blueprint: Blueprint) -> Gradients:
    with isolate_rng(3):
        z, y = torch.randn(4, *blueprint.input_shape), torch.arange(4)
    with Gradients() as seen:
        loss(z, y).backward()  # type: ignore[no-untyped-call]
    assert seen.count > 0
    return seen


@pytest.mark.parametrize("distil", [False, True])
def test_nets_within_a_wider_one_leave_their_unread_pixels_out(distil: bool) -> None:
    """FjORD's nets take their weights from the whole piece; the widest has 16 channels at its first shortcut, they 8 and 4."""
    whole, *narrow = (residual(width) for width in (1.0, 0.5, 0.25))
    piece = PieceModel(whole, range(len(whole.atoms)), "head", whole.build_unit)
    loss = NestedLoss(piece, narrow, distil=distil)
    for level in range(3):
        loss.level = level
        assert seen_in(loss, whole).narrow == []


def test_a_compact_form_leaves_its_unread_pixels_out() -> None:
    plain = residual(0.25)
    blueprint = mask_model(plain)
    with isolate_rng(1):
        model = SparseModel(blueprint, range(len(blueprint.atoms)), "head", blueprint.build_unit)
    with torch.no_grad():
        for layer in model.layers():
            layer.tau[::2] = 1.0
    small, _ = model.compact(layout(plain, blueprint))
    small.train(True)
    assert seen_in(single_loss([small]), plain).narrow == []
