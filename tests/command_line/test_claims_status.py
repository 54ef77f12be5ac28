"""What is missing of a claim, and the hours that are estimated from the rounds there are."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from claims_helpers import TWO_CASES, a_claim, finish

from benchmarks.claims import __main__ as command
from benchmarks.claims import jobs
from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Wanted
from benchmarks.claims.status import STATES, status_of
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import run_lock
from piecework.studies.notes import Note
from piecework.studies.pace import Pace, Seen, pace_of, seconds_left
from piecework.training.settings import Settings

WEAK = ("weak", "FeDepth")


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return a_claim(tmp_path, TWO_CASES)


def seen(*rounds: tuple[float, float | None], beside: float | None = None) -> Seen:
    return Seen([{"seconds": seconds, "accuracy": accuracy} for seconds, accuracy in rounds], beside)


def test_the_pace_of_rounds_with_and_without_an_evaluation() -> None:
    run = seen((9.0, None), (2.0, None), (4.0, None), (5.0, 0.5), (7.0, 0.6), beside=8.0)
    assert pace_of([run]) == Pace(3.0, 6.0, 8.0)
    assert pace_of([run, seen((30.0, None), (6.0, None), beside=10.0)]) == Pace(4.0, 6.0, 9.0)
    assert pace_of([seen((9.0, None))]) == Pace(9.0, None, 0.0)
    assert pace_of([seen((9.0, 0.1), (5.0, 0.2))]) == Pace(5.0, 5.0, 0.0)
    assert pace_of([seen()]) is None


def test_the_seconds_that_are_left() -> None:
    """Of ten rounds, those after the third: 4, 8 and 10 end with an evaluation."""
    settings = Settings.from_run_config({"num-rounds": 10, "evaluation.every": 4})
    assert seconds_left(settings, 3, Pace(2.0, 5.0, 7.0)) == 4 * 2 + 3 * 5 + 7
    assert seconds_left(settings, 0, Pace(2.0, 5.0)) == 7 * 2 + 3 * 5
    assert seconds_left(settings, 10, Pace(2.0, 5.0, 7.0)) == 7
    assert seconds_left(settings, 3, Pace(2.0, None, 7.0)) == 7 * 2 + 7


def test_runs_whose_evaluations_are_not_in_the_hours(claim: Claim, tmp_path: Path) -> None:
    job = jobs.job_of(claim, Wanted("weak", "bound", 1, None), None)
    finish(leave(claim, tmp_path, job, 2, 4.0, ""), [None, None], 4.0, "")
    found = status_of(claim, tmp_path)
    assert (found.rows[1].unevaluated, found.unevaluated) == (2, 2)
    assert command.left(found.rows[1]) == "56 s left, without the evaluations of 2 runs"


def leave(claim: Claim, out: Path, job: Job, rounds: int, seconds: float, status: str, failed: str = "") -> Path:
    """Leave a run with so many rounds, all evaluated; one that completes takes three seconds beside its rounds."""
    folder = job.folder(out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    Note(**{**vars(Note.of(job)), "failed": failed, "final": bool(failed)}).write(folder)
    if rounds:
        finish(folder, [0.5] * rounds, seconds, status)
    return folder


def counts(claim: Claim, out: Path, row: str) -> tuple[dict[str, int], float | None, int]:
    """The states of a row's runs that there are, the seconds left, and how many are unknown."""
    (found,) = [each for each in status_of(claim, out).rows if each.row == row]
    states: dict[str, int] = {state: count for state, count in found.counts.items() if count}
    return states, None if found.hours is None else pytest.approx(3600 * found.hours), found.unknown


def test_nothing_is_known_before_a_round(claim: Claim, tmp_path: Path) -> None:
    assert counts(claim, tmp_path, "FeDepth") == ({"missing": 7}, None, 7)
    assert counts(claim, tmp_path, "bound") == ({"missing": 2}, None, 2)
    assert status_of(claim, tmp_path).unknown == 7 + 2 + 4 + 2


def test_the_nearest_rounds_count(claim: Claim, tmp_path: Path) -> None:
    """FeDepth: a search of 3 rounds for each of three rates, then 8 rounds for each of two seeds in two cases."""
    searched = jobs.search_jobs(claim, WEAK)
    leave(claim, tmp_path, searched[0], 1, 10.0, "")
    assert counts(claim, tmp_path, "FeDepth") == ({"begun": 1, "missing": 6}, 2 * 10 + (3 + 3) * 10 + 4 * 8 * 10, 0)
    for job in searched:
        leave(claim, tmp_path, job, 3, 10.0, "completed")
    beside = 3.0
    assert counts(claim, tmp_path, "FeDepth") == ({"done": 3, "missing": 4}, 4 * (8 * 10 + beside), 0)
    run = jobs.job_of(claim, Wanted(*WEAK, 1, WEAK), 0.02)
    leave(claim, tmp_path, run, 3, 20.0, "")
    left = 5 * 20 + 8 * 20  # the run itself, and the other seed of its case
    other_case = 2 * 8 * 20  # which has neither a seed nor a search of its own
    assert counts(claim, tmp_path, "FeDepth") == ({"done": 3, "begun": 1, "missing": 3}, left + other_case, 0)
    skew = jobs.job_of(claim, Wanted("skew", "FeDepth", 1, WEAK), 0.02)
    leave(claim, tmp_path, skew, 8, 5.0, "completed")
    states = {"done": 4, "begun": 1, "missing": 2}
    assert counts(claim, tmp_path, "FeDepth") == (states, left + 8 * 5 + beside, 0)


