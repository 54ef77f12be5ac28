"""ProFL's block freezing determination (section 2.4), a matter of aggregated weights alone.

s^k: a scalar of the block after round k of its step (the paper's epoch); eps_s^k = s^k - s^{k-1}. Over H rounds a scalar moves
D_{s,k}^H = |sum_h eps_s^{k-h}| = |s^k - s^{k-H}|, and the block's effective movement is sum_s D_{s,k}^H / sum_s sum_h
|eps_s^{k-h}|: 1 where all scalars go straight on, 0 where they come back. A least-squares line through it (`slope`) is held
against `phi` of the block's initial slope; who is below W times is frozen.

Where the paper is silent, as worked out from the authors' configuration: a line goes through the last H movements; the initial
slope is the steepest of the first H lines, up or down; the W times are in a row (`in_row` = false: in all). A block that never
had a slope, which drifts or oscillates from the first round on, has none to be below of: its step ends with its rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import linear_regression

import numpy as np


@dataclass(frozen=True)
class Freezing:
    """`window` is H, in rounds; `fraction` phi, of the initial slope; `times` W."""

    window: int
    fraction: float
    times: int
    in_row: bool = True


def effective_movement(values: Sequence[np.ndarray]) -> float:
    """Of s^{k-H}, .., s^k, each the scalars of a block[n]; 0 where nothing moved."""
    way = sum(float(np.abs(after - before).sum()) for before, after in pairwise(values))
    return float(np.abs(values[-1] - values[0]).sum()) / way if way else 0.0


def slope(series: Sequence[float]) -> float:
    """Of the least-squares line through two or more values a round apart."""
    return linear_regression(range(len(series)), series).slope


def slopes(movements: Sequence[float], window: int) -> list[float]:
    """Of the line through each movement and those before it, `window` in all; the first one ends with number `window`."""
    return [slope(movements[end - window : end]) for end in range(window, len(movements) + 1)]


def threshold(movements: Sequence[float], policy: Freezing) -> float | None:
    """phi times the initial slope, which is known when there are H slopes."""
    found = [abs(each) for each in slopes(movements, policy.window)]
    return policy.fraction * max(found[: policy.window]) if len(found) >= policy.window else None


def times_below(movements: Sequence[float], policy: Freezing) -> int:
    """How often, up to now, the slope was below phi of the initial one."""
    if (minimum := threshold(movements, policy)) is None:
        return 0
    below = [abs(each) < minimum for each in slopes(movements, policy.window)]
    return sum(takewhile(bool, reversed(below))) if policy.in_row else sum(below)


def converged(movements: Sequence[float], policy: Freezing) -> bool:
    """Whether a block with these movements, that of round H first, is to be frozen."""
    return times_below(movements, policy) >= policy.times


def rounds_by_parameters(parameters: Sequence[int], rounds: int) -> list[int]:
    """Table 3's rival, ParamAware: `rounds` dealt out to blocks by their parameters, at least one each, largest rests first."""
    left = rounds - len(parameters)
    if left < 0:
        raise ValueError(f"{rounds} rounds are too few for {len(parameters)} steps: give each at least one")
    exact = [left * count / sum(parameters) for count in parameters]
    whole = [int(rounds) for rounds in exact]
    rests = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: left - sum(whole)]
    return [1 + rounds + (i in rests) for i, rounds in enumerate(whole)]
