"""The picture of who trained which piece, and figures in words."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from report_helpers import client, make_run, refused, round_record

from piecework.report.in_words import in_words
from piecework.report.page import bars, line, subplots
from piecework.report.run_page import write_report
from piecework.report.svg import Cell, grid
from piecework.report.who_trained import classes, who_trained

PARTS = [{"part": part, "distilled": False} for part in ("a", "b", "<c>")]
ALL = {"trained": ["a", "b", "<c>"], "pieces": [[0, 1], [2]], "examples": 5}


def rounds() -> list[dict[str, Any]]:
    """Three answers of small boards, one of them of the last part only; a large one that refused."""
    some = {"aggregated": True, "examples": 30, "trained": PARTS}
    return [
        round_record(1, 0.5, [client(0, **ALL), client(1, trained=["<c>"], pieces=[[2]], examples=5)], **some),
        round_record(2, 0.5, [client(0, **ALL), refused(2) | {"device": "large"}], **some),
    ]


def test_shares_and_pieces_by_device_class() -> None:
    large, small = classes(rounds())
    assert (large.device, large.answers, large.share("a"), large.pieces) == ("large", 0, None, ())
    assert (small.device, small.answers, small.parts["a"], small.parts["<c>"]) == ("small", 3, 2, 3)
    assert small.share("b") == pytest.approx(2 / 3)
    assert small.pieces == ((0, 1), (2,))


def test_late_answers_that_were_used_count() -> None:
    record = rounds()[0] | {"late_used": [{"client": 7, "device": "small", "examples": 3, "trained": ["a"]}]}
    (small,) = classes([record])
    assert (small.answers, small.parts["a"], small.parts["b"]) == (3, 2, 1)


def test_the_picture_and_its_alternatives() -> None:
    section = who_trained(rounds())
    assert section is not None
    html = section.below
    assert "<c>" not in html
    assert re.findall(r'class="full" fill-opacity="([0-9.]+)"', html) == ["0.00"] * 3 + ["0.67", "0.67", "1.00"]
    assert re.findall(r'text-anchor="middle"[^>]*>([^<]*)</text>', html) == [
        *("a", "b", "&lt;c&gt;"),
        *("-", "-", "-"),
        *("67%", "67%", "100%"),
    ]
    said = "small, b: trained in 2 of 3 answers; in most of them in piece 1 of 2 (a, b)"
    assert f"<title>{said}</title>" in html
    words = "large trained nothing; small, in its 3 answers: a 67%, b 67%, &lt;c&gt; 100%."
    assert f">{words}</desc>" in html
    assert "<td>small</td><td>2 of 3</td><td>2 of 3</td><td>3 of 3</td>" in html


def test_pieces_are_drawn_without_gaps() -> None:
    html = grid(["x"], ["a", "b", "c"], [[Cell(1.0, ""), Cell(0.5, "", joined=True), Cell(0.999, "")]], "t", "d")
    boxes = [
        (int(x), int(w))
        for x, w in re.findall(r'<rect x="(\d+)" y="\d+" width="(\d+)" height="\d+" class="full"', html)
    ]
    (first, wide), (second, joined), (third, _) = boxes
    assert second == first + wide + 1  # a thin line
    assert third == second + joined + 1 + 8
    assert (wide, joined) == (45, 53)
    assert ">&gt;99%<" in html  # not 100 %


def test_records_of_older_versions_have_no_picture() -> None:
    assert who_trained([round_record(1, 0.5, [client(0)])]) is None


def test_figures_in_words() -> None:
    pytest.importorskip("plotly")
    figure = subplots(2)
    figure.add_trace(line([(1, 0.31), (2, None), (20, 0.972)], "test accuracy", 0), row=1, col=1)
    figure.add_trace(line([(1, 2.0), (20, 0.08284)], "loss", 1), row=2, col=1)
    figure.update_xaxes(title="round").update_yaxes(tickformat="~%", row=1)
    assert in_words(figure, "Accuracy") == (
        "Accuracy: test accuracy rises from 31.0% (round 1) to 97.2% (round 20); loss falls from 2 (round 1) to 0.08284 "
        "(round 20)."
    )
    record = [round_record(n, 0.5, [client(0)]) for n in (1, 2)]
    sent = bars(record, {"down": [1_500_000, 2_000_000], "up": [5, 5]}, "bytes").update_yaxes(ticksuffix="B")
    assert in_words(sent, "Bytes") == "Bytes: down 1.5 MB to 2 MB; up 5 B."
    assert in_words(subplots(1), "Nothing") == "Nothing: no values."


def test_a_page_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no plotly; its tables and the picture of pieces stay, and it says which figures it leaves out."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    page = write_report(make_run(tmp_path / "a", rounds()), plotly=False).read_text("utf-8")
    assert len(page) < 40_000
    assert "plotly.js" not in page
    assert page.count('<svg class="grid"') == 1
    assert "<h2>Accuracy and loss</h2>" not in page
    left_out = re.search(r"leaves out \(--without-plotly\): ([^.]*)\.", page)
    assert left_out is not None
    assert left_out[1].split(", ")[:2] == ["Accuracy and loss", "Validation accuracy by device class"]
    assert "<tr><td>2</td><td>50.00%</td><td>0.500</td><td>0.500</td><td>1 of 2</td><td>2.0 s</td></tr>" in page
