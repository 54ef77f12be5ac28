"""The plan of learning rates: rounds that would train with a rate of 0 are refused, and records and report show the plan."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import TRIO, run_local, tiny_settings

from piecework.report.run_page import rate_plan, write_report
from piecework.server_app.rates import describe, low_lr_warning, require_rates
from piecework.server_app.records import RunDir
from piecework.strategies.cascade.fedprophet.server import FedProphet
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.strategies.cascade.profl.server import ProFL
from piecework.training.settings import SettingsError, learning_rate

COSINE: dict[str, Any] = TRIO | {"strategy": "fedavg", "training__lr": 0.1, "training__lr_schedule": "cosine"}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two rounds; then refused to go on without a longer plan; then two more with it."""
    folder = tmp_path_factory.mktemp("extended")
    run = run_local(folder, **COSINE, num_rounds=2)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(SettingsError) as caught:
        run_local(folder, **COSINE, num_rounds=4, resume_from=str(run.path))
    # 0.1 / 2 (1 + cos(2 pi / 4)) = 0.05
    assert str(caught.value) == (
        "round 3 and 1 more would train with a learning rate of 0: num-rounds = 4, and the cosine is 2 rounds long, as it was "
        "planned when the run began. Set training.lr-rounds = 4, which gives round 3 a rate of 0.05 "
        f"(piecework run --set resume-from={run.path} --set num-rounds=4 --set training.lr-rounds=4), or leave num-rounds as "
        f"it was"
    )
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(
        SettingsError, match=r"round 4 would train with a learning rate of 0.* the cosine is 3 rounds long"
    ):
        run_local(folder, **COSINE, num_rounds=4, training__lr_rounds=3, resume_from=str(run.path))
    return run_local(folder, **COSINE, num_rounds=4, training__lr_rounds=4, resume_from=str(run.path))


@pytest.mark.slow
def test_a_finished_run_is_extended_only_with_a_longer_plan(extended: RunDir) -> None:
    # cosines over 2 rounds, then over 4: 0.1 (1 + cos x) / 2 for x = 0, pi/2; pi/2, 3 pi/4
    rates = [record["lr"] for record in extended.rounds()]
    assert rates == pytest.approx([0.1, 0.05, 0.05, 0.0146447], rel=1e-5)
    plans = [record["lr_schedule"] for record in extended.rounds()]
    assert plans == ["cosine over 2 rounds"] * 2 + ["cosine over 4 rounds"] * 2
    assert extended.rounds()[2]["loss"] != extended.rounds()[1]["loss"]
    checkpoint = extended.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.values["lr-rounds"] == 4
    assert extended.settings()["training.lr-rounds"] == 4


def test_the_plan_is_in_the_report(extended: RunDir) -> None:
    pytest.importorskip("plotly")
    plan = "0.1 in round 1 to 0.05 in round 2 (cosine over 2 rounds), then 0.05 in round 3 to 0.0146 in round 4 (cosine over 4 "
    assert rate_plan(extended.rounds()).startswith(plan)
    page = write_report(extended).read_text(encoding="utf-8")
    assert page.count(plan) == 2  # in the overview, and below the figure
    assert rate_plan(extended.rounds()[:1]) == "0.1 in round 1 (cosine over 2 rounds)"
    assert rate_plan([{"round": 1}]) == ""  # of a version that did not record it


def test_a_new_run_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"round 2 and 1 more would .* the cosine is 1 rounds long \(training.lr-rounds\)"
    ):
        run_local(tmp_path, **COSINE, num_rounds=3, training__lr_rounds=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "places", "refused"),
    [
        ({}, [(20, 20)], ""),
        ({}, [(20, 20), (21, 21)], "round 21 would"),
        ({"training__lr_schedule": "constant"}, [(21, 21)], ""),
        ({"training__lr_schedule": "exponential"}, [(21, 21)], ""),
        ({"fedprophet__lr_restart": True}, [(40, 20), (41, 1)], ""),
        (
            {"fedprophet__lr_restart": True},
            [(40, 20), (41, 21), (42, 22), (43, 1)],
            "round 41 and 1 more would .* training.lr-rounds = 22",
        ),
        ({}, [], ""),
    ],
)
def test_when_a_plan_is_refused(changes: dict[str, Any], places: list[tuple[int, int]], refused: str) -> None:
    settings = tiny_settings(**{"training__lr_schedule": "cosine", "training__lr_rounds": 20} | changes)
    if not refused:
        require_rates(settings, places, "run")
    else:
        with pytest.raises(SettingsError, match=refused):
            require_rates(settings, places, "run")


