"""Static batch norm: a model trained with the statistics of batches gets fixed statistics for evaluation.

Diao et al., "HeteroFL" (ICLR 2021), section 3: batch norms use the statistics of each batch in training and keep none. After
aggregation, clients measure those used for evaluation.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint
from piecework.models.dual_norm import is_adversarial
from piecework.models.frozen_norm import Frozen

OWN = "piecework_own_momentum"
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def with_statistics(blueprint: Blueprint) -> Blueprint:
    """Return the model with running statistics in all batch norms: mean 0 and variance 1 until they are measured."""
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
    """Yield the batch norm layers."""
    return (layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm))


def has_batch_norms(blueprint: Blueprint) -> bool:
    """Return whether a model has any batch norm."""
    with without_data():
        return any(True for unit in blueprint.units() for _ in batch_norms([blueprint.build_unit(unit)]))


def mixes_examples(blueprint: Blueprint) -> bool:
    """Return whether a model has batch norms that train with the statistics of the examples computed together."""
    with without_data():
        norms = batch_norms(blueprint.build_unit(unit) for unit in blueprint.units())
        return any(not isinstance(norm, Frozen) for norm in norms)


def measure_norms(modules: Iterable[nn.Module]) -> None:
    """Make batch norms use and record the statistics of the batches to come; all other layers run in evaluation mode."""
    modules = list(modules)
    for module in modules:
        module.eval()
    for norm in batch_norms(modules):
        norm.train()


def forget_statistics(modules: Iterable[nn.Module]) -> None:
    """Reset the statistics of batch norms, which then weigh all batches equally."""
    for norm in batch_norms(modules):
        norm.reset_running_stats()
        norm.momentum = None


def count_first_alike(modules: Iterable[nn.Module]) -> bool:
    """Weigh the first batches of batch norms equally. Returns whether any norm has such batches to come.

    With torch's momentum of 0.1 the initial mean of 0 and variance of 1 would still weigh 0.9^n after n batches, and a client
    with little data would send mostly those. From the tenth batch on a norm uses its own momentum.
    """
    young = False
    for norm in batch_norms(modules):
        if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d) or norm.num_batches_tracked is None or not norm.training:
            continue
        own = getattr(norm, OWN, norm.momentum)
        if own is None:  # all its batches have equal weight
            continue
        setattr(norm, OWN, own)
        seen = int(norm.num_batches_tracked)
        norm.momentum = max(own, 1 / (seen + 1))
        young |= norm.momentum > own
    return young


def is_statistic(name: str) -> bool:
    """Return whether an array is a running statistic of a batch norm."""
    return name.rpartition(".")[2] in RUNNING


def batch_norm_names(unit: str, module: nn.Module) -> set[str]:
    """Return the global names of a unit's batch norm arrays (which FedBN keeps on the device), without second sets."""
    return {
        f"{unit}.{path}.{name}" if path else f"{unit}.{name}"
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        for name in layer.state_dict()
        if not is_adversarial(name)
    }
