"""Strided 1x1 convolutions of a few channels, which torch may not be asked for as they are.

On CPUs with AVX2 but without AVX-512, oneDNN's gradient of such a layer's weights writes beyond its memory where maps are
channels last: torch 2.15 then ends in a segmentation fault, or never. It was seen with 2 to 7 input channels and a stride of 2;
narrow residual networks have such shortcuts. A 1x1 convolution reads no pixel between its strides. So those are left out
first, and what is left has a stride of 1. It is done on every machine: a trace then predicts the memory of all of them.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ENOUGH = 8  # channels: the values in a register of AVX2


def convolve_strided(stride: tuple[int, ...], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the 1x1 convolution of x[B, C, H, W] with a stride.

    The weights decide how, not the layer: they may be the first channels of it, or those that pruning has left.
    """
    if not 1 < weight.shape[1] < ENOUGH:
        return F.conv2d(x, weight, bias, stride)
    read = x[..., :: stride[0], :: stride[1]]
    if x.dim() == 4:
        read = read.contiguous(memory_format=torch.channels_last)
    return F.conv2d(read, weight, bias)


def leave_out_unread(module: nn.Module) -> nn.Module:
    """Have the strided 1x1 convolutions of a module read their pixels first if they have few channels. Returns the module."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and is_pointwise_and_strided(layer):
            layer._conv_forward = partial(convolve_strided, layer.stride)  # type: ignore[method-assign]
    return module


def is_pointwise_and_strided(layer: nn.Conv2d) -> bool:
    """Return whether torch may not be asked for a layer as it is if it has a few channels."""
    plain = layer.groups == 1 and set(layer.kernel_size) == {1} and layer.padding in ((0, 0), "valid")
    return plain and max(layer.stride) > 1 and type(layer)._conv_forward is nn.Conv2d._conv_forward