def test_stages_that_a_schedule_leaves_no_rate() -> None:
    """0.994^500 = 0.049 and 0.994^1000 = 0.0024 of the start: the third module learns next to nothing."""
    paper = {"strategy": "fedprophet", "fedprophet__lr_restart": False, "training__lr": 0.005}
    settings = tiny_settings(**paper, training__lr_schedule="exponential", training__lr_decay=0.994)
    rates = {f"module {n}": learning_rate(settings, 500 * n - 499) for n in (1, 2, 3)}
    assert low_lr_warning(settings, rates) == (
        "the learning rate never exceeds 1 % of training.lr = 0.005 in module 3 (1.2e-05): the schedule (times 0.994 a round) "
        "goes on over all stages. Set fedprophet.lr-restart = true, or a larger training.lr-decay"
    )
    assert low_lr_warning(settings, {"module 1": 0.005, "module 2": 0.00005}) == ""
    cosine = tiny_settings(**COSINE)
    assert low_lr_warning(cosine, {"step 2": 0.0}).endswith("Set a larger training.lr-rounds")


def test_plans_in_words() -> None:
    assert describe(tiny_settings(training__lr_schedule="cosine", num_rounds=7)) == "cosine over 7 rounds"
    cosine = {"training__lr_schedule": "cosine", "training__lr_rounds": 5}
    assert describe(tiny_settings(**cosine, strategy="fedprophet")) == "cosine over 5 rounds, again in every stage"
    assert describe(tiny_settings(**cosine, strategy="fedavg")) == "cosine over 5 rounds"
    assert describe(tiny_settings(training__lr_schedule="exponential", training__lr_decay=0.99)) == "times 0.99 a round"
    assert describe(tiny_settings()) == "constant"


@pytest.mark.parametrize(
    ("restart", "last", "places"),
    [
        (False, 12, [(8, 8), (9, 9), (10, 10), (11, 11), (12, 12)]),
        (True, 12, [(8, 3), (9, 4), (10, 1), (11, 2), (12, 3)]),
        (True, 99, [(8, 3), (9, 4), (10, 1), (11, 2), (12, 3), (13, 4)]),
    ],
)
def test_the_rounds_to_come_of_a_cascade(restart: bool, last: int, places: list[tuple[int, int]]) -> None:
    """Three modules of at most four rounds; two rounds of the second are over. The first ended early."""
    state = SimpleNamespace(stage=1, stage_round=2, stage_rounds=4, r_min=1)
    cut = SimpleNamespace(with_smallest=lambda budget: cut)
    strategy: Any = SimpleNamespace(
        state=state,
        modules=[(0,), (1,), (2,)],
        cut=cut,
        table=FedProphetSettings(lr_restart=restart),
    )
    assert list(FedProphet.schedule(strategy, 8, last)) == places
    state.stage_rounds = 0  # a new run, which is not cut yet
    assert list(FedProphet.schedule(strategy, 8, last)) == []


def test_the_rounds_to_come_of_progressive_training() -> None:
    """Legs of at most 3, 2 and 4 rounds; one of the second is over."""
    strategy: Any = object.__new__(ProFL)
    strategy.state = SimpleNamespace(phase=1, phase_round=1, maximum=[3, 2, 4])
    assert [place for _, place in strategy.schedule(5, 99)] == [5, 6, 7, 8, 9]
    assert [place for _, place in strategy.schedule(5, 6)] == [5, 6]
