"""Static batch norm: a model that was trained on the statistics of batches gets fixed ones to be served with.

Diao et al., "HeteroFL" (ICLR 2021), section 3: in training batch norms take the statistics of a batch and keep none; once the
model is averaged, clients measure those that it is evaluated with.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from piecework.models.cascade import Blueprint

OWN = "piecework_own_momentum"
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def with_statistics(blueprint: Blueprint) -> Blueprint:
    """The same model, whose batch norms all have running statistics: mean 0 and variance 1 as long as they are not filled."""
    atoms = tuple(replace(atom, build=partial(_tracking, atom.build)) for atom in blueprint.atoms)
    return replace(blueprint, atoms=atoms, build_head=partial(_tracking, blueprint.build_head), batch_norm="running")


def _tracking(build: Callable[[], nn.Module]) -> nn.Module:
    module = build()
    for norm in batch_norms([module]):
        if norm.running_mean is None:
            norm.track_running_stats = True
            norm.running_mean, norm.running_var = torch.zeros(norm.num_features), torch.ones(norm.num_features)
            norm.num_batches_tracked = torch.tensor(0)
    return module


def batch_norms(modules: Iterable[nn.Module]) -> Iterator[_BatchNorm]:
    """The batch norm layers in modules."""
    return (layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm))


def has_batch_norms(blueprint: Blueprint) -> bool:
    """Whether there is a batch norm anywhere in a model."""
    with torch.device("meta"):
        return any(True for unit in blueprint.units() for _ in batch_norms([blueprint.build_unit(unit)]))


def measure_norms(modules: Iterable[nn.Module]) -> None:
    """From here on batch norms take the statistics of the batches that come, and note them; all else is evaluated."""
    modules = list(modules)
    for module in modules:
        module.eval()
    for norm in batch_norms(modules):
        norm.train()


def forget_statistics(modules: Iterable[nn.Module]) -> None:
    """Let batch norms begin again, and count all batches alike."""
    for norm in batch_norms(modules):
        norm.reset_running_stats()
        norm.momentum = None


def count_first_alike(modules: Iterable[nn.Module]) -> bool:
    """Let the first batches that batch norms in training see count alike; whether there are norms with such batches to come.

    With torch's momentum of 0.1 what they were built with, a mean of 0 and a variance of 1, still weighs 0.9^n after n batches:
    a client with little data would send mostly that. From the tenth batch on a norm goes by its own momentum.
    """
    young = False
    for norm in batch_norms(modules):
        if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d) or norm.num_batches_tracked is None or not norm.training:
            continue
        own = getattr(norm, OWN, norm.momentum)
        if own is None:  # all its batches count alike
            continue
        setattr(norm, OWN, own)
        seen = int(norm.num_batches_tracked)
        norm.momentum = max(own, 1 / (seen + 1))
        young |= norm.momentum > own
    return young


def is_statistic(name: str) -> bool:
    """Whether an array is one of a batch norm's running statistics."""
    return name.rpartition(".")[2] in RUNNING
