"""Helpers of the architecture files: scaled widths, map sizes, named layers and checks of options.

Every ReLU after a convolution or a norm works in place, as torchvision's do: neither layer needs its output for its gradient,
so one feature map less is held. An atom never changes its input, which may be a cached feature or another atom's residual.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import ceil

from torch import Tensor, nn

from piecework.device_profiles.names import did_you_mean
from piecework.models.cascade import Shape, group_norm
from piecework.models.frozen_norm import FrozenBatchNorm1d


def stack_layers(**layers: nn.Module) -> nn.Sequential:
    """Return layers in sequence, with names rather than numbers in the state dict."""
    row = nn.Sequential()
    for name, layer in layers.items():
        row.add_module(name, layer)
    return row


def pooled_linear(channels: int, num_classes: int) -> nn.Sequential:
    """Return a head: global average pooling, then a linear layer; logits[B, classes] for z[B, C, H, W]."""
    return stack_layers(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, num_classes))


def norm_layer_1d(features: int, batch_norm: str) -> nn.Module:
    """Return the norm after a linear layer for the same values as `norm_layer` of models/cascade.py, which is that of maps."""
    if batch_norm == "group":
        return group_norm(features)
    if batch_norm == "frozen":
        return FrozenBatchNorm1d(features)
    return nn.BatchNorm1d(features, track_running_stats=batch_norm != "batch")


TINY = 1e-9  # 0.1 of 30 channels is 3, although 30 * 0.1 is above 3
_RATIO = ContextVar("ratio", default=1.0)


def scale_channels(channels: int, width: float) -> int:
    """Return the channels of a layer at width ratio `width`, rounded down, but at least one.

    Within `narrow_models(r)` it is the fraction r of the channels at width ratio `width` / r, rounded up.
    """
    ratio = _RATIO.get()
    if ratio == 1:
        return max(1, int(channels * width))
    whole = max(1, int(channels * (width / ratio) + TINY))
    return ceil(whole * ratio - TINY)


def narrowing() -> float:
    """Return the ratio of the enclosing `narrow_models`, 1 outside."""
    return _RATIO.get()


@contextmanager
def narrow_models(ratio: float) -> Iterator[None]:
    """Build models as sub-models of a fraction `ratio` of the channels, rounded up: HeteroFL, FedRolex and FjORD define it so.

    Their `width` has this factor already. Models that do not call `scale_channels` round as they do.
    """
    token = _RATIO.set(ratio)
    try:
        yield
    finally:
        _RATIO.reset(token)


def divide_output(layer: nn.Module, ratio: float) -> None:
    """Divide what a layer returns by `ratio`, in place (HeteroFL's Scaler)."""
    layer.register_forward_hook(partial(_divide, ratio))


def _divide(ratio: float, _: nn.Module, __: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out.div_(ratio)


def map_size(size: Sequence[int], kernel: int, stride: int = 1, padding: int = 0) -> tuple[int, int]:
    """Return (H, W) after a convolution or pooling of (H, W)."""
    height, width = ((edge + 2 * padding - kernel) // stride + 1 for edge in size)
    return height, width


def require_size(model: str, input_shape: Shape, minimum: int) -> None:
    """Raise ValueError if an image is too small to leave a map at the end of the model."""
    if min(input_shape[1:]) < minimum:
        height, width = input_shape[1:]
        raise ValueError(f"{model} needs images of at least {minimum}x{minimum} pixels, got {height}x{width}")


def require_one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError if an option has an unknown value."""
    if value not in allowed:
        near = did_you_mean(value, allowed)
        raise ValueError(f"{option} = {value!r} is not known: use one of {', '.join(allowed)}{near}")


def require_at_least_one(option: str, value: int) -> None:
    """Raise ValueError if an option that counts something is below 1."""
    if value < 1:
        raise ValueError(f"{option} = {value} is not allowed: use a whole number from 1")
