"""Adam (Kingma and Ba, ICLR 2015) and AdamW (Loshchilov and Hutter, ICLR 2019), with torch's kernels but without torch's
optimisers, which import its compiler.

With the gradient g, the rate eta and the weight decay lambda, step t of a parameter x is

    Adam:   g <- g + lambda x                   AdamW:  x <- (1 - eta lambda) x
    m <- beta_1 m + (1 - beta_1) g              v <- beta_2 v + (1 - beta_2) g^2
    x <- x - eta (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)

with the usual constants beta_1 = 0.9, beta_2 = 0.999 and epsilon = 1e-8.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from piecework.training.sgd import SGD, Optimiser

BETAS, EPSILON = (0.9, 0.999), 1e-8


class Adam(SGD):
    """Adam; it ignores the training config's momentum. Weight decay is a penalty, whose gradient is averaged too."""

    _kernel: ClassVar[Callable[..., Any]] = staticmethod(torch._fused_adam_)

    def _allocate(self) -> None:
        self.averages, self.squares = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def state(self) -> dict[str, list[Tensor]]:
        """Return the averages of gradients and of their squares, and the numbers of steps, with shape []."""
        return {"average": self.averages, "square": self.squares, "steps": self.steps}

    def _move(self, which: Sequence[int], weight_decay: float) -> None:
        for i in which:
            self.steps[i] += 1
        self._kernel(
            [self.parameters[i] for i in which],
            [g for i in which if (g := self.parameters[i].grad) is not None],
            [self.averages[i] for i in which],
            [self.squares[i] for i in which],
            [],
            [self.steps[i] for i in which],
            lr=self.training_config.lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay, which scales parameters down by itself."""

    _kernel = staticmethod(torch._fused_adamw_)


OPTIMISERS: dict[Optimiser, type[SGD]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
