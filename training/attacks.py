"""Adversarial examples: projected gradient descent (Madry et al., "Towards Deep Learning Models Resistant to Adversarial
Attacks", ICLR 2018), in an L-infinity or, per example, an L2 ball around an image or a feature map.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from piecework.training.accelerator import to_device

Norm = Literal["linf", "l2"]
Loss = Callable[[Tensor, Tensor], Tensor]  # (input batch, labels) -> scalar
Gradient = Callable[[Tensor, Tensor], Tensor]  # (input batch, labels) -> the loss's gradient with respect to the batch

Parts = Callable[..., Iterator[tuple[Tensor, ...]]]  # tensors of a batch -> their micro-batches


def whole(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a batch as one part."""
    yield tensors


def micro_batches(size: int) -> Parts:
    """Return a function that cuts a batch into parts of at most `size` examples, which differ by at most one; 0 = no cut."""

    def parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        count = -(-len(tensors[0]) // size)
        yield from zip(*(tensor.tensor_split(count) for tensor in tensors), strict=True)

    return parts if size else whole


@dataclass(frozen=True)
class Attack:
    """An attack with `steps` steps of size `step` in a ball of radius `epsilon`; values stay within `low` and `high`.

    With `mean` and `std`, one value per channel, the examples are normalised images, and the other fields refer to their
    pixels.
    """

    norm: Norm
    epsilon: float
    step: float
    steps: int
    low: float = -math.inf
    high: float = math.inf
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def pgd(
    gradient: Gradient, z: Tensor, y: Tensor, attack: Attack, generator: torch.Generator, parts: Parts = whole
) -> Tensor:
    """Return examples near z[B, ...] that raise a loss, from a random start in the ball. The model must be in evaluation mode.

    The generator is always on the CPU, so that starts are the same on all devices. The examples of each of the `parts` of the
    batch are attacked at once.
    """
    if attack.std:
        return _in_pixels(gradient, z, y, attack, generator, parts)
    adversarial = _start(z, attack, generator).add_(z).clamp_(attack.low, attack.high)
    for part, clean, labels in parts(adversarial, z, y):
        for _ in range(attack.steps):
            _ascend(part, gradient(part, labels), clean, attack)
    return adversarial


def _ascend(adversarial: Tensor, ascent: Tensor, z: Tensor, attack: Attack) -> None:
    """Take an attack step along a gradient and project onto the ball around z, in place, which keeps the memory format."""
    moved = adversarial.sub_(z)
    if attack.norm == "linf":
        moved.add_(ascent.sign_(), alpha=attack.step).clamp_(-attack.epsilon, attack.epsilon)
    else:
        moved.addcmul_(ascent, attack.step / _norms(ascent))
        moved.mul_((attack.epsilon / _norms(moved)).clamp_(max=1.0))
    moved.add_(z).clamp_(attack.low, attack.high)


def by_backward(loss: Loss) -> Gradient:
    """Return a loss's gradient function with respect to its input; weights get no gradient."""

    def gradient(z: Tensor, y: Tensor) -> Tensor:
        z = z.detach().requires_grad_()
        loss(z, y).backward(inputs=[z])  # type: ignore[no-untyped-call]
        assert z.grad is not None
        return z.grad

    return gradient


def _in_pixels(
    gradient: Gradient, z: Tensor, y: Tensor, attack: Attack, generator: torch.Generator, parts: Parts
) -> Tensor:
    """Attack the pixels of normalised images z[B, C, H, W]; the result is normalised again."""
    mean, std = (to_device(torch.tensor(v).view(1, -1, 1, 1), z.device) for v in (attack.mean, attack.std))

    def by_pixels(x: Tensor, y: Tensor) -> Tensor:
        return gradient((x - mean).div_(std), y).div_(std)

    pixels = (z * std).add_(mean)
    attacked = pgd(by_pixels, pixels, y, replace(attack, mean=(), std=()), generator, parts)
    return attacked.sub_(mean).div_(std)


def _start(z: Tensor, attack: Attack, generator: torch.Generator) -> Tensor:
    """Draw a start uniformly in the box, or in a Gaussian direction with a radius uniform in [0, epsilon]."""
    if attack.norm == "linf":
        start = torch.empty_like(z, device=generator.device)
        return to_device(start.uniform_(-attack.epsilon, attack.epsilon, generator=generator), z.device)
    direction = to_device(torch.empty_like(z, device=generator.device).normal_(generator=generator), z.device)
    radius = torch.empty(z.shape[0], *(1,) * (z.dim() - 1)).uniform_(0, attack.epsilon, generator=generator)
    return direction.mul_(to_device(radius, z.device) / _norms(direction))


def _norms(z: Tensor) -> Tensor:
    """Return the L2 norm of each example, [B, 1, ...]; never 0, so that a vanished gradient moves nothing."""
    norms: Tensor = torch.linalg.vector_norm(z, dim=tuple(range(1, z.dim())), keepdim=True)
    return norms.clamp_(min=1e-12)
