"""FedProphet's Adaptive Perturbation Adjustment: Equation 12 on its boundaries, and from round to round."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fedprophet_helpers import a_run
from flwr.app import MetricRecord
from settings_helpers import key_of, settings_with

from piecework.strategies.cascade.fedprophet.adjustment import BestRound, FedProphetState, FixedModule, adjust_alpha
from piecework.strategies.cascade.fedprophet.server import FedProphet
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.strategies.method import Round

# ---- on its boundaries

GAMMA = settings_with(
    fedprophet__apa_margin=0.25, fedprophet__apa_step=0.1, fedprophet__apa_bound="none"
)  # boundaries that are exact in binary
FIXED = FixedModule(
    clean=0.5, adversarial=0.25, epsilon=0.0, nonnegative=True
)  # C* / A* = 2: 2.5 and 1.5 are still within


def up(x: float) -> float:
    return math.nextafter(x, math.inf)


def down(x: float) -> float:
    return math.nextafter(x, -math.inf)


@pytest.mark.parametrize(
    ("clean", "adversarial", "alpha"),
    [
        (0.5, 0.25, 0.3),
        (0.625, 0.25, 0.3),  # (1 + gamma) C* / A* itself
        (up(0.625), 0.25, 0.4),
        (0.375, 0.25, 0.3),  # (1 - gamma) C* / A* itself
        (down(0.375), 0.25, 0.2),
        (0.1, 0.0, 0.4),  # no robustness: the ratio is infinite
        (0.0, 0.0, 0.3),  # no ratio
        (0.0, 0.1, 0.2),
    ],
)
def test_alpha_follows_the_ratio_of_accuracies(clean: float, adversarial: float, alpha: float) -> None:
    assert adjust_alpha(0.3, [[clean, adversarial]], FIXED, GAMMA) == alpha


@pytest.mark.parametrize(("ratio", "alpha"), [(2.101, 0.4), (2.099, 0.3), (1.901, 0.3), (1.899, 0.2)])
def test_alpha_with_the_papers_gamma(ratio: float, alpha: float) -> None:
    assert (
        adjust_alpha(
            0.3,
            [[0.25 * ratio, 0.25]],
            FIXED,
            settings_with(fedprophet__apa_margin=0.05, fedprophet__apa_step=0.1, fedprophet__apa_bound="none"),
        )
        == alpha
    )


def test_a_stage_before_without_robustness() -> None:
    """C* / A* is infinite: every ratio is less; where it is not defined, nothing changes."""
    without, useless = replace(FIXED, adversarial=0.0), replace(FIXED, clean=0.0, adversarial=0.0)
    assert adjust_alpha(0.3, [[0.5, 0.25]], without, GAMMA) == 0.2
    assert adjust_alpha(0.3, [[0.5, 0.0]], without, GAMMA) == 0.3
    assert adjust_alpha(0.3, [[0.5, 0.25]], useless, GAMMA) == 0.3


def test_alphas_lower_bound() -> None:
    """By default it is where alpha starts, as in the paper's Figure 10; Eq. 12 has none, and alpha may fall to 0."""
    low = [[0.1, 0.25]]
    assert adjust_alpha(0.05, low, FIXED, GAMMA) == 0.0
    default = settings_with(fedprophet__apa_margin=0.25)
    assert adjust_alpha(0.3, low, FIXED, default) == 0.3
    assert adjust_alpha(0.35, low, FIXED, default) == 0.3
    assert adjust_alpha(0.5, low, FIXED, default) == 0.4
    assert adjust_alpha(0.5, low, FIXED, settings_with(fedprophet__apa_start=0.45)) == 0.45


def test_alpha_looks_at_the_mean_of_the_window() -> None:
    assert adjust_alpha(0.3, [[0.8, 0.25], [0.2, 0.25]], FIXED, GAMMA) == 0.3  # 3.2 and 0.8: 2
    assert adjust_alpha(0.3, [[0.8, 0.25], [0.5, 0.25]], FIXED, GAMMA) == 0.4  # 3.2 and 2: 2.6
    assert adjust_alpha(0.3, [[0.2, 0.25], [0.5, 0.25]], FIXED, GAMMA) == 0.2  # 0.8 and 2: 1.4


def test_epsilon_is_alpha_times_the_mean_largest_perturbation() -> None:
    assert FedProphetState(alpha=0.3, distance=5.0).epsilon == pytest.approx(1.5)
    assert FedProphetState(alpha=0.3).epsilon == 0  # in the first stage


@pytest.mark.parametrize("best", [None, BestRound(score=1.3, clean=0.6, adversarial=0.35, alpha=0.4, round=11)])
@pytest.mark.parametrize("fixed", [None, FIXED])
def test_a_checkpoint_holds_what_stages_left_as_json_values(fixed: FixedModule | None, best: BestRound | None) -> None:
    state = FedProphetState(r_min=7, stage=int(fixed is not None), fixed=fixed, best=best)
    values = json.loads(json.dumps(state.to_values()))
    assert FedProphetState.from_values(values) == state
    del values["fixed"]
    with pytest.raises(ValueError, match="expected"):
        FedProphetState.from_values(values)


