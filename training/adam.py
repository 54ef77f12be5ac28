"""Adam (Kingma and Ba, ICLR 2015), with torch's kernels but without torch's optimisers, which import its compiler."""

from collections.abc import Sequence

import torch
from torch import Tensor

from piecework.training.sgd import SGD

BETAS, EPSILON = (0.9, 0.999), 1e-8


class Adam(SGD):
    """Adam with the usual constants; it ignores the training config's momentum."""

    def _allocate(self) -> None:
        self.averages, self.squares = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def state(self) -> dict[str, list[Tensor]]:
        """Return the averages of gradients and of their squares, and the numbers of steps, with shape []."""
        return {"average": self.averages, "square": self.squares, "steps": self.steps}

    def _move(self, which: Sequence[int], weight_decay: float) -> None:
        for i in which:
            self.steps[i] += 1
        torch._fused_adam_(
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
