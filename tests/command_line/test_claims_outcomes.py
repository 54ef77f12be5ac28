"""Which failures are results of a run: those of which the run itself says that nobody can train, or that it diverged."""

import json
from pathlib import Path
from typing import Any

import pytest
from claims_helpers import finish, template
from helpers import TRIO, fleet_json, run_local

from benchmarks.claims.standings import cannot_train
from piecework.server_app.records import RunDir
from piecework.studies.failures import DIVERGED, result_of
from piecework.studies.notes import Note
from piecework.studies.outcomes import how_it_ended

EMPTY = "no client trained in round 2: 3 asked, 0 refused for memory\nclient 0: something"
POOR = {"status": "memory", "reason": "needs 9 bytes of training memory, the budget allows 5", "needed": 9}
NAN = {"status": "rejected", "reason": "train-loss is nan: it must be a finite number"}
BROKEN = {"status": "failed", "reason": "error 8: no space is left"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "fedavg", "fleet": fleet_json(poor=0.3)}, "no client trained in round 1: 3 asked, 3 refused"),
        ({"strategy": "exclusivefl", "fleet": fleet_json(poor=0.3)}, "exclusivefl: Training the whole model needs"),
        ({"strategy": "profl", "fleet": fleet_json(poor=100)}, "step 2 of layer-wise training needs"),
        ({"strategy": "fedprophet", "fleet": fleet_json(poor=100)}, "R_min of "),
        ({"strategy": "fedavg", "training.lr": 1e8}, f"{DIVERGED}train-loss is nan"),
    ],
)
def test_what_piecework_says_of_a_run_that_cannot_train(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        run_local(tmp_path, **TRIO, **settings)
    (folder,) = (path.parent for path in tmp_path.rglob("summary.json"))
    found = result_of(RunDir(folder))
    assert found.startswith(said)
    assert "\n" not in found
    assert cannot_train(found) is not found.startswith(DIVERGED)


def failed(folder: Path, clients: list[dict[str, Any]], reason: str = EMPTY, **changes: Any) -> str:
    """Leave a run that failed in its second round, and return the reason if that is a result."""
    (record,) = template().rounds()
    given = [client | own for client, own in zip(record["clients"], clients, strict=False)]
    finish(folder, [0.1, 0.1], status="failed", reason=reason, clients=given, **changes)
    return result_of(RunDir(folder))


def test_what_of_an_empty_round_is_a_result(tmp_path: Path) -> None:
    first = EMPTY.splitlines()[0]
    assert failed(tmp_path, [POOR, POOR]) == first
    assert failed(tmp_path, []) == first
    assert failed(tmp_path, [POOR, NAN]) == f"{DIVERGED}{NAN['reason']}"
    assert failed(tmp_path, [POOR, BROKEN]) == ""
    assert failed(tmp_path, [POOR | {"needed": 0}]) == "", "the machine was out of memory"
    assert failed(tmp_path, [{"status": "rejected", "reason": "the update holds no arrays"}]) == ""
    assert failed(tmp_path, [POOR], excluded=[1]) == ""
    assert failed(tmp_path, [POOR], busy=[1]) == ""
    assert failed(tmp_path, [POOR], EMPTY.replace("round 2", "round 3")) == "", "its record is missing"


@pytest.mark.parametrize(
    "reason",
    [
        "/x/rounds.jsonl cannot be written: no space is left",
        "KeyError",
        "1 of 3 clients connected within 60 s",
        "no client could measure the features that stage 2 starts from: error 8: no space is left",
        "",
    ],
)
def test_other_failures_are_no_results(reason: str, tmp_path: Path) -> None:
    assert failed(tmp_path, [POOR], reason) == ""


def test_a_part_that_no_client_can_train(tmp_path: Path) -> None:
    """The text is that of the coverage check (test_coverage.py)."""
    said = "no client can train conv1..conv3, so they keep random initial weights"
    assert failed(tmp_path, [], f"{said}. Give some clients more memory") == f"{said}. Give some clients more memory"


def test_a_stage_that_no_client_can_measure(tmp_path: Path) -> None:
    said = "no client could measure the features that stage 2 starts from: "
    assert failed(tmp_path, [], f"{said}{POOR['reason']}") == f"{said}{POOR['reason']}"
    assert failed(tmp_path, [], f"{said}{POOR['reason']}; no client is connected") == ""


def test_only_the_summary_of_this_process_counts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert failed(folder, [POOR]) != ""
    folder.with_name("run.log").write_text("error: no such data set\n", "utf-8")
    now = RunDir(folder).summary_version()
    found = [how_it_ended(folder, 1, before, "") for before in (None, now)]
    assert [(each.failed, each.final) for each in found] == [
        (EMPTY.splitlines()[0], True),
        ("no such data set", False),
    ]


def test_a_note_of_before_is_judged_by_the_summary_that_gave_its_reason(tmp_path: Path) -> None:
    def read(reason: str) -> tuple[str, bool]:
        values = {"claim": "a", "case": "b", "row": "c", "searched": False, "seed": 1, "rate": None, "hash": "d"}
        (tmp_path / "run.json").write_text(json.dumps(values | {"failed": reason}), "utf-8")
        note = Note.read(tmp_path / "run")
        assert note is not None
        return note.failed, note.final

    first = EMPTY.splitlines()[0]
    assert read(first) == (first, False), "there is no summary"
    assert failed(tmp_path / "run", [POOR]) == first
    assert read(first) == (first, True)
    assert read("no such data set") == ("no such data set", False)
    assert failed(tmp_path / "run", [NAN]) != ""
    assert read(first) == (f"{DIVERGED}{NAN['reason']}", True)
