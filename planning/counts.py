"""What travels and what is computed, by the rules of SpaFL's Table 2; records have the bytes that were sent and the true FLOPs
beside them.

Communication: 32 bits for each value that a client is sent and for each that it sends. FLOPs: one a multiply-accumulate, a
backward pass is two forward passes.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod

import torch

from piecework.models.cascade import Blueprint

VALUE_BITS = 32


def bits(down: float, up: float) -> float:
    """Of so many values on their way down and up."""
    return VALUE_BITS * (down + up)


def dense_flops(macs: float, examples: float) -> float:
    """Forward and backward, of a model with so many multiply-accumulates an example."""
    return 3 * macs * examples


def sparse_flops(
    macs: Mapping[str, int], density: Mapping[str, float], examples: int, batches: int, thresholds: int, weights: int
) -> float:
    """Of SpaFL's round on a client: layers at their density, the regulariser in every batch, and Eq. 13 once."""
    kept = sum(density[name] * count for name, count in macs.items())
    return dense_flops(kept, examples) + thresholds * batches + weights


@lru_cache(maxsize=256)
def entries(blueprint: Blueprint, unit: str) -> int:
    """How many values a unit's state has: parameters, and what batch norms remember."""
    with torch.device("meta"):
        return sum(prod(value.shape) for value in blueprint.build_unit(unit).state_dict().values())
