"""The gradients that segments of a cascade pass on to each other, each held by nothing but where it goes."""

import torch
from torch import Tensor


class Upstream:
    """The gradient of a segment with respect to its input z[B, ...], put together from those of micro-batches."""

    def __init__(self, z: Tensor, *, needed: bool) -> None:
        self.size, self.needed = len(z), needed
        self.taken: list[Tensor] = []
        self._at = 0

    def watch(self, part: Tensor) -> Tensor:
        """Return a micro-batch whose gradient is to be taken."""
        part = part.detach()
        return _Catch.apply(part.requires_grad_(), self) if self.needed else part

    def take(self, gradient: Tensor) -> None:
        """Take the gradient with respect to the next micro-batch."""
        if len(gradient) == self.size:
            self.taken.append(gradient)
            return
        if not self.taken:
            self.taken.append(batch_like(gradient, self.size))
        self.taken[0][self._at : self._at + len(gradient)] = gradient
        self._at += len(gradient)


class _Catch(torch.autograd.Function):
    """Hands on a gradient as it arrives; as the `grad` of a leaf, it might be copied to another memory format."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor, upstream: Upstream) -> Tensor:
        ctx.upstream = upstream  # type: ignore[attr-defined]
        return z.view_as(z)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[None, None]:
        ctx.upstream.take(gradients[0])  # type: ignore[attr-defined]
        return None, None


class Begin(torch.autograd.Function):
    """Begins a backward pass with a gradient that nothing else holds; torch.autograd.backward would hold it to its end."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient  # type: ignore[attr-defined]
        return z.new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None  # type: ignore[attr-defined]


def batch_like(part: Tensor, size: int) -> Tensor:
    """Return room for a batch in the format of a micro-batch."""
    channels_last = part.dim() == 4 and part.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((size, *part.shape[1:]), dtype=part.dtype, device=part.device, memory_format=layout)
