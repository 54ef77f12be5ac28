"""The harness's queue: what it starts, in which order, and what it says of the rest. Most runs here only leave files."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import psutil
import pytest
from claims_harness import IN_ORDER, NOBODY, SMALL, Harness, Process
from claims_helpers import a_claim, finish
from helpers import few_digits, tiny_settings
from typer.testing import CliRunner

from benchmarks.claims import jobs
from benchmarks.claims import runner as of_claims
from benchmarks.claims.jobs import Job
from benchmarks.claims.runner import ROOT, Options
from piecework.cli import app, how_to_go_on
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import run_lock
from piecework.studies import queue, runner
from piecework.studies.notes import state_of
from piecework.studies.outcomes import reason_in


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(tmp_path, monkeypatch)


def test_all_is_run_once_and_in_order(harness: Harness) -> None:
    harness.leave = lambda run, words: finish(run, [0.7 if "0.05" in run.name else 0.6])
    assert harness.run() == IN_ORDER
    assert [line for line in harness.said if "has completed" in line] == [
        f"{label} has completed: accuracy {'70' if label.endswith('0.05') else '60'}.0%, 5.0 s" for label in IN_ORDER
    ]
    assert harness.run() == []
    assert harness.said == []
    run = harness.folder("tiny: weak: FeDepth: seed 2")
    given = harness.words[-1]
    assert given[:6] == ["run", "--set", "workers=1", "--preset", f"{run}.toml", "--set"]
    assert given[6::2] == [f"output-dir={run.parent}", f"run-name={run.name}", "training.torch-threads=1"]
    written = run.with_name(f"{run.name}.toml").read_text("utf-8")
    assert "lr = 0.05" in written  # the better one
    assert json.loads(run.with_name(f"{run.name}.json").read_text("utf-8"))["commits"] == ["abc"]


def test_a_failure_is_said_at_once_and_tried_again_only_if_asked(harness: Harness) -> None:
    def fail(run: Path, words: list[str]) -> int:
        if "fedavg" in str(run):
            return 2
        return finish(run, [0.5]) or 0

    harness.leave = fail
    assert harness.run() == IN_ORDER
    label, log = IN_ORDER[3], f"{harness.folder(IN_ORDER[3])}.log"
    assert harness.said[harness.said.index(f"{label} starts") + 1] == (
        f"{label} FAILED, which is no result: no such data set\n  log: {log}"
    )
    assert harness.run() == []
    assert harness.said == [f"{label} failed before, which is no result (no such data set); --retry tries it again"]
    harness.leave = lambda run, words: finish(run, [0.5])
    assert harness.run(retry=True) == [label]
    assert harness.run() == []
    assert harness.said == []


def test_a_search_waits_for_a_run_that_failed_without_a_result(harness: Harness) -> None:
    """The rate whose run found a full disk is not lost to the other one."""

    def full(run: Path, words: list[str]) -> int:
        if "rate-0.05" in run.name:
            return finish(run, [0.1], status="failed", reason=f"{run} cannot be written: no space is left") or 1
        return finish(run, [0.5]) or 0

    harness.leave = full
    assert harness.run() == [*IN_ORDER[:2], IN_ORDER[3]]
    assert state_of(harness.folder(IN_ORDER[1])) == "broken"
    assert f"{IN_ORDER[2]} waits for the search of 'FeDepth' in 'weak', which has not ended" in harness.said
    assert harness.run() == []
    harness.leave = lambda run, words: finish(run, [0.9])
    assert harness.run(retry=True) == [IN_ORDER[1], IN_ORDER[2], IN_ORDER[4]]
    assert "lr = 0.05" in harness.folder(IN_ORDER[2]).with_name(f"{harness.folder(IN_ORDER[2]).name}.toml").read_text()


def test_a_search_with_damaged_records_is_open(harness: Harness) -> None:
    harness.run(only="FeDepth")
    rounds = harness.folder(IN_ORDER[0]) / "rounds.jsonl"
    rounds.write_bytes(rounds.read_bytes()[:-9])
    assert harness.run() == [IN_ORDER[3]]
    assert harness.said[0].startswith(f"tiny: the search of 'FeDepth' in 'weak' is open: {rounds} is damaged")


def test_three_failures_in_a_row_that_are_no_results_end_the_queue(harness: Harness) -> None:
    harness.leave = lambda run, words: 2
    assert harness.run() == [*IN_ORDER[:2], IN_ORDER[3]]  # the searches are open
    assert harness.said[-1] == (
        "3 runs in a row failed for reasons that are no results, so nothing more is started: remove the cause, and "
        "`run --retry` tries them again"
    )
    assert harness.run(retry=True) == [*IN_ORDER[:2], IN_ORDER[3]]
    codes = [2, 2, 0]

    def two_fail(run: Path, words: list[str]) -> int:
        return codes.pop(0) or finish(run, [0.5]) or 0

    harness.leave = two_fail
    assert harness.run(retry=True) == [*IN_ORDER[:2], IN_ORDER[3]]
    assert "in a row" not in harness.said[-1]


def test_a_damaged_note_costs_its_run_alone(harness: Harness) -> None:
    harness.run(only="FedAvg")
    note = harness.folder(IN_ORDER[3]).with_name(f"{harness.folder(IN_ORDER[3]).name}.json")
    note.write_text('{"claim": ', "utf-8")
    assert harness.run() == [*IN_ORDER[:3], IN_ORDER[4]]
    (said,) = [line for line in harness.said if "left alone" in line]
    assert said.startswith(f"{IN_ORDER[3]} is left alone: {note} is damaged: ")


def test_the_reason_in_a_log(tmp_path: Path) -> None:
    lines = ["round 1", "error: no data set", "try: another", " "]
    assert [reason_in(each) for each in (lines, lines[:1], [" "], [])] == ["no data set", "round 1", "", ""]
    run = RunDir(tmp_path)
    run.create(tiny_settings())
    assert reason_in(["failed: no answer from host:1", how_to_go_on(run, None)]) == "failed: no answer from host:1"


def test_an_older_summary_is_not_the_reason(harness: Harness) -> None:
    def refused_later(run: Path, words: list[str]) -> int:
        if "resume-from" not in str(words):
            finish(run, [0.1], status="failed")
            (run / "summary.json").write_text(
                json.dumps({"status": "failed", "reason": f"{NOBODY}\ntry: more"}), "utf-8"
            )
        return 2

    harness.leave = refused_later
    harness.run(only="FedAvg")
    assert f"FAILED: {NOBODY}\n" in harness.said[-1]
    harness.run(only="FedAvg", retry=True)
    assert "FAILED, which is no result: no such data set" in harness.said[-1]


def test_the_reason_of_a_run_that_cannot_train_is_its_own(harness: Harness) -> None:
    def nobody_fits(run: Path, words: list[str]) -> int:
        finish(run, [], status="failed", reason=f"{NOBODY}\ntry: fedepth")
        return 1

    harness.leave = nobody_fits
    assert harness.run() == IN_ORDER
    assert {line.partition(" FAILED: ")[2].splitlines()[0] for line in harness.said if "FAILED" in line} == {NOBODY}
    settings = harness.folder(IN_ORDER[4]).with_name(f"{harness.folder(IN_ORDER[4]).name}.toml").read_text("utf-8")
    assert "lr = 0.02" in settings, "all rates failed: the first one, so that the row's own run says why"


def test_a_killed_run_is_not_a_failure_and_goes_on(harness: Harness) -> None:
    def killed(run: Path, words: list[str]) -> int:
        finish(run, [0.5], status="")
        return -signal.SIGKILL

    harness.leave = killed
    assert harness.run() == [*IN_ORDER[:2], IN_ORDER[3]]
    assert (
        f"{IN_ORDER[0]} was ended after round 1 by a signal (exit code -9); the next `run` goes on with it"
        in harness.said
    )
    for label in (IN_ORDER[2], IN_ORDER[4]):
        assert f"{label} waits for the search of 'FeDepth' in 'weak', which has not ended" in harness.said
    harness.leave = lambda run, words: finish(run, [0.5, 0.5])
    harness.words.clear()
    assert harness.run() == IN_ORDER
    assert harness.words[0] == ["run", "--set", "workers=1", "--set", f"resume-from={harness.folder(IN_ORDER[0])}"]


def test_a_run_of_another_process_is_left_to_it(harness: Harness) -> None:
    harness.run(only="FedAvg")
    run = harness.folder(IN_ORDER[3])
    (run / "summary.json").unlink()
    with run_lock(run):
        assert state_of(run) == "running"
        assert harness.run(only="FedAvg") == []
    (said,) = harness.said
    assert said.startswith(f"{IN_ORDER[3]} is left to another: {run} is being written by process ")


def test_a_failed_run_is_not_started_by_another_harness_before_its_note_is_written(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has ended, and so its own lock is free."""
    starts, others = list[Path](), list[str]()

    class Ended(Process):
        def poll(self) -> int | None:
            if not others:
                of_claims.run([harness.claim], Options(harness.out, only="FedAvg"), others.append)
            return self.returncode

    def spawn(words: list[str], log: Path) -> Any:
        starts.append(log)
        log.write_text("error: no such data set\n", "utf-8")
        return Ended(2) if len(starts) == 1 else Process(2)

    monkeypatch.setattr(queue, "spawn", spawn)
    harness.run(only="FedAvg")
    assert len(starts) == 1
    (said,) = others
    assert said.startswith(f"{IN_ORDER[3]} is left to another: process ")
    assert state_of(harness.folder(IN_ORDER[3])) == "broken"