def test_a_checkpoint_from_before_these_records_is_read() -> None:
    """Then no module and no round were empty objects."""
    values = FedProphetState(r_min=7).to_values() | {"fixed": {}, "best": {}}
    assert FedProphetState.from_values(values) == FedProphetState(r_min=7)


# ---- from round to round


def told(clean: float, adversarial: float) -> MetricRecord:
    return MetricRecord({"val-loss": 1.0, "val-accuracy": clean, "val-adversarial-accuracy": adversarial})


@pytest.fixture
def second_stage(tmp_path: Path) -> Iterator[Callable[..., list[FedProphetState]]]:
    """The state after each round of a second stage in which clients tell these accuracies; C* / A* = 2."""
    with a_run(tmp_path) as run:
        method = run.server.method
        assert isinstance(method, FedProphet)

        def states(accuracies: list[tuple[float, float]], stage: int = 1, **settings: Any) -> list[FedProphetState]:
            changes = {
                "fedprophet__apa_margin": 0.25,
                "fedprophet__stage_patience": 0,
                "fedprophet__apa_bound": "none",
            } | settings
            method.settings = run.settings.with_values({key_of(name): value for name, value in changes.items()})
            method.table = method.settings.of(FedProphetSettings)
            method.state = FedProphetState(
                r_min=1,
                stage_rounds=99,
                stage=stage,
                alpha=0.3,
                distance=5.0,
                nonnegative=True,
                fixed=FIXED,
                norms={"head": [1.0]},
            )
            found = []
            for number, accuracy in enumerate(accuracies, start=10):
                method.conclude(Round(number, run.arrays, evaluation=told(*accuracy)), run.arrays)
                found.append(replace(method.state))
            return found

        yield states


HIGH, LOW, EVEN = (0.7, 0.25), (0.2, 0.25), (0.5, 0.25)  # ratios 2.8, 0.8 and 2; within are 1.5 to 2.5
Play = Callable[..., list[FedProphetState]]


def test_alpha_from_round_to_round(second_stage: Play, caplog: pytest.LogCaptureFixture) -> None:
    def alphas(accuracies: list[tuple[float, float]], **changes: Any) -> list[float]:
        return [state.alpha for state in second_stage(accuracies, **changes)]

    caplog.set_level("WARNING")
    assert alphas([HIGH, HIGH, EVEN, LOW]) == [0.4, 0.5, 0.5, 0.4]
    assert caplog.messages == []
    assert alphas([LOW] * 5) == [0.2, 0.1, 0.0, 0.0, 0.0]
    assert caplog.messages == ["alpha is 0 after round 12: module 2 trains on clean features"]
    assert alphas([HIGH, LOW], stage=0) == [0.3, 0.3]  # the radius around images is fixed
    assert alphas([HIGH, LOW], fedprophet__apa=False) == [0.3, 0.3]
    # the authors': the mean of a window, at every second round, after those that do not count, not below the start
    assert alphas([HIGH, LOW, (0.3, 0.25)], fedprophet__apa_window=2) == [0.4, 0.4, 0.3]  # 2.8; 1.8; 1
    assert alphas([HIGH] * 4, fedprophet__apa_every=2) == [0.3, 0.4, 0.4, 0.5]
    assert alphas([HIGH] * 4, fedprophet__apa_after=1, attack__warmup=1) == [0.3, 0.3, 0.4, 0.5]
    # clean rounds are not of the window: 3 x HIGH would be 5.6, LOW alone is 1.6
    assert alphas([HIGH, HIGH, HIGH, LOW], fedprophet__apa_window=4, attack__warmup=3) == [0.3, 0.3, 0.3, 0.2]
    assert alphas([LOW, HIGH, LOW, LOW], fedprophet__apa_bound="start") == [0.3, 0.4, 0.3, 0.3]


def test_what_a_stage_leaves_to_the_next(second_stage: Play) -> None:
    """Its best round is the second, with a score of 0.6 + 2 x 0.35, whose weights were trained with alpha = 0.4."""
    states = second_stage([HIGH, (0.6, 0.35), LOW, EVEN], fedprophet__stage_patience=2, fedprophet__apa_start=0.7)
    assert [(state.stage, state.alpha) for state in states] == [(1, 0.4), (1, 0.4), (1, 0.3), (2, 0.7)]
    assert states[1].best == BestRound(score=pytest.approx(1.3), clean=0.6, adversarial=0.35, alpha=0.4, round=11)
    assert states[3].fixed == FixedModule(clean=0.6, adversarial=0.35, epsilon=0.4 * 5.0, nonnegative=True)
    assert states[3].void == [[12, 13]]
    assert (states[3].distance, states[3].recent, states[3].best) == (None, [], None)
    assert [state.norms for state in states] == [{"head": [1.0]}] * 3 + [{}]  # limits of updates are a stage's own
