"""Batch norms with two sets of running statistics, for clean and for adversarial examples, and one scale and shift.

Two sets are from Xie et al., "Adversarial Examples Improve Image Recognition", CVPR 2020; the shared scale and shift from
FedRBN (Hong et al., "Federated Robustness Propagation", AAAI 2023). A flag of the layer selects the set. Arrays of the second
set have the names of the first with the prefix `adversarial_`.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

PREFIX = "adversarial_"
STATISTICS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"


class _Dual(_BatchNorm):
    """Mixin that adds the second set to a batch norm."""

    adversarial_running_mean: Tensor
    adversarial_running_var: Tensor
    adversarial_num_batches_tracked: Tensor

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.adversarial = False
        for name in (*STATISTICS, COUNT):
            self.register_buffer(PREFIX + name, getattr(self, name).clone())

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x by its own statistics in training mode, which updates the selected set; else by the selected set."""
        if not self.adversarial:
            out: Tensor = super().forward(x)
            return out
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        if self.training:
            self.adversarial_num_batches_tracked.add_(1)
        assert self.momentum is not None
        return F.batch_norm(
            x,
            self.adversarial_running_mean,
            self.adversarial_running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )


class DualBatchNorm2d(_Dual, nn.BatchNorm2d):
    """Dual batch norm of maps [B, C, H, W]."""


class DualBatchNorm1d(_Dual, nn.BatchNorm1d):
    """Dual batch norm of features [B, F]."""


def dual_norms(modules: Iterable[nn.Module]) -> Iterator[_Dual]:
    """Yield the layers with two sets of statistics."""
    return (layer for module in modules for layer in module.modules() if isinstance(layer, _Dual))


def use(modules: Iterable[nn.Module], *, adversarial: bool) -> None:
    """Select one of the two sets in all layers."""
    for layer in dual_norms(modules):
        layer.adversarial = adversarial


@torch.no_grad()
def begin_adversarial(modules: Iterable[nn.Module]) -> None:
    """Initialise second sets that were never used with the values of the first."""
    for layer in dual_norms(modules):
        if not int(layer.adversarial_num_batches_tracked):
            for name in STATISTICS:
                getattr(layer, PREFIX + name).copy_(getattr(layer, name))


def is_adversarial(name: str) -> bool:
    """Return whether an array belongs to a second set."""
    return name.rpartition(".")[2].startswith(PREFIX)
