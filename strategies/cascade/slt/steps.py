"""SLT's steps: how a network is configured for a memory, and how the rounds are divided among the steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from piecework.strategies.cascade.profl.freezing import rounds_by_parameters

STEPS = 64  # s is a multiple of 1/64


@dataclass(frozen=True)
class Step:
    """Step n of a run: the first `full` atoms have all channels, those behind them the fraction `ratio` (s) of theirs.

    In step 0, pretraining, no atom is full. A ratio of 1 means the whole network.
    """

    number: int
    full: int
    ratio: float

    def __str__(self) -> str:
        """Return the name: `pretraining`, `step 1`, .."""
        return f"step {self.number}" if self.number else "pretraining"


def choose_ratios(layers: int, fits: Callable[[int, int], bool]) -> list[int]:
    """Return s_1 .. s_N in 64ths: of each step the largest that fits, and none larger than that of the next step.

    `fits(n, s)` says whether a step with n full layers, of which it trains the last, and a head of s 64ths fits; a larger head
    needs more. The last step N is the first one with s = 1, or if there is none, the last one that fits at all. A list that
    begins with 0 means that a step does not fit.
    """
    low, high = 1, layers + 1  # the first step with s = 1 is in [low, high]; layers + 1: there is none
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle, STEPS) else (middle + 1, high)
    found = [STEPS] if low <= layers else []
    bound = STEPS
    for n in range(low - 1, 0, -1):
        bound = _largest(lambda s, n=n: fits(n, s), bound)  # type: ignore[misc]
        if not bound and not found and n > 1:
            bound = STEPS  # the last layers stay narrow
            continue
        found.insert(0, bound)
        if not bound:
            break
    return found


def _largest(works: Callable[[int], bool], bound: int) -> int:
    """Return the largest number up to `bound` that works, 0 if none does; smaller ones are easier."""
    if works(bound):
        return bound
    low, high = 0, bound
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def round_weights(
    rule: Literal["added", "trained"], sizes: Sequence[int], trained: Sequence[int], ratio: float
) -> list[float]:
    """Return weights to which the rounds of the steps 0 .. N are proportional. `ratio` is s of the first steps.

    `added`: Q(S_n) - Q(S_{n - 1}), where `sizes` are the parameters Q of the networks, frozen or not; Q(S_0) for pretraining.
    `trained`: those that a step trains; pretraining takes the fraction s of all rounds.
    """
    if rule == "added":
        return [float(sizes[0]), *(float(max(0, after - before)) for before, after in pairwise(sizes))]
    if len(trained) == 1:
        return [1.0]
    total = sum(trained[1:])
    return [ratio, *((1 - ratio) * each / total for each in trained[1:])]


def allot(weights: Sequence[float], rounds: int) -> list[int]:
    """Return the rounds of each step in proportion to these weights, at least one. Raises ValueError for too few rounds."""
    if rounds < len(weights):
        raise ValueError(
            f"num-rounds = {rounds} is too few for slt: pretraining and {len(weights) - 1} steps need {len(weights)}"
        )
    return rounds_by_parameters(weights, rounds)
