"""What is shown of a private run: in its summary, on its page, in a round's line, and beforehand in a plan."""

from pathlib import Path
from typing import Any

import pytest
from helpers import run_local
from settings_helpers import settings_with

from piecework.plans.plan import make_plan
from piecework.plans.plan_privacy import foresight
from piecework.plans.question import PlanQuestion
from piecework.report.privacy_view import part_name, privacy_panels, privacy_rows
from piecework.report.run_page import report_html
from piecework.server_app.round_line import round_line
from piecework.server_app.summary import accuracy_by_device


def a_record(number: int, epsilon: float, **changes: Any) -> dict[str, Any]:
    private = {
        "epsilon": epsilon,
        "delta": 5e-4,
        "limit": 8.0,
        "noise_multiplier": 0.652,
        "clip": 1.0,
        "sampling_rate": 0.05,
        "secret": True,
        "signal_to_noise": {"atoms.0": 0.5 * number, "head": 2.0},
    }
    parts = [{"part": "conv1"}, {"part": "head"}]
    return {"round": number, "trained": parts, "privacy": private | changes}


def test_what_was_spent_stands_in_one_row() -> None:
    assert privacy_rows([a_record(1, 3.0), a_record(2, 4.25)]) == [
        ("privacy", "epsilon 4.25 of 8 with delta 0.0005 (noise 0.652 x clip 1, rate 0.05)")
    ]
    assert privacy_rows([a_record(1, 3.0, limit=0.0)])[0][1].startswith("epsilon 3 with delta")
    assert privacy_rows([{"round": 1}]) == privacy_rows([]) == []


def test_a_known_seed_is_said_first() -> None:
    (row,) = privacy_rows([a_record(1, 3.0, secret=False)])
    assert row[1].startswith("nothing is private: the noise has a known seed (privacy.seed); else epsilon 3")


def test_the_page_has_the_curve_and_the_ratio_of_each_part() -> None:
    (panel,) = privacy_panels([a_record(1, 3.0), a_record(2, 4.25)])
    assert panel.plots[0].curves[0].points == [(1.0, 3.0), (2.0, 4.25)]  # type: ignore[union-attr]
    assert panel.rows == [("conv1", "1.00", "0.75"), ("head", "2.00", "2.00")]
    assert privacy_panels([{"round": 1}]) == []


@pytest.mark.parametrize(
    ("unit", "name"), [("atoms.1", "b"), ("atoms.7", "atoms.7"), ("head", "head"), ("exits.0", "exits.0")]
)
def test_a_unit_has_the_name_of_its_part(unit: str, name: str) -> None:
    assert part_name(unit, ["a", "b", "head"]) == name


def test_a_private_run_shows_it_everywhere(tmp_path: Path) -> None:
    run = run_local(
        tmp_path, num_rounds=2, architecture__norm="group", privacy__noise_multiplier=2.0, privacy__clip=0.5
    )
    record = run.rounds()[-1]
    assert f"epsilon {record['privacy']['epsilon']:.3g}" in round_line(record, 2)
    assert accuracy_by_device([]) == record["accuracy_by_device"] == {}
    page = report_html(run, plotly=False)
    assert "<h2>Privacy</h2>" in page.replace(' id="privacy"', "")
    assert "(noise 2 x clip 0.5, rate 0.15)" in page


def test_a_plan_says_what_will_be_spent_and_where_it_ends() -> None:
    private = {"architecture__norm": "group", "clients": 20, "privacy__noise_multiplier": 0.7}
    plans = [
        make_plan(settings_with(**private, **more), PlanQuestion((1, 8, 8), 10, 57))
        for more in ({}, {"privacy__epsilon": 8.0})
    ]
    (without,), (limited,) = map(foresight, plans)
    assert "20 rounds spend epsilon" in without
    assert plans[1]["privacy"]["rounds"] < 20
    assert limited.endswith("; it ends before the others of num-rounds = 20")
    assert foresight(make_plan(settings_with(clients=20), PlanQuestion((1, 8, 8), 10, 57))) == []
