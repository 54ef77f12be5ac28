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

from piecework.training.optimiser_state import Held, zeros
from piecework.training.sgd import SGD, Optimiser

BETAS, EPSILON = (0.9, 0.999), 1e-8


class Adam(SGD):
    """Adam; it ignores the training config's momentum. Weight decay is a penalty, whose gradient is averaged too."""

    _kernel: ClassVar[Callable[..., Any]] = staticmethod(torch._fused_adam_)

    def _allocate(self) -> None:
        self.averages, self.squares = (
            zeros(self.parameters, self.training_config.optimiser_state, signed=signed) for signed in (True, False)
        )
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def state(self) -> dict[str, list[Held]]:
        """Return the averages of gradients and of their squares, and the numbers of steps, with shape []."""
        return {"average": self.averages, "square": self.squares, "steps": [*self.steps]}

    def _move(self, which: Sequence[int], weight_decay: float) -> None:
        if self.training_config.optimiser_state == "float32":
            self._move_together(which, weight_decay)
            return
        for i in which:
            self._move_together([i], weight_decay)

    def _move_together(self, which: Sequence[int], weight_decay: float) -> None:
        """Move parameters in one call. What is kept of them is in float32 meanwhile."""
        for i in which:
            self.steps[i] += 1
        averages, squares = ([kept[i].float() for i in which] for kept in (self.averages, self.squares))
        self._kernel(
            [self.parameters[i] for i in which],
            [g for i in which if (g := self.parameters[i].grad) is not None],
            averages,
            squares,
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
        if self.training_config.optimiser_state != "float32":
            for i, average, square in zip(which, averages, squares, strict=True):
                self.averages[i].copy_(average)
                self.squares[i].copy_(square)


class AdamW(Adam):
    """Adam with decoupled weight decay, which scales parameters down by itself."""

    _kernel = staticmethod(torch._fused_adamw_)


OPTIMISERS: dict[Optimiser, type[SGD]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