def test_a_row_alone_with_its_search(harness: Harness) -> None:
    assert harness.run(only="FeDepth") == [*IN_ORDER[:3], IN_ORDER[4]]


def test_when_the_hours_are_over_nothing_is_started(harness: Harness) -> None:
    assert harness.run(hours=-1.0) == []
    assert harness.said == ["the -1 hours are over; `status` says what is missing"]


def test_when_the_hours_are_over_what_runs_is_stopped(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    process, clock = Process(None), chain([0.0, 0.0], repeat(3601.0))
    monkeypatch.setattr(queue, "spawn", lambda words, log: process)
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    assert harness.run(hours=1.0) == [IN_ORDER[0]]
    assert process.signals == [signal.SIGTERM]
    assert harness.said[1:] == [
        f"{IN_ORDER[0]} was stopped after round 0, because the 1 hours are over; `run` goes on with it",
        "the 1 hours are over; `status` says what is missing",
    ]


def test_a_round_of_each_row_is_timed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Process]()

    def spawn(words: list[str], log: Path) -> Any:
        finish(log.with_name(log.name.removesuffix(".log")), [0.5, 0.5], status="")
        started.append(Process(None))
        return started[-1]

    monkeypatch.setattr(queue, "spawn", spawn)
    first, bound = IN_ORDER[1], IN_ORDER[3]
    assert harness.run(first=2) == [first, bound]
    assert [process.signals for process in started] == [[signal.SIGTERM]] * 2
    assert (
        f"{bound} was stopped after round 2, because it has its first 2 rounds; `run` goes on with it" in harness.said
    )
    assert harness.run(first=2) == []
    assert [state_of(harness.folder(label)) for label in (first, bound)] == ["begun", "begun"]


