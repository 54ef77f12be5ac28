"""What the committed records have is not run again, and what the harness notes of a run's time."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_harness import IN_ORDER, NOBODY, SMALL, Harness, Process
from claims_helpers import a_claim, finish

from benchmarks.claims import jobs
from benchmarks.claims.collect import collect
from benchmarks.claims.status import status_of
from piecework.studies import queue, runner
from piecework.studies.notes import Note


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(tmp_path, monkeypatch)


def recorded(harness: Harness, docs: Path, **failed: str) -> None:
    """Record what the harness has run, move its runs away, and let the rows of `failed` have failed for these reasons."""
    found = collect(harness.claim, harness.out, docs, lambda _: None)
    runs = [replace(run, status="failed", reason=failed[run.row]) if run.row in failed else run for run in found.runs]
    replace(found, runs=runs).write(harness.claim, docs)
    harness.out.rename(docs / "moved")


def test_what_the_records_have_is_not_run_again(harness: Harness, tmp_path: Path) -> None:
    harness.leave = lambda run, words: finish(run, [0.7 if "0.05" in run.name else 0.6])
    assert harness.run(only="FedAvg", records=tmp_path) == [IN_ORDER[3]]
    recorded(harness, tmp_path / "docs")
    assert harness.run(records=tmp_path / "docs") == [*IN_ORDER[:3], IN_ORDER[4]]
    assert f"{IN_ORDER[3]} is in the records" in harness.said
    recorded(harness, tmp_path / "more")
    assert harness.run(records=tmp_path / "more", first=2) == [IN_ORDER[1], IN_ORDER[3]]
    harness.out.rename(tmp_path / "timed")
    assert harness.run(records=tmp_path / "more") == [IN_ORDER[3]]
    assert "tiny: weak: FeDepth: search is in the records: rate 0.05" in harness.said
    changed = a_claim(tmp_path, SMALL.replace("clients = 3", "clients = 4"))
    harness.claim, harness.out = changed, tmp_path / "changed"
    assert harness.run(records=tmp_path / "more") == IN_ORDER


def test_a_recorded_failure_is_tried_again_only_with_retry(harness: Harness, tmp_path: Path) -> None:
    harness.run()
    recorded(harness, tmp_path / "docs", FedAvg=NOBODY)
    assert harness.run(records=tmp_path / "docs") == []
    assert harness.run(records=tmp_path / "docs", retry=True) == [IN_ORDER[3]]


def test_how_much_of_a_core_a_run_had(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is watched ten times; the fake one has the processor's time of this process."""
    ended = Process(None)
    polls = iter(range(10))

    def spawn(words: list[str], log: Path) -> Any:
        finish(log.with_name(log.name.removesuffix(".log")), [0.5])
        return ended

    def sleep(_: float) -> None:
        if next(polls, None) is None:
            ended.returncode = 0

    monkeypatch.setattr(queue, "spawn", spawn)
    monkeypatch.setattr(runner.time, "sleep", sleep)
    harness.run(only="FedAvg")
    note = Note.read(harness.folder(IN_ORDER[3]))
    assert note is not None
    assert 0 < note.core <= time.process_time()
    assert note.share == note.core / note.watched
    assert Note.of(jobs.search_jobs(harness.claim, ("weak", "FeDepth"))[0]).share is None


def test_recorded_runs_are_not_missing_and_say_how_long_others_take(harness: Harness, tmp_path: Path) -> None:
    """Each of two searching runs took 5 s with a quarter of a core for what are two rounds; a run with a seed has six."""
    harness.run()
    for label in IN_ORDER:
        folder = harness.folder(label)
        note = Note.read(folder) or pytest.fail()
        replace(note, watched=8.0, core=2.0).write(folder)
    found = collect(harness.claim, harness.out, tmp_path / "docs", lambda _: None)
    (search,) = found.searches
    assert (search.seconds, search.core_seconds) == (2 * (2 + 3), 2 * (2 + 3) / 4)
    replace(found, runs=[run for run in found.runs if run.row == "FedAvg"]).write(harness.claim, tmp_path / "docs")
    status = status_of(harness.claim, tmp_path / "empty", tmp_path / "docs")
    fedepth, fedavg = status.rows
    assert {state: count for state, count in fedepth.counts.items() if count} == {"recorded": 2, "missing": 2}
    assert fedepth.hours == pytest.approx(2 * 6 * (2.5 / 4) / 3600)
    assert (fedavg.counts["recorded"], fedavg.hours) == (1, 0.0)
    assert status.unknown == 0


def test_a_round_s_seconds_count_by_the_share_of_a_core(harness: Harness, tmp_path: Path) -> None:
    harness.leave = lambda run, words: finish(run, [0.5, 0.5], 8.0, status="")
    harness.run(only="FedAvg")
    folder = harness.folder(IN_ORDER[3])
    note = Note.read(folder) or pytest.fail()
    replace(note, watched=8.0, core=2.0, failed="").write(folder)
    assert status_of(harness.claim, harness.out, tmp_path).rows[1].hours == pytest.approx(4 * 8 / 4 / 3600)
