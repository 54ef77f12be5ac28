"""Frozen convolutions in int8 (CoCoFL): the norm behind each is fused into it, and gradients pass through it in int8 too.

Values v become round(v / s) with s = max |v| / 127: weights once, features and gradients in every step. A convolution is a
product of int8 matrices (`torch._int_mm`), which sums in int32. Its result is float32, so that what lies between convolutions,
such as residual sums, computes as ever. The gradient of its input is the convolution of the gradient of its output with the
flipped int8 weights. Nothing but these weights is kept for it. Of a frozen ReLU a byte for each value is kept, and nothing of a
frozen norm that follows no convolution: it is a scale and a shift.

torch's own int8 convolutions are not used: they need its quantized tensors, which are deprecated, and have no version for the
fake tensors from which costs are computed.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Shape
from piecework.models.plain_norms import require_plain_norm

LEVELS = 127  # of an int8 on either side of 0
TINY = 1e-12  # the smallest scale
ROWS = 2**13  # of the matrix of a product at once: a row is a pixel, with all values under the kernel

Pairs = tuple[tuple[str, str], ...]  # convolutions, and the norm right behind each, by path; "" = none


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values as int8 and their scale, a tensor without dimensions."""
    scale = values.abs().amax().div(LEVELS).clamp_min(TINY)
    return (values / scale).round_().to(torch.int8), scale


