"""What a run's page says of ProFL: movements, slopes, and when blocks were frozen."""

from pathlib import Path
from typing import Any

import pytest
from report_helpers import assert_self_contained, client, make_run, round_record, two_rounds

from piecework.report.draw_panels import section
from piecework.report.run_page import write_report
from piecework.strategies.cascade.profl.panels import panels, rows

pytest.importorskip("plotly")


def progress(
    number: int, phase: str, movement: float | None, slope: float | None = None, **more: Any
) -> dict[str, Any]:
    record: dict[str, Any] = {"stage": phase, "effective_movement": movement, "slope": slope, "slope_threshold": None}
    return round_record(number, 0.5, [client(0)], **record | {"times_below": 0, "ended": ""} | more)


SETTINGS = {f"profl.movement-{key}": 1 for key in ("window", "fraction", "times")} | {"profl.freezing": "movement"}


def rounds() -> list[dict[str, Any]]:
    """Step 2 shrinks, is frozen after its fourth round, and is mapped; step 1 grows and ends with its rounds."""
    return [
        progress(1, "shrinking, step 2", None),
        progress(2, "shrinking, step 2", 1.0),
        progress(3, "shrinking, step 2", 0.75, -0.25, slope_threshold=0.05),
        progress(4, "shrinking, step 2", 0.75, -0.01, slope_threshold=0.05, times_below=1, ended="frozen"),
        progress(5, "map, block 2", None, ended="rounds"),
        progress(6, "growing, step 1", None, block_clients=4, output_layer_clients=6),
        progress(7, "growing, step 1", 0.5, block_clients=5, output_layer_clients=5),
    ]


def test_lines_end_where_a_part_of_the_run_does() -> None:
    (panel,) = panels(rounds(), SETTINGS)
    found = {trace.name: (list(trace.x), list(trace.y)) for trace in section(panel, rounds()).drawn.data}
    assert found == {
        "effective movement": ([2, 3, 4, 4.5, 5.5, 7, 7.5], [1.0, 0.75, 0.75, None, None, 0.5, None]),
        "slope, its size": ([3, 4, 4.5, 5.5, 7.5], [0.25, 0.01, None, None, None]),
        "threshold": ([3, 4, 4.5, 5.5, 7.5], [0.05, 0.05, None, None, None]),
    }


def test_how_each_part_of_the_run_ended() -> None:
    assert rows(rounds()) == [
        ("shrinking, step 2", "1 to 4", "-", "0.75", "-0.01", "1", "frozen"),
        ("map, block 2", "5", "-", "-", "-", "-", "its rounds"),
        ("growing, step 1", "6 to 7", "4.5, 5.5", "0.5", "-", "-", "-"),
    ]


def test_page(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "a", rounds(), strategy="profl")).read_text(encoding="utf-8")
    assert_self_contained(page)
    assert "<h2>Effective movement of the block in training</h2>" in page
    assert "was below 0.1 of its first slope in 20 rounds in a row" in page
    by_parameters = make_run(tmp_path / "b", rounds(), strategy="profl", profl__freezing="parameters")
    assert "by the number of its parameters" in write_report(by_parameters).read_text(encoding="utf-8")
    other = write_report(make_run(tmp_path / "c", two_rounds(0.25, 0.75))).read_text(encoding="utf-8")
    assert "Effective movement" not in other[other.index("<body>") : other.index("<h2>Settings</h2>")]
