"""A study whose process is killed in the middle goes on, and ends with the numbers of one that nobody disturbed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from claims_harness import Process
from helpers import few_digits
from safetensors.numpy import load_file
from typer.testing import CliRunner

from piecework.api.studies import Study
from piecework.cli import app
from piecework.server_app.records import RunDir
from piecework.studies import queue

ROUNDS = 12
TINY = ["--strategy", "fedavg", "--fleet", "unlimited", "--rounds", str(ROUNDS), "--nodes", "3", "--dataset"]
SETTINGS = ("training.local-iterations=1", "evaluation.every=0", "workers=1", "training.torch-threads=1")


def words() -> list[str]:
    """The options of both runs."""
    return [*TINY, f"npz:{few_digits()}", *(word for text in SETTINGS for word in ("--set", text))]


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so, and fail if that takes five minutes."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def run_here(words: list[str], log: Path) -> Any:
    """Run to the end in this process."""
    return Process(CliRunner().invoke(app, words).exit_code)


def outcome(run: RunDir) -> tuple[list[tuple[int, float]], dict[str, bytes]]:
    """What a run's rounds learned, and the arrays of its model."""
    arrays = load_file(run.path / "model.safetensors")
    return [(each["round"], each["train_loss"]) for each in run.rounds()], {k: v.tobytes() for k, v in arrays.items()}


@pytest.mark.slow
@pytest.mark.processes
def test_after_kill_9_a_study_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "s"
    command = [sys.executable, "-m", "piecework", "run", "--study", str(folder), "--seeds", "1,2", *words()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ) as study:
        until(lambda: any(folder.glob("*-seed1-*/checkpoint/round-00001")))
        (child,) = psutil.Process(study.pid).children()
        study.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    (first,) = (RunDir(path) for path in folder.glob("*-seed1-*/"))
    before = first.rounds()
    assert 1 <= len(before) < ROUNDS
    monkeypatch.setattr(queue, "spawn", run_here)
    done = CliRunner().invoke(app, ["run", "--study", str(folder)])
    assert done.exit_code == 0, done.output
    assert "seed=1 goes on" in done.stderr
    assert "seed=2 starts" in done.stderr
    assert first.rounds()[: len(before) - 1] == before[:-1], "at most the last round was repeated"
    assert [run.settings["seed"] for run in Study(folder).runs] == [1, 2]
    alone = ["run", "--output-dir", str(tmp_path), "--set", "run-name=alone", *words(), "--seed", "1"]
    assert CliRunner().invoke(app, alone).exit_code == 0
    assert outcome(first) == outcome(RunDir(tmp_path / "alone"))