def test_a_run_that_was_timed_before_its_rate_was_known(claim: Claim, tmp_path: Path) -> None:
    row = ("skew", "m-FeDepth")
    leave(claim, tmp_path, jobs.job_of(claim, Wanted(*row, 1, WEAK), 0.05), 2, 4.0, "")
    assert counts(claim, tmp_path, "m-FeDepth") == ({"begun": 1, "missing": 1}, (6 + 8) * 4.0, 0)


def test_failed_and_running_ones_are_counted(claim: Claim, tmp_path: Path) -> None:
    bound, skew = (jobs.job_of(claim, Wanted(case, "bound", 1, None), None) for case in ("weak", "skew"))
    leave(claim, tmp_path, bound, 0, 1.0, "", "nobody fits")
    with run_lock(leave(claim, tmp_path, skew, 2, 4.0, "")):
        assert counts(claim, tmp_path, "bound") == ({"running": 1, "failed": 1}, 6 * 4.0, 0)


def test_folders_of_older_definitions_are_named(claim: Claim, tmp_path: Path) -> None:
    job = jobs.job_of(claim, Wanted("weak", "bound", 1, None), None)
    folder = leave(claim, tmp_path, job, 2, 4.0, "completed")
    assert status_of(claim, tmp_path).older == []
    changed = a_claim(tmp_path, TWO_CASES.replace("clients = 6", "clients = 7"))
    assert status_of(changed, tmp_path).older == [str(folder)]
    assert counts(changed, tmp_path, "bound") == ({"missing": 2}, None, 2)


def test_damage_is_named(claim: Claim, tmp_path: Path) -> None:
    for job in jobs.search_jobs(claim, WEAK):
        run = RunDir(leave(claim, tmp_path, job, 3, 10.0, "completed"))
    run.rounds_file.write_bytes(run.rounds_file.read_bytes()[:-9])
    (said,) = status_of(claim, tmp_path).damage
    assert said.startswith(
        f"{run.rounds_file} is damaged: it has the records of 2 rounds, and the run's summary counts 3"
    )
    bound = leave(claim, tmp_path, jobs.job_of(claim, Wanted("weak", "bound", 1, None), None), 8, 4.0, "completed")
    bound.with_name(f"{bound.name}.json").write_text("{}", "utf-8")
    (tmp_path / "tiny" / "weak" / ".DS_Store").write_text("", "utf-8")
    assert status_of(claim, tmp_path).damage[1].startswith(f"{bound}.json is damaged: ")
    assert counts(claim, tmp_path, "bound") == ({"damaged": 1, "missing": 1}, 8 * 4.0 + 3, 0)


@pytest.mark.parametrize("hours", ["nan", "-1", "-inf", "soon"])
def test_hours_that_are_none_are_refused(hours: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parser().parse_args(["run", f"--hours={hours}"])
    assert f"{hours!r} is no number of hours" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status", "--out"], ["run", "--out"], ["collect"]])
def test_a_file_in_place_of_a_folder_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "names", list)
    file = tmp_path / "file"
    file.write_text("", "utf-8")
    for path in (file, file / "below"):
        monkeypatch.setattr(sys, "argv", ["claims", *words, str(path)])
        with pytest.raises(SystemExit, match=f"{path}: {file} is a file; name a folder"):
            command.main()


def test_a_row_that_no_client_can_train_is_called_so(claim: Claim, tmp_path: Path) -> None:
    reasons = (
        "it needs 9 bytes, and the richest client has 5: no client can take part",
        "it diverged: no client trained",
    )
    for case, reason in zip(("weak", "skew"), reasons, strict=True):
        leave(claim, tmp_path, jobs.job_of(claim, Wanted(case, "bound", 1, None), None), 0, 1.0, "", reason)
    line = command.lines_of(status_of(claim, tmp_path))[2]
    assert " ".join(line.split()) == "bound 1 failed, 1 cannot train 0.0 s left"


def test_a_reader_that_has_read_enough_is_no_error(
    claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(command, "names", lambda: ["tiny"])
    monkeypatch.setattr(command, "load", lambda name: claim)
    monkeypatch.setattr(sys, "argv", ["claims", "status", "--out", str(tmp_path)])
    with os.fdopen(writing, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        with pytest.raises(SystemExit) as ended:
            command.main()
    assert (ended.value.code, capsys.readouterr().err) == (141, "")


def test_the_command_says_what_is_left(
    claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["claims", "status", "--out", str(tmp_path), *words])
        command.main()
        return capsys.readouterr().out

    monkeypatch.setattr(command, "names", lambda: ["tiny"])
    monkeypatch.setattr(command, "load", lambda name: jobs.load(name, tmp_path))
    leave(claim, tmp_path, jobs.job_of(claim, Wanted("weak", "bound", 1, None), None), 8, 450.0, "completed")
    lines = said("tiny").splitlines()
    assert lines[0] == "tiny: 1 h 0 min left, 13 runs of unknown length"
    assert " ".join(lines[2].split()) == "bound 1 done, 1 missing 1 h 0 min left"
    assert lines[-1].startswith(
        "all: 1 h 0 min left, 13 runs of unknown length (`run --first 2` times two rounds of each row)"
    )
    found = json.loads(said("--json"))
    assert (found["hours"], found["unknown"]) == (pytest.approx((3600 + 3) / 3600), 13)
    assert found["claims"][0]["rows"][1]["counts"] == {
        **dict.fromkeys(STATES, 0),
        **{"done": 1, "missing": 1},
    }
