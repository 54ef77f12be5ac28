"""ProFL's effective movement, slope and freezing rule, against series worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.strategies.cascade.profl.freezing import (
    Freezing,
    effective_movement,
    has_converged,
    rounds_by_parameters,
    slope,
    slopes,
    times_below,
)

RULE = Freezing(window=2, fraction=0.25, times=3)


def movements(series: list[list[float]], window: int) -> list[float]:
    """Of a block whose scalars take these values round by round."""
    values = [np.asarray(each, dtype=np.float32) for each in series]
    return [effective_movement(values[k - window : k + 1]) for k in range(window, len(values))]


def rounds_until_frozen(series: list[float], policy: Freezing) -> int | None:
    """The round in which a block with these movements is frozen; the first movement is that of round H."""
    found = (k for k in range(1, len(series) + 1) if has_converged(series[:k], policy))
    first = next(found, None)
    return None if first is None else first + policy.window - 1


def test_movement_by_hand() -> None:
    """Two scalars over three rounds: 0, 1, 3, 2 and 5, 5, 4, 6. Net |2| + |1|; way 1 + 2 + 1 and 0 + 1 + 2."""
    values = [np.array([0.0, 5.0]), np.array([1.0, 5.0]), np.array([3.0, 4.0]), np.array([2.0, 6.0])]
    assert effective_movement(values) == 3 / 7


def test_a_steady_drift_is_all_effective() -> None:
    assert movements([[0.5 * k, -2.0 * k] for k in range(6)], window=3) == [1.0, 1.0, 1.0]


def test_an_oscillation_is_not() -> None:
    """Back after two rounds; after three, one of three steps is left."""
    values = [[float(k % 2), 1 - float(k % 2)] for k in range(6)]
    assert movements(values, window=2) == [0.0] * 4
    assert movements(values, window=3) == [1 / 3] * 3


def test_a_block_at_rest_has_no_movement() -> None:
    assert movements([[1.0, 2.0]] * 4, window=2) == [0.0, 0.0]


def test_slope_by_hand() -> None:
    """1, 2, 4 at -1, 0, 1: (4 - 1) / 2. And 0, 1, 0, 3 at -1.5, -0.5, 0.5, 1.5: (-0.5 + 4.5) / 5."""
    assert slope([1.0, 2.0, 4.0]) == 1.5
    assert slope([0.0, 1.0, 0.0, 3.0]) == 0.8
    assert slopes([1.0, 0.5, 0.25, 0.25], window=2) == [-0.5, -0.25, 0.0]


def test_convergence_is_frozen_after_w_rounds_below() -> None:
    """Slopes -0.5 (the initial one), -0.25, -0.125, then 0 three times; a quarter of 0.5 is 0.125, which is not below."""
    series = [1.0, 0.5, 0.25, 0.125, 0.125, 0.125, 0.125]
    assert [times_below(series[:k], RULE) for k in range(8)] == [0, 0, 0, 0, 0, 1, 2, 3]
    assert rounds_until_frozen(series, RULE) == 8  # movement 7, of which the first is that of round 2


def test_a_drift_and_an_oscillation_from_the_start_are_never_frozen() -> None:
    assert rounds_until_frozen([1.0] * 50, RULE) is None
    assert rounds_until_frozen([0.0] * 50, RULE) is None


def test_an_outlier_restarts_the_count_of_consecutive_times() -> None:
    """Movement 6 jumps to 0.5: slopes of 0.375 and -0.375, which are not below 0.125."""
    series = [1.0, 0.5, 0.125, 0.125, 0.125, 0.5, 0.125, 0.125, 0.125, 0.125]
    assert [times_below(series[:k], RULE) for k in range(3, 11)] == [0, 1, 2, 0, 0, 1, 2, 3]
    anywhere = Freezing(2, 0.25, 3, in_row=False)
    assert [times_below(series[:k], anywhere) for k in range(3, 11)] == [0, 1, 2, 2, 2, 3, 4, 5]


def test_a_longer_window_smooths_an_outlier() -> None:
    """One line through five movements: 0.4 in the middle of 0.1 does not tilt it at all, at its end by 2 * 0.3 / 10."""
    assert slope([0.1, 0.1, 0.4, 0.1, 0.1]) == pytest.approx(0.0)
    assert slope([0.1, 0.1, 0.1, 0.1, 0.4]) == pytest.approx(0.06)


def test_the_initial_slope_is_the_steepest_of_the_first_h() -> None:
    """0.5 comes as slope 2 of 2: half of it is 0.25. A steeper one later, -1, does not count."""
    policy = Freezing(window=2, fraction=0.5, times=2)
    series = [0.0, 0.25, 0.75, 1.75, 0.75, 0.55, 0.5]
    assert rounds_until_frozen(series, policy) == 8


@given(
    st.lists(st.floats(0, 1), max_size=60), st.integers(2, 6), st.integers(1, 6), st.floats(0.01, 0.99), st.booleans()
)
def test_never_frozen_before_h_and_w_rounds(
    series: list[float], window: int, times: int, share: float, row: bool
) -> None:
    frozen = rounds_until_frozen(series, Freezing(window, share, times, row))
    assert frozen is None or frozen >= window + times


def test_rounds_by_parameters() -> None:
    """Ten rounds: one each, the other six by 1 : 2 : 6 : 3, 0.5, 1, 3, 1.5; the half that is left goes to the first."""
    assert rounds_by_parameters([1, 2, 6, 3], 10) == [2, 2, 4, 2]
    assert rounds_by_parameters([5], 7) == [7]
    with pytest.raises(ValueError, match="3 rounds are too few for 4 steps"):
        rounds_by_parameters([1, 1, 1, 1], 3)
