"""Batch norms with two sets of running statistics, for clean and for adversarial examples, and one scale and shift.

Two sets are from Xie et al., "Adversarial Examples Improve Image Recognition", CVPR 2020; the shared scale and shift from
FedRBN (Hong et al., "Federated Robustness Propagation", AAAI 2023). A flag of the layer selects the set. Arrays of the second
set have the names of the first with the prefix `adversarial_`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from piecework.models.change import Change, Origin
from piecework.models.plain_norms import require_plain_norm

if TYPE_CHECKING:
    from piecework.models.cascade import Blueprint

PREFIX = "adversarial_"
STATISTICS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"


class _Dual(_BatchNorm):
    """Mixin of a batch norm with a second set."""

    adversarial_running_mean: Tensor
    adversarial_running_var: Tensor
    adversarial_num_batches_tracked: Tensor

    def add_set(self) -> None:
        """Add the second set, which is not selected."""
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


@dataclass(frozen=True)
class DualNorms(Change):
    """Two sets of statistics in all batch norms (FedRBN)."""

    dual_norms: Literal[True]

    def apply(self, model: "Blueprint", origin: Origin) -> "Blueprint":
        """Return the model whose batch norms have two sets."""
        atoms = tuple(replace(atom, build=partial(with_two_sets, atom.build)) for atom in model.atoms)
        return replace(model, atoms=atoms, build_head=partial(with_two_sets, model.build_head))


def with_two_sets(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a module whose batch norms have two sets of statistics."""
    module = build()
    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            require_plain_norm(norm, "one with two sets of statistics")
            norm.__class__ = DualBatchNorm1d if isinstance(norm, nn.BatchNorm1d) else DualBatchNorm2d
            assert isinstance(norm, _Dual)
            norm.add_set()
    return module


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
