"""What a CPU's operators return, where fake kernels return another size, memory format or strides.

A map of one channel or one pixel is contiguous and channels-last at once. Its strides then decide the format of the next
convolution's result, and with it what later operators copy, so a trace needs the strides of the CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes

from piecework.device_profiles.dispatch import Mode
from piecework.device_profiles.workspace import lstm_kept

aten = torch.ops.aten
FILLS = {aten.uniform_.default, aten.normal_.default, aten.fill_.Scalar, aten.zero_.default}
# Elementwise operators that torch does not tag so, and those that are tagged but always keep the strides of their input.
UNTAGGED = {
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.mish_backward.default,
    aten.softplus_backward.default,
}
KEEP_STRIDES = {aten.clone.default, aten.hardtanh.default}
CONTIGUOUS = {aten.native_batch_norm.default, aten.native_layer_norm.default}
# Operators whose first result has the format that the strides of one argument suggest, by its position.
FORMAT_OF = {
    aten.native_batch_norm_backward.default: 1,
    aten.native_group_norm.default: 0,
    aten.native_group_norm_backward.default: 1,
    aten.upsample_nearest2d.default: 0,
    aten.upsample_nearest2d_backward.default: 0,
    aten.upsample_bilinear2d.default: 0,
    aten.upsample_bilinear2d_backward.default: 0,
}


class AsOnTheCPU(Mode):  # type: ignore[no-untyped-call]
    """Corrects fake results that differ from the CPU's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._fused_sgd_.default:
            return None  # it works in place without a fake kernel: the real one would run on real zeros
        if func in FILLS:
            return args[0]  # the values of initial weights do not matter
        result = func(*args, **(kwargs or {}))
        if func is aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():
            *states, _ = result  # the fake workspace is empty
            return (*states, torch.empty(lstm_kept(args), dtype=torch.uint8))
        if func is aten.mkldnn_rnn_layer_backward.default:
            *gradients, bias, _, states, cells = result  # the gradients of both biases are one tensor
            return (*gradients, bias, bias.clone(), states, cells)
        if func is aten.native_batch_norm.default and args[1] is not None:
            # The statistics have the precision of the weights, whatever that of the input.
            result = (result[0], *(tensor.to(args[1].dtype) for tensor in result[1:]))
        if func is aten.native_batch_norm_backward.default:
            gradient, *others = result  # it has the format of the incoming gradient
            result = (_lay_as(gradient, args[1]), *others)
        if func is aten.view.default:
            return _view_as_on_meta(result, args[0])
        made = result[0] if isinstance(result, tuple) and result else result
        if isinstance(made, Tensor) and made.dim() == 4 and (layout := _format(func, args, made)):
            _stride(made, layout)
        return result


def _view_as_on_meta(view: Tensor, viewed: Tensor) -> Tensor:
    """Return a view with the strides that a CPU computes anew for dimensions of one element; the fake kernel keeps the old."""
    if 1 not in view.shape:
        return view
    with _disable_current_modes():
        like = torch.empty_strided(viewed.shape, viewed.stride(), device="meta").view(view.shape)
    return view if view.stride() == like.stride() else view.as_strided(view.shape, like.stride(), view.storage_offset())


def _lay_as(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    """Return a tensor in the memory format of another, channels-last or not."""
    channels_last = other.dim() == 4 and other.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return tensor if tensor is None else tensor.contiguous(memory_format=layout)


def _of_both_formats(tensor: Tensor) -> bool:
    """Return whether maps have one channel or one pixel."""
    formats = (torch.contiguous_format, torch.channels_last)
    return all(tensor.is_contiguous(memory_format=each) for each in formats)


def _format(func: Any, args: tuple[Any, ...], made: Tensor) -> torch.memory_format | None:
    """Return the format whose strides the CPU gives to maps, None if those of the fake kernel are right.

    An elementwise operator prefers contiguous strides if its inputs all have one shape and are contiguous.
    """
    if func in FORMAT_OF:
        return suggest_memory_format(args[FORMAT_OF[func]])
    if not _of_both_formats(made):
        return None
    if func in CONTIGUOUS:
        return torch.contiguous_format
    elementwise = torch.Tag.pointwise in func.tags or func in UNTAGGED
    if not elementwise or func._schema.is_mutable or func in KEEP_STRIDES or func._overloadname == "Scalar":
        return None
    # A number where a tensor may stand is of another shape.
    taken = [arg for arg, slot in zip(args, func._schema.arguments, strict=False) if str(slot.type) == "Tensor"]
    same = all(isinstance(arg, Tensor) and arg.shape == made.shape and arg.is_contiguous() for arg in taken)
    return torch.contiguous_format if same else None


def _stride(made: Tensor, layout: torch.memory_format) -> None:
    """Give a map the strides of a format."""
    _, channels, height, width = made.shape
    size = channels * height * width
    plain = layout is torch.contiguous_format
    strides = (size, height * width, width, 1) if plain else (size, 1, width * channels, channels)
    if made.stride() != strides:
        made.as_strided_(made.shape, strides)