def test_jobs_run_at_once_and_end_with_the_harness(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Process]()

    def spawn(words: list[str], log: Path) -> Any:
        started.append(Process(None))
        return started[-1]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "spawn", spawn)
    monkeypatch.setattr(runner.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        harness.run(jobs=3)
    assert [line for line in harness.said if line.endswith("starts")] == [
        f"{label} starts" for label in (*IN_ORDER[:2], IN_ORDER[3])
    ]
    assert [process.signals for process in started] == [[signal.SIGTERM]] * 3
    stopped = "was stopped after round 0, because the harness was stopped; `run` goes on with it"
    assert [line for line in harness.said if line.endswith(stopped)] == [
        f"{label} {stopped}" for label in (*IN_ORDER[:2], IN_ORDER[3])
    ]


ROUNDS = 16
REAL = """
import sys
from pathlib import Path
from benchmarks.claims.jobs import load
from benchmarks.claims.runner import Options, run
folder = Path(sys.argv[1])
run([load("real", folder)], Options(folder / "out"), print)
"""


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so, and fail if that takes five minutes, as nothing does on a machine that is merely busy."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def rounds_of_one(folder: Path) -> tuple[Path, Job]:
    """The folder of the only run of a claim, and its job: many short rounds."""
    short = f'"num-rounds" = {ROUNDS}\ndataset = "npz:{few_digits()}"\n"training.local-iterations" = 1\n"evaluation.every" = 0'
    text = SMALL.partition("[search]")[0] + "[settings]" + SMALL.partition("[settings]")[2].partition("[[row]]")[0]
    text = text.replace("seeds = [1, 2]", "seeds = [1]").replace('"num-rounds" = 6', short)
    claim = a_claim(
        folder, f'{text}[[row]]\nname = "a"\nsettings = {{ strategy = "fedavg", fleet = "unlimited" }}\n', "real"
    )
    ((want,),) = jobs.wanted(claim)
    job = jobs.job_of(claim, want, None)
    return job.folder(folder / "out"), job


@pytest.fixture
def real_harness(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    rounds_of_one(tmp_path)
    with subprocess.Popen([sys.executable, "-c", REAL, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        yield process
        process.kill()


def run_here(words: list[str], log: Path) -> Any:
    """Run to the end in this process."""
    return Process(CliRunner().invoke(app, words).exit_code)


@pytest.mark.slow
def test_after_kill_9_no_run_is_left_and_the_next_harness_goes_on(
    tmp_path: Path, real_harness: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has more rounds than it can do between its first checkpoint and the signal."""
    run, job = rounds_of_one(tmp_path)
    until((run / "checkpoint" / "round-00001").is_dir)
    (child,) = psutil.Process(real_harness.pid).children()
    real_harness.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    before = RunDir(run).rounds()
    assert 1 <= len(before) < ROUNDS
    said = list[str]()
    monkeypatch.setattr(queue, "spawn", run_here)
    assert of_claims.run([jobs.load("real", tmp_path)], Options(tmp_path / "out"), said.append) == []
    assert said[0] == f"{job.label} goes on"
    assert state_of(run) == "done"
    after = RunDir(run).rounds()
    assert [record["round"] for record in after] == [*range(1, ROUNDS + 1)]
    assert after[: len(before) - 1] == before[:-1], "at most the last round was repeated"
