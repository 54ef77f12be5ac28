"""Communication and computation as counted in SpaFL's Table 2. Records hold the true bytes and FLOPs beside these counts.

Communication is 32 bits for each value that a client receives or sends. FLOPs are 1 per multiply-accumulate, and a backward
pass counts as two forward passes.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint

VALUE_BITS = 32


def bits(down: float, up: float) -> float:
    """Return the bits of that many values sent down to clients and up to the server."""
    return VALUE_BITS * (down + up)


def dense_flops(macs: float, examples: float) -> float:
    """Return the FLOPs of forward and backward passes of a model with `macs` multiply-accumulates per example."""
    return 3 * macs * examples


def sparse_flops(
    macs: Mapping[str, int], density: Mapping[str, float], examples: int, batches: int, thresholds: int, weights: int
) -> float:
    """Return a client's FLOPs in a round of SpaFL: layers at their density, the regulariser in each batch, and Eq. 13 once.

    `macs` and `density` are by layer; `thresholds` and `weights` are numbers of values.
    """
    kept = sum(density[name] * count for name, count in macs.items())
    return dense_flops(kept, examples) + thresholds * batches + weights


@lru_cache(maxsize=256)
def entries(blueprint: Blueprint, unit: str) -> int:
    """Return the number of values in a unit's state: parameters and batch-norm buffers."""
    with without_data():
        return sum(prod(value.shape) for value in blueprint.build_unit(unit).state_dict().values())
