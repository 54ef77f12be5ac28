"""What CPU operators allocate inside themselves, out of a dispatch mode's sight; FLOPs of those that torch does not know.

Read off torch.profiler's memory events on one thread of an x86 with AVX-512: mostly oneDNN's own layouts, and second copies
where a gradient arrives in another memory format, as it does from a flattened map. On other processors the rules are a guess,
as nothing there was measured.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _relaid(gradient: Tensor, *copied: Tensor) -> int:
    """Bytes of what is copied where a gradient does not come in the memory format of the layer's input, `copied[0]`."""
    formats = {tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (gradient, copied[0])}
    return sum(map(_bytes, copied)) if len(formats) > 1 else 0


def _padded(features: int, item: int = 4) -> int:
    """oneDNN's length of a row of items of `item` bytes: whole cache lines, and no multiple of 256, which would alias."""
    line = 64 // item
    rounded = -(-features // line) * line
    return rounded + line if rounded % 256 == 0 else rounded


def _in_pages(*sizes: int) -> int:
    """Bytes of arrays that each begin on a page of 4096 bytes."""
    return sum(-(-size // 4096) * 4096 for size in sizes)


def _lstm_sizes(args: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """Length, batch, inputs and hidden features of an LSTM layer in oneDNN: x[T, B, D], w[4H, D], w[4H, H]."""
    length, batch, inputs = args[0].shape
    return length, batch, inputs, args[2].shape[1]


def lstm_kept(args: tuple[Any, ...]) -> int:
    """Bytes of the workspace that oneDNN's LSTM keeps for its backward pass (its set_workspace_sizes in rnn_utils.hpp).

    Gates and hidden states of all steps; then, for one step and one layer more, states, cells, and room for the gradients
    of both, which are float32 always.
    """
    (T, B, D, H), item = _lstm_sizes(args), args[0].element_size()
    steps, widest = 2 * (T + 1) * B, max(D, H)
    gates, hidden = T * B * item * _padded(4 * H, item), T * B * item * _padded(H, item)
    states, cells = steps * item * _padded(widest, item), steps * item * H
    gradients, cell_gradients = steps * 4 * _padded(widest), steps * 4 * H
    return _in_pages(gates, hidden, states, cells, gradients, gradients, cell_gradients)


def _lstm_forward(args: tuple[Any, ...]) -> int:
    """The sum of the biases, the weights in oneDNN's layout, the gates of all steps before their functions, its tables."""
    T, B, D, H = _lstm_sizes(args)
    row = 4 * B * _padded(H)
    if torch.is_grad_enabled():
        return 16 * H + 4 * (D + H) * _padded(4 * H) + _in_pages(4 * T * B * _padded(4 * H), row, row) + 4664
    # Without gradients the weights come in blocks of 32, and states and cells are scratch.
    steps = 2 * (T + 1) * B
    kept = _in_pages(4 * steps * _padded(max(D, H)), 4 * steps * H, 4 * B * _padded(4 * H), row)
    return 16 * H + 16 * (D + H) * _blocks(H, 32) + kept + 4872


def _lstm_backward(args: tuple[Any, ...]) -> int:
    """As forward, for the weights' gradients; then the weights where rows are padded, zeros for the states' gradients."""
    T, B, D, H = _lstm_sizes(args)
    row = 4 * B * _padded(H)
    scratch = _in_pages(4 * T * B * _padded(4 * H), row, row) + 4664
    weights = sum(16 * H * _padded(features) for features in (D, H) if features != _padded(features))
    copied = 0 if args[10].is_contiguous() else _bytes(args[10])
    return 16 * H + 4 * (D + H) * _padded(4 * H) + scratch + weights + 8 * B * H + copied


def _copied(layout: Tensor, *tensors: Tensor) -> int:
    """Bytes of the tensors that a convolution copies because its weight, `layout`, is channels-last and they are not."""
    if not layout.is_contiguous(memory_format=torch.channels_last):
        return 0
    return sum(_bytes(t) for t in tensors if not t.is_contiguous(memory_format=torch.channels_last))


def _convolution(args: tuple[Any, ...]) -> int:
    """The weight in oneDNN's layout, output channels in blocks of 16."""
    x, weight = args[:2]
    outputs: int = weight.shape[0]
    return _bytes(weight) // outputs * _blocks(outputs) + _copied(weight, x) + 8216


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """First the gradient of the input, then that of the weight; copies of what comes in another format during both."""
    (gradient, x, weight), (for_input, for_weight, _) = args[:3], args[10]
    outputs, inputs, *kernel = weight.shape
    returned = _bytes(weight)
    filter_bytes = returned // (outputs * inputs)
    inside = 0
    if for_input:  # the weight in oneDNN's layout, and tables; the weight's gradient is not there yet
        inside = filter_bytes * outputs * _blocks(inputs) + 8344 - (returned if for_weight else 0)
    if for_weight and max(kernel) <= 14:  # its gradient in oneDNN's layout, and once more to copy it out
        blocked = filter_bytes * _blocks(outputs) * (inputs if inputs < 16 else _blocks(inputs))
        inside = max(inside, blocked + returned)
    elif for_weight:  # kernels this large are a matrix product: two maps of patches, four gradients
        patches = filter_bytes * inputs * math.prod(gradient.shape[2:])
        inside = max(inside, 2 * patches + 4 * returned)
    return max(inside, 0) + _copied(weight, gradient, x)


def _blocks(channels: int, block: int = 16) -> int:
    return -(-channels // block) * block


def _fused_sgd(args: tuple[Any, ...]) -> int:
    """One gradient at a time is copied, where it is not contiguous, as those of channels-last weights are not."""
    return max((_bytes(gradient) for gradient in args[1] if not gradient.is_contiguous()), default=0)


# Bytes on top of what an operator reads and returns, of its arguments.
WORKSPACE: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten._adaptive_avg_pool2d_backward.default: lambda args: _relaid(args[0], args[1]),
    torch.ops.aten.max_pool2d_with_indices_backward.default: lambda args: _relaid(args[0], args[1], args[7]),
    torch.ops.aten.mkldnn_rnn_layer.default: _lstm_forward,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
    torch.ops.aten._fused_sgd_.default: _fused_sgd,
}


def _lstm_flops(args: tuple[Any, ...]) -> int:
    """Four gates of inputs and states, at every step."""
    T, B, D, H = _lstm_sizes(args)
    return 2 * T * B * 4 * H * (D + H)


# What torch.utils.flop_counter does not know. The backward pass always makes the gradients of inputs and of weights.
FLOPS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    torch.ops.aten.mkldnn_rnn_layer.default: _lstm_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: lambda args: 2 * _lstm_flops(args),
}
