"""Batch norms whose statistics stay: scale and shift are trained, and no example depends on the others of its batch."""

from typing import Self

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Frozen(_BatchNorm):
    """Mixin of a batch norm that always runs in evaluation mode."""

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)


class FrozenBatchNorm2d(Frozen, nn.BatchNorm2d):
    """Frozen batch norm of maps [B, C, H, W]."""


class FrozenBatchNorm1d(Frozen, nn.BatchNorm1d):
    """Frozen batch norm of features [B, F]."""
