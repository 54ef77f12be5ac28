"""What a run's page says of PriSM: how many kernels layers need, and which were drawn."""

from pathlib import Path
from typing import Any

import pytest
from report_helpers import assert_self_contained, client, make_run, round_record, two_rounds

from piecework.report.draw_panels import section
from piecework.report.run_page import write_report
from piecework.strategies.low_rank.prism.panels import panels, rows

pytest.importorskip("plotly")


def rounds() -> list[dict[str, Any]]:
    """Two layers; in the second round the first needs half of its kernels."""

    def layers(rank: float, first: float) -> dict[str, Any]:
        return {
            "atoms.1.conv.weight": {"rank": rank, "kernels": 8, "drawn": [first, 1.0]},
            "atoms.2.conv.weight": {"rank": 3.0, "kernels": 4, "drawn": [2.0, 0.0]},
        }

    return [
        round_record(n, 0.5, [client(0)], keep_ratios={"0": 0.4}, layers=layers(*both))
        for n, both in enumerate([(8.0, 3.0), (4.0, 2.0)], start=1)
    ]


def test_ranks_and_draws() -> None:
    (panel,) = panels(rounds(), {})
    traces = section(panel, rounds()).drawn.data
    assert [(trace.name, list(trace.x), list(trace.y), trace.xaxis) for trace in traces] == [
        ("atoms.1.conv", [1, 2], [1.0, 0.5], "x"),
        ("atoms.2.conv", [1, 2], [0.75, 0.75], "x"),
        ("atoms.1.conv", [1, 2], [2.5, 1.0], "x2"),
        ("atoms.2.conv", [1, 2], [2.0, 0.0], "x2"),
    ]
    first, second, again, _ = traces
    assert first.line.color == again.line.color != second.line.color
    assert [trace.showlegend for trace in traces] == [None, None, False, False]


def test_a_layers_row() -> None:
    assert rows(rounds()) == [
        ("atoms.1.conv", "8", "8.0", "4.0", "2.5 1"),
        ("atoms.2.conv", "4", "3.0", "3.0", "2 0"),
    ]


def test_page(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "a", rounds(), strategy="prism")).read_text(encoding="utf-8")
    assert_self_contained(page)
    assert "<h2>Principal kernels</h2>" in page
    page = write_report(make_run(tmp_path / "c", rounds(), strategy="orthdrop")).read_text(encoding="utf-8")
    assert "<h2>Principal kernels</h2>" in page
    other = write_report(make_run(tmp_path / "b", two_rounds(0.25, 0.75))).read_text(encoding="utf-8")
    assert "Principal kernels" not in other[other.index("<body>") : other.index("<h2>Settings</h2>")]
