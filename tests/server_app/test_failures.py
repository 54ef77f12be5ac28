"""Who failed and why, by device class, in the summary, the tables and the exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import few_digits, fleet_json
from report_helpers import client, make_run, round_record, text_of
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.console import PlainConsole
from piecework.report.display import summary_table
from piecework.report.run_page import write_report
from piecework.server_app.failures import excluded_classes, failure_text, failures
from piecework.server_app.records import RunDir
from piecework.server_app.summary import summarise


def refused(number: int, needed: int, allowed: int, device: str) -> dict[str, Any]:
    reason = f"training conv1 needs {needed:,} bytes, the budget allows {allowed:,}"
    return client(number, device=device, status="memory", needed=needed, allowed=allowed, reason=reason)


ZEROS = [refused(i, 9_014_480, 9_000_000, "pi-zero") for i in range(2)]
LOST = [round_record(n, 0.5, [*ZEROS, client(2, device="pi-4")], devices={"pi-4": 1, "pi-zero": 2}) for n in (1, 2)]


def test_reasons_are_counted_by_device_class() -> None:
    (row,) = failures(LOST)
    assert failure_text(row) == "pi-zero 4 of 4 (memory: needed 9,014,480 bytes, allowed 9,000,000)"
    assert excluded_classes(LOST) == {"pi-zero": "no client of pi-zero ever trained: all 4 requests failed"}
    once = round_record(1, 0.5, ZEROS[:1])
    assert excluded_classes([once]) == {"pi-zero": "no client of pi-zero ever trained: its only request failed"}


def test_the_nearest_to_fitting_and_other_reasons() -> None:
    clients = [
        refused(0, 2_000, 1_000, "a"),
        refused(1, 1_900, 1_000, "a"),
        client(2, device="a", status="crashed", reason="error 8: gone"),
        client(3, device="a"),
        client(4, device="b", status="memory", reason="the device ran out of memory", needed=0),
        client(5, device="b"),
    ]
    assert [failure_text(row) for row in failures([round_record(1, None, clients)])] == [
        "a 3 of 4 (memory 2: needed 1,900 bytes, allowed 1,000 in the closest case; crashed 1: error 8: gone)",
        "b 1 of 2 (memory: the device ran out of memory)",
    ]
    assert excluded_classes([round_record(1, None, clients)]) == {}


def test_a_class_that_was_never_asked_is_excluded_too() -> None:
    rounds = [round_record(1, 0.5, [client(0, device="a")], devices={"a": 1, "b": 3})]
    assert failures(rounds) == []
    assert excluded_classes(rounds) == {"b": "no client of b ever trained: none was asked to"}
    assert excluded_classes([]) == {}


def test_the_summary_names_them(tmp_path: Path) -> None:
    summary = summarise(make_run(tmp_path / "a", LOST), "completed", "", 1.0)
    assert summary["failures"] == [
        {
            "device": "pi-zero",
            "asked": 4,
            "failed": 4,
            "reasons": [{"status": "memory", "count": 4, "reason": "needed 9,014,480 bytes, allowed 9,000,000"}],
        }
    ]
    assert summary["excluded_classes"] == excluded_classes(LOST)


def test_the_table_and_the_page_say_it_in_bold(tmp_path: Path) -> None:
    summary = {"status": "completed", "rounds": 2, "clients_asked": 6, "clients_answered": 2, "clients_failed": 4}
    table = summary_table(summary, LOST)
    shown = text_of(table, width=120)
    assert "asked 6, answered 2, failed 4" in shown
    assert "pi-zero 4 of 4 (memory: needed 9,014,480 bytes, allowed 9,000,000)" in shown
    segments = PlainConsole(width=120).render(table)
    bold = [segment.text for segment in segments if segment.style and segment.style.bold]
    assert "no client of pi-zero ever trained: all 4 requests failed" in "".join(bold)
    pytest.importorskip("plotly")
    page = write_report(make_run(tmp_path / "a", LOST)).read_text(encoding="utf-8")
    assert "<strong>no client of pi-zero ever trained: all 4 requests failed</strong>" in page
    assert "memory 4: needed 9,014,480 bytes, allowed 9,000,000" in page


def test_late_answers_are_counted_over_all_rounds(tmp_path: Path) -> None:
    """Three came late: one counted two rounds later, one was rejected, and one was an error."""
    came = [{"client": number, "round": 1, "status": status} for number, status in enumerate(("ok", "ok", "crashed"))]
    used = {"client": 0, "round": 1, "device": "pi-zero", "examples": 10, "trained": ["head"], "age": 2, "weight": 5.8}
    dropped = {"client": 1, "round": 1, "reason": "rejected: its norm"}
    late: list[dict[str, Any]] = [
        {"late_replies": came[:1], "late_used": [], "late_dropped": []},
        {"late_replies": came[1:], "late_used": [used], "late_dropped": [dropped]},
    ]
    rounds = [record | more for record, more in zip(LOST, late, strict=True)]
    run = make_run(tmp_path / "a", rounds)
    assert summarise(run, "completed", "", 1.0)["late_answers"] == {"arrived": 3, "used": 1, "dropped": 1}
    shown = "arrived 3, used 1, dropped 1"
    assert shown in text_of(summary_table({"status": "completed", "rounds": 2}, rounds), width=120)
    assert "late answers" not in text_of(summary_table({"status": "completed", "rounds": 2}, LOST), width=120)
    pytest.importorskip("plotly")
    assert f"<th>Late answers</th><td>{shown}</td>" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize(("options", "code"), [(["--fail-on-excluded-class"], 1), ([], 0)], ids=["asked", "not-asked"])
def test_scripts_can_ask_for_an_exit_code(tmp_path: Path, options: list[str], code: int) -> None:
    """One of two device classes is too small for the whole model."""
    settings = {"clients": 4, "clients-per-round": 0, "dataset": f"npz:{few_digits()}", "strategy": "fedavg"}
    settings |= {"num-rounds": 1, "data.partition": "iid", "training.local-epochs": 1, "workers": 1, "run-name": "run"}
    settings |= {"fleet": fleet_json(large=1.0, small=0.5)}
    sets = [f"--set={key}={value}" for key, value in settings.items()]
    done = CliRunner().invoke(app, ["run", "--json", *options, "--output-dir", str(tmp_path), *sets])
    assert done.exit_code == code, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    why = "no client of small ever trained: all 2 requests failed"
    assert (summary["status"], summary["excluded_classes"]) == ("completed", {"small": why})
    assert (f"--fail-on-excluded-class: {why}" in done.stderr) == bool(code)
    (record,) = RunDir(tmp_path / "run").rounds()
    assert record["devices"] == {"large": 2, "small": 2}
    missing = {c["client"]: (c["needed"], c["allowed"]) for c in record["clients"] if c["status"] == "memory"}
    assert missing == dict.fromkeys((1, 3), (1_030_568, 515_284))
