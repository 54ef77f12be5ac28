"""ProFL's criterion for freezing a block (section 2.4), which needs only the aggregated weights.

s^k is a scalar of the block after round k of its step (the paper's epoch), and eps_s^k = s^k - s^{k-1}. Over H rounds a scalar
moves by D_{s,k}^H = |sum_h eps_s^{k-h}| = |s^k - s^{k-H}|. The block's effective movement is sum_s D_{s,k}^H / sum_s sum_h
|eps_s^{k-h}|: 1 if every scalar moves in one direction, 0 if all return to where they were. The slope of a least-squares line
through the effective movements is compared with phi times the block's initial slope (phi is 10 to 20 % in section 3.1). A block
whose slope is smaller W times is frozen.

Where the paper is silent, details are inferred from the authors' configuration. A line goes through the last H movements. The
initial slope is the steepest of the first H lines, up or down. The W times are in a row (`in_row` = false: in total). A block
that drifts or oscillates from the first round on never has a slope, so no later slope can be below a fraction of it: its step
ends when its rounds are over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import linear_regression

import numpy as np


@dataclass(frozen=True)
class Freezing:
    """The parameters of the criterion: `window` is H in rounds, `fraction` is phi, and `times` is W, `in_row` or in total."""

    window: int
    fraction: float
    times: int
    in_row: bool = True


def effective_movement(values: Sequence[np.ndarray]) -> float:
    """Return the effective movement from s^{k-H}, .., s^k, each the scalars[n] of a block; 0 if nothing moved."""
    way = sum(float(np.abs(after - before).sum()) for before, after in pairwise(values))
    return float(np.abs(values[-1] - values[0]).sum()) / way if way else 0.0


def slope(series: Sequence[float]) -> float:
    """Return the slope per round of the least-squares line through two or more values, one per round."""
    return linear_regression(range(len(series)), series).slope


def slopes(movements: Sequence[float], window: int) -> list[float]:
    """Return the slopes of the lines through each `window` consecutive movements, from the first `window` on."""
    return [slope(movements[end - window : end]) for end in range(window, len(movements) + 1)]


def threshold(movements: Sequence[float], policy: Freezing) -> float | None:
    """Return phi times the initial slope, or None before H slopes are known."""
    found = [abs(each) for each in slopes(movements, policy.window)]
    return policy.fraction * max(found[: policy.window]) if len(found) >= policy.window else None


def times_below(movements: Sequence[float], policy: Freezing) -> int:
    """Return how often the slope was below the threshold, in a row up to now or in total; 0 before the threshold is known."""
    if (minimum := threshold(movements, policy)) is None:
        return 0
    below = [abs(each) < minimum for each in slopes(movements, policy.window)]
    return sum(takewhile(bool, reversed(below))) if policy.in_row else sum(below)


def has_converged(movements: Sequence[float], policy: Freezing) -> bool:
    """Return whether a block with these movements, beginning with that of round H, is to be frozen."""
    return times_below(movements, policy) >= policy.times


def rounds_by_parameters(parameters: Sequence[float], rounds: int) -> list[int]:
    """Return the rounds of each step in proportion to its block's parameters, at least one (ParamAware, a baseline in Table 3).

    The largest remainders are rounded up. Raises ValueError for fewer rounds than steps.
    """
    left = rounds - len(parameters)
    if left < 0:
        raise ValueError(f"{rounds} rounds are too few for {len(parameters)} steps: give each at least one")
    exact = [left * count / sum(parameters) for count in parameters]
    whole = [int(rounds) for rounds in exact]
    rests = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: left - sum(whole)]
    return [1 + rounds + (i in rests) for i, rounds in enumerate(whole)]
