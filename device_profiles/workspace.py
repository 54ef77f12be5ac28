"""Internal allocations of CPU operators, which a dispatch mode cannot see, and FLOPs of operators that torch does not count.

The formulas were derived from torch.profiler's memory events on one thread of an x86 with AVX-512. Most are oneDNN's own
layouts, and second copies of gradients that arrive in another memory format, as after flattening a map. On other processors,
where nothing was measured, the formulas are a guess.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _relaid(gradient: Tensor, *copied: Tensor) -> int:
    """Return the bytes that are copied if a gradient is not in the memory format of the layer's input, `copied[0]`."""
    formats = {tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (gradient, copied[0])}
    return sum(map(_bytes, copied)) if len(formats) > 1 else 0


def _pad_row(features: int, item: int = 4) -> int:
    """Return oneDNN's row length for `features` items of `item` bytes: whole cache lines.

    It is no multiple of 256, which avoids aliasing.
    """
    line = 64 // item
    rounded = -(-features // line) * line
    return rounded + line if rounded % 256 == 0 else rounded


def _in_pages(*sizes: int) -> int:
    """Return the bytes of arrays that each begin on a page of 4096 bytes."""
    return sum(-(-size // 4096) * 4096 for size in sizes)


def _lstm_sizes(args: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """Return length, batch, inputs and hidden features of an LSTM layer in oneDNN: x[T, B, D], w[4H, D], w[4H, H]."""
    length, batch, inputs = args[0].shape
    return length, batch, inputs, args[2].shape[1]


def lstm_kept(args: tuple[Any, ...]) -> int:
    """Return the bytes that oneDNN's LSTM keeps for its backward pass (set_workspace_sizes in its rnn_utils.hpp).

    It keeps gates and hidden states of all steps. For one more step and layer it keeps states, cells, and room for the
    gradients of both, which are always float32.
    """
    (T, B, D, H), item = _lstm_sizes(args), args[0].element_size()
    steps, widest = 2 * (T + 1) * B, max(D, H)
    gates, hidden = T * B * item * _pad_row(4 * H, item), T * B * item * _pad_row(H, item)
    states, cells = steps * item * _pad_row(widest, item), steps * item * H
    gradients, cell_gradients = steps * 4 * _pad_row(widest), steps * 4 * H
    return _in_pages(gates, hidden, states, cells, gradients, gradients, cell_gradients)


def _lstm_forward(args: tuple[Any, ...]) -> int:
    """Return the bytes of the summed biases, the weights in oneDNN's layout, all steps' gates before activation, and tables."""
    T, B, D, H = _lstm_sizes(args)
    row = 4 * B * _pad_row(H)
    if torch.is_grad_enabled():
        return 16 * H + 4 * (D + H) * _pad_row(4 * H) + _in_pages(4 * T * B * _pad_row(4 * H), row, row) + 4664
    # Without gradients the weights come in blocks of 32, and states and cells are scratch.
    steps = 2 * (T + 1) * B
    kept = _in_pages(4 * steps * _pad_row(max(D, H)), 4 * steps * H, 4 * B * _pad_row(4 * H), row)
    return 16 * H + 16 * (D + H) * _blocks(H, 32) + kept + 4872


def _lstm_backward(args: tuple[Any, ...]) -> int:
    """Return the bytes as in the forward pass for the weights' gradients, plus padded weights, and gradients as they are read.

    Gradients of the sequence, the last state and the last cell are copied to be contiguous; zeros stand for those not given.
    """
    T, B, D, H = _lstm_sizes(args)
    row = 4 * B * _pad_row(H)
    scratch = _in_pages(4 * T * B * _pad_row(4 * H), row, row) + 4664
    weights = sum(16 * H * _pad_row(features) for features in (D, H) if features != _pad_row(features))
    sequence, hidden, cell = args[7], args[5], args[6]
    read = sum(_as_read(*each) for each in zip(args[10:13], (sequence, hidden, cell), strict=True))
    return 16 * H + 4 * (D + H) * _pad_row(4 * H) + scratch + weights + read


def _as_read(gradient: Tensor | None, like: Tensor) -> int:
    """Return the bytes of float32 zeros for a gradient that is not given, or of a copy of one that is not contiguous."""
    if gradient is None:
        return 4 * like.numel()
    return 0 if gradient.is_contiguous() else _bytes(gradient)


def _count_copies(layout: Tensor, *tensors: Tensor) -> int:
    """Return the bytes of tensors that a convolution copies because its weight, `layout`, is channels-last and they are not."""
    if not layout.is_contiguous(memory_format=torch.channels_last):
        return 0
    return sum(_bytes(t) for t in tensors if not t.is_contiguous(memory_format=torch.channels_last))


def _convolution(args: tuple[Any, ...]) -> int:
    """Return the bytes of the weight in oneDNN's layout, with output channels in blocks of 16."""
    x, weight = args[:2]
    outputs: int = weight.shape[0]
    return _bytes(weight) // outputs * _blocks(outputs) + _count_copies(weight, x) + 8216


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """Return the peak bytes over the gradients of the input and then the weight, with copies to other formats during both."""
    (gradient, x, weight), (for_input, for_weight, _) = args[:3], args[10]
    outputs, inputs, *kernel = weight.shape
    returned = _bytes(weight)
    filter_bytes = returned // (outputs * inputs)
    inside = 0
    if for_input:  # the weight in oneDNN's layout, and tables; the weight's gradient does not exist yet
        inside = filter_bytes * outputs * _blocks(inputs) + 8344 - (returned if for_weight else 0)
    if for_weight and max(kernel) <= 14:  # the gradient in oneDNN's layout, and a second copy in the output layout
        blocked = filter_bytes * _blocks(outputs) * (inputs if inputs < 16 else _blocks(inputs))
        inside = max(inside, blocked + returned)
    elif for_weight:  # kernels this large are a matrix product: two maps of patches, four gradients
        patches = filter_bytes * inputs * math.prod(gradient.shape[2:])
        inside = max(inside, 2 * patches + 4 * returned)
    return max(inside, 0) + _count_copies(weight, gradient, x)


def _blocks(channels: int, block: int = 16) -> int:
    return -(-channels // block) * block


def _fused_sgd(args: tuple[Any, ...]) -> int:
    """Return the bytes of the largest gradient that is not contiguous, as of channels-last weights.

    One gradient at a time is copied.
    """
    return max((_bytes(gradient) for gradient in args[1] if not gradient.is_contiguous()), default=0)


def _resize(args: tuple[Any, ...]) -> int:
    """Return the bytes of one edge's weights and their tables, and of images with a new width and their old height.

    An edge that keeps its length is left out.
    """
    x, size = args[:2]
    item, changed = (
        x.element_size(),
        [(have, want) for have, want in zip(x.shape[2:], size, strict=True) if have != want],
    )
    weights = [(32 + item * (2 * max(1, math.ceil(have / want)) + 1)) * want for have, want in changed]
    between = item * math.prod(x.shape[:3]) * size[1] if len(changed) > 1 else 0
    return between + max(weights, default=0)


# Bytes that an operator allocates besides what it reads and returns, from its arguments.
WORKSPACE: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten._adaptive_avg_pool2d_backward.default: lambda args: _relaid(args[0], args[1]),
    torch.ops.aten.max_pool2d_with_indices_backward.default: lambda args: _relaid(args[0], args[1], args[7]),
    torch.ops.aten.mkldnn_rnn_layer.default: _lstm_forward,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
    torch.ops.aten._fused_sgd_.default: _fused_sgd,
    torch.ops.aten._upsample_bilinear2d_aa.default: _resize,
}


def _lstm_flops(args: tuple[Any, ...]) -> int:
    """Return the FLOPs of four gates of inputs and states, at every step."""
    T, B, D, H = _lstm_sizes(args)
    return 2 * T * B * 4 * H * (D + H)


# Operators missing in torch.utils.flop_counter. The backward pass always computes gradients of inputs and of weights.
FLOPS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    torch.ops.aten.mkldnn_rnn_layer.default: _lstm_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: lambda args: 2 * _lstm_flops(args),
    torch.ops.aten._int_mm.default: lambda args: 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1],
}
