"""Adversarial examples: projected gradient descent (Madry et al., "Towards Deep Learning Models Resistant to Adversarial
Attacks", ICLR 2018), in an L-infinity or, per example, an L2 ball around an image or a feature map.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attack:
    """`epsilon` is the ball's radius, `step` how far a step goes, `steps` how many; values stay within `low` and `high`."""

    norm: Literal["linf", "l2"]
    epsilon: float
    step: float
    steps: int
    low: float = -math.inf
    high: float = math.inf


def pgd(
    loss: Callable[[Tensor, Tensor], Tensor], z: Tensor, y: Tensor, attack: Attack, generator: torch.Generator
) -> Tensor:
    """Examples near z[B, ...] that raise the loss, from a random start in the ball; weights get no gradients."""
    adversarial = _start(z, attack, generator).add_(z).clamp_(attack.low, attack.high)
    for _ in range(attack.steps):
        adversarial.requires_grad_()
        loss(adversarial, y).backward(inputs=[adversarial])  # type: ignore[no-untyped-call]
        with torch.no_grad():
            gradient = adversarial.grad
            assert gradient is not None
            moved = adversarial.detach().sub_(z)  # in place, which also keeps the memory format
            if attack.norm == "linf":
                moved.add_(gradient.sign_(), alpha=attack.step).clamp_(-attack.epsilon, attack.epsilon)
            else:
                moved.addcmul_(gradient, attack.step / _norms(gradient))
                moved.mul_((attack.epsilon / _norms(moved)).clamp_(max=1.0))
            adversarial = moved.add_(z).clamp_(attack.low, attack.high)
        del gradient, moved  # not held through the next step
    return adversarial


def _start(z: Tensor, attack: Attack, generator: torch.Generator) -> Tensor:
    """Uniform in the box; or a Gaussian direction with a radius uniform in [0, epsilon]."""
    if attack.norm == "linf":
        return torch.empty_like(z).uniform_(-attack.epsilon, attack.epsilon, generator=generator)
    direction = torch.empty_like(z).normal_(generator=generator)
    radius = torch.empty(z.shape[0], *(1,) * (z.dim() - 1)).uniform_(0, attack.epsilon, generator=generator)
    return direction.mul_(radius / _norms(direction))


def _norms(z: Tensor) -> Tensor:
    """The L2 norm of each example, [B, 1, ...]; never 0, so that a vanished gradient moves nothing."""
    norms: Tensor = torch.linalg.vector_norm(z, dim=tuple(range(1, z.dim())), keepdim=True)
    return norms.clamp_(min=1e-12)
