"""The load benchmark on a SuperLink, in its short form: real connections of nodes, a real ServerApp."""

import json
import sys

import pytest

from benchmarks import superlink
from benchmarks.superlink import row

FOUND = {
    "nodes": 100,
    "rounds": 2,
    "seconds": 12.34,
    "slowest": 20.0,
    "asked": 200,
    "lost": 1,
    "cpu": 9.5,
    "mb": 200.0,
    "locked": 1,
    "failures": [("pushing: HTTPStatusError", 1)],
}


def test_a_row_has_the_figures_and_what_cost_answers() -> None:
    assert [line.split() for line in row(FOUND).splitlines()] == [
        ["100", "2", "12.3", "20.0", "1", "of", "200", "9.5", "200", "1"],
        ["1", "x", "pushing:", "HTTPStatusError"],
    ]
    assert row(FOUND | {"rounds": 0}).split() == ["100", "no", "round", "ended"]


@pytest.mark.slow
@pytest.mark.processes
def test_no_answer_is_lost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "6", "--rounds", "2", "--arrays", "2", "--bytes", "1000", "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/superlink.py", *words])
    superlink.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["rounds"], found["asked"], found["lost"]) == (6, 2, 12, 0)
    assert (found["locked"], found["failures"]) == (0, [])
    assert found["cpu"] > 0
    assert found["mb"] > 50