def convolve(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Return the float32 convolution out[B, O, H', W'] of x[B, C, H, W] with int8 weights[O, C, k, k] of this scale."""
    outputs, kernel = weight.shape[0], weight.shape[2]
    size = [(edge + 2 * padding - kernel) // stride + 1 for edge in x.shape[2:]]
    out = torch.empty(len(x), outputs, *size, device=x.device, memory_format=torch.channels_last)
    matrix = weight.reshape(outputs, -1).t()
    own = x.abs().amax().div(LEVELS).clamp_min(TINY)
    count = max(1, ROWS // (size[0] * size[1]))  # images at once
    for first in range(0, len(x), count):
        part = (x[first : first + count] / own).round_().to(torch.int8)
        pixels = (
            F.pad(part, [padding] * 4).unfold(2, kernel, stride).unfold(3, kernel, stride).permute(0, 2, 3, 1, 4, 5)
        )
        sums = torch._int_mm(pixels.reshape(len(part) * size[0] * size[1], -1), matrix).float().mul_(own * scale)
        if bias is not None:
            sums += bias
        out[first : first + count] = sums.view(len(part), *size, outputs).permute(0, 3, 1, 2)
    return out


def spread(gradient: Tensor, shape: torch.Size, kernel: int, stride: int, padding: int) -> Tensor:
    """Return the gradient of a convolution's output with zeros between and around, to convolve it with the flipped weights."""
    batch, channels, *size = gradient.shape
    inner = [(edge - 1) * stride + 1 for edge in size]
    left = kernel - 1 - padding
    right = [edge + kernel - 1 - left - own for edge, own in zip(shape[2:], inner, strict=True)]
    out = gradient.new_zeros(batch, channels, *(left + own + rest for own, rest in zip(inner, right, strict=True)))
    out[:, :, left : left + inner[0] : stride, left : left + inner[1] : stride] = gradient
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Int8Conv2d") -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        return convolve(x, layer.weight, layer.scale, layer.bias, layer.stride, layer.padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        layer: Int8Conv2d = ctx.layer
        wide = spread(gradients[0], ctx.shape, layer.weight.shape[2], layer.stride, layer.padding)
        flipped = layer.weight.flip(2, 3).transpose(0, 1)
        return convolve(wide, flipped, layer.scale, None, 1, 0), None


class Int8Conv2d(nn.Module):
    """A convolution whose weights are int8 and stay as they are, with the norm that follows it in evaluation mode."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, conv: nn.Conv2d, norm: _BatchNorm | None) -> None:
        super().__init__()
        self.stride, self.padding = conv.stride[0], int(conv.padding[0])
        weight, bias = fuse(conv, norm)
        small, scale = quantise(weight)
        self.register_buffer("weight", small, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return out[B, O, H', W'] for x[B, C, H, W], in float32."""
        out: Tensor = _Convolution.apply(x, self)
        return out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        is_open = x > 0
        ctx.save_for_backward(is_open)
        ctx.mark_dirty(x)
        return x.mul_(is_open)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        is_open: Tensor = ctx.saved_tensors[0]
        return gradients[0] * is_open


class Gate(nn.Module):
    """A ReLU in place that keeps only where it is open."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x with zeros for negative values."""
        out: Tensor = _Gate.apply(x)
        return out


class Affine(nn.Module):
    """A batch norm in evaluation mode, which keeps none of its input."""

    factor: Tensor
    shift: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        factor, shift = scale_and_shift(norm)
        self.register_buffer("factor", factor, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x[B, C, ...]."""
        shape = (-1, *[1] * (x.dim() - 2))
        return (x * self.factor.view(shape)).add_(self.shift.view(shape))


@torch.no_grad()
def scale_and_shift(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return gamma / sigma and beta - gamma / sigma mean of a batch norm with running statistics."""
    assert norm.running_mean is not None and norm.running_var is not None
    factor = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        factor = factor * norm.weight
    shift = -norm.running_mean * factor
    return factor, shift + norm.bias if norm.bias is not None else shift


@torch.no_grad()
def fuse(conv: nn.Conv2d, norm: _BatchNorm | None) -> tuple[Tensor, Tensor | None]:
    """Return weights and bias of a convolution with the norm behind it: gamma / sigma W and beta + gamma / sigma (b - mean)."""
    weight, bias = conv.weight.detach(), conv.bias.detach() if conv.bias is not None else None
    if norm is None:
        return weight, bias
    factor, shift = scale_and_shift(norm)
    return weight * factor[:, None, None, None], shift if bias is None else shift + factor * bias


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution that can be computed so: square, of one group, and not dilated."""
    if not isinstance(layer, nn.Conv2d) or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return False
    alike = all(len(set(pair)) == 1 for pair in (layer.kernel_size, layer.stride, layer.padding))
    return alike and layer.groups == 1 and set(layer.dilation) == {1} and layer.padding[0] < layer.kernel_size[0]


@lru_cache(maxsize=256)
def find_pairs(build: Callable[[], nn.Module], before: Shape) -> Pairs:
    """Return a unit's convolutions, by path, with the batch norm that reads what each makes. `before` is its input's shape."""
    made: dict[int, tuple[str, Tensor, int]] = {}  # what a convolution made, and its version before others changed it
    read: dict[str, Tensor] = {}  # by norms
    called: Counter[str] = Counter()
    pairs: dict[str, str] = {}

    def note(path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
            called[path] += 1
            if isinstance(layer, nn.Conv2d):
                pairs[path], made[id(out)] = "", (path, out, out._version)
            elif layer.running_mean is not None:
                read[path] = inputs[0]

        return hook

    with _disable_current_modes(), torch.no_grad(), without_data():
        unit = build().eval()
        if not any(is_plain(layer) for layer in unit.modules()):
            return ()
        for path, layer in unit.named_modules():
            if is_plain(layer) or isinstance(layer, _BatchNorm):
                layer.register_forward_hook(note(path))
        with _Readers() as readers:
            unit(torch.zeros(2, *before))
    for norm, features in read.items():
        conv, out, version = made.get(id(features), ("", features, -1))
        if out._version == version and called[norm] == called[conv] == readers.count[id(out)] == 1:
            pairs[conv] = norm
    return tuple(pairs.items())


class _Readers(TorchFunctionMode):
    """Counts the calls that make a tensor of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[int] = Counter()
        self._held: list[Any] = []  # so that no id is used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            self.count.update({id(each) for each in inputs})
            self._held += [out, *inputs]
        return out


def to_int8(unit: nn.Module, pairs: Pairs) -> None:
    """Freeze a unit, and replace its convolutions, ReLUs and batch norms in place. `pairs` are those of `find_pairs`."""
    unit.requires_grad_(False)
    for path, behind in pairs:
        norm = unit.get_submodule(behind) if behind else None
        conv = unit.get_submodule(path)
        assert isinstance(conv, nn.Conv2d) and (norm is None or isinstance(norm, _BatchNorm))
        if norm is not None:
            require_plain_norm(norm, "a convolution in int8 that includes it")
        unit.set_submodule(path, Int8Conv2d(conv, norm))
        if behind:
            unit.set_submodule(behind, nn.Identity())
    for path, layer in list(unit.named_modules()):
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            require_plain_norm(layer, "a frozen one in int8")
            unit.set_submodule(path, Affine(layer))
        elif path and type(layer) is nn.ReLU and layer.inplace:
            unit.set_submodule(path, Gate())
