"""What a run's page says of SpaFL: densities, thresholds, and which filters are kept."""

from pathlib import Path
from typing import Any

import pytest
from report_helpers import assert_self_contained, client, make_run, round_record, two_rounds

from piecework.report.draw_panels import section
from piecework.report.run_page import write_report
from piecework.strategies.sparse.spafl.panels import density_panel, pattern_panel, rows

pytest.importorskip("plotly")


def rounds() -> list[dict[str, Any]]:
    """A layer of two filters, of which the clients prune one half; no client trained in the second round."""

    def filters(density: float | None, kept: list[int], threshold: float) -> dict[str, Any]:
        return {"atoms.0.conv.weight": {"density": density, "threshold": threshold, "open": kept}}

    told = [(1.0, [100, 100], 0.0), (None, [0, 0], 0.0), (0.75, [100, 50], 0.02)]
    return [
        round_record(n, 0.5, [client(0)], filters=filters(*each), density=0.8 if n == 3 else None, personal=True)
        for n, each in enumerate(told, start=1)
    ]


def test_rows_and_lines() -> None:
    assert rows(rounds()) == [("atoms.0.conv", "2", "100.0%", "75.0%", "75.0%", "0.02")]
    panel = density_panel(rounds())
    assert "the mean density over layers is 80.0%" in panel.sentence
    assert [(list(trace.x), list(trace.y)) for trace in section(panel, rounds()).drawn.data] == [
        ([1, 2, 3], [1.0, None, 0.75]),
        ([1, 2, 3], [0.0, 0.0, 0.02]),
    ]


def test_a_picture_has_a_row_a_filter_and_a_column_a_round() -> None:
    (picture,) = section(pattern_panel(rounds()), rounds()).drawn.data
    assert [list(each) for each in picture.z] == [[100, 0, 100], [100, 0, 50]]
    assert list(picture.x) == [1, 2, 3]


def test_page(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "a", rounds(), strategy="spafl")).read_text(encoding="utf-8")
    assert_self_contained(page)
    assert "<h2>Which filters are kept</h2>" in page
    assert "parts of the test data" in page
    other = write_report(make_run(tmp_path / "b", two_rounds(0.25, 0.75))).read_text(encoding="utf-8")
    assert "<h2>Which filters are kept</h2>" not in other
