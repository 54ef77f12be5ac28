"""A client's executor that does not take its tasks, among real processes: its deadline, and its answer after that."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from piecework.server_app.records import RunDir

CLIENTS = 2
SETTINGS = {
    "num-rounds": 400,
    "clients-per-round": 0,
    "training.local-iterations": 2,
    "architecture.batch-norm": "running",  # a measurement would be a message more for each client and round
    "evaluation.every": 0,
    "faults.deadline-factor": 1.5,
    "faults.deadline-floor": 1,
    "faults.accept-late": 100,
    "run-name": "run",
}


@contextmanager
def running(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run on the engine `deployment`, which is ended as Ctrl-C ends it."""
    sets = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    call = [sys.executable, "-P", "-m", "piecework", "run", "--engine=deployment", f"--nodes={CLIENTS}", *sets]
    with subprocess.Popen(call, cwd=folder, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            yield launcher
        finally:
            launcher.send_signal(signal.SIGINT)


def first(
    launcher: "subprocess.Popen[str]", run_dir: RunDir, key: str, **wanted: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Wait for the first round that has an entry with these values in one of its lists; return both."""
    while launcher.returncode is None:
        for record in run_dir.rounds() if run_dir.rounds_file.is_file() else ():
            for entry in record[key]:
                if all(entry[name] == value for name, value in wanted.items()):
                    return record, entry
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(0.2)
    pytest.fail(launcher.stderr.read() if launcher.stderr else "")


def pollers(launcher: int) -> list[psutil.Process]:
    """What asks for the tasks of each client; the first one found asks for the server's."""
    family = psutil.Process(launcher).children(recursive=True)
    return sorted((each for each in family if each.name() == "flower-superexe"), key=lambda each: each.create_time())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Flower's own executor runs the tasks")
def test_a_round_ends_at_the_deadline_of_a_client_whose_executor_is_dead_and_its_late_answer_counts(
    tmp_path: Path,
) -> None:
    """The client's executor asks for no task any more from the end of round 1 on, until a round has ended without it."""
    run_dir = RunDir(tmp_path / "runs" / "run")
    with running(tmp_path) as launcher:
        first(launcher, run_dir, "clients", status="ok")
        dead = pollers(launcher.pid)[-1]
        dead.suspend()
        try:
            record, late = first(launcher, run_dir, "clients", status="late")
        finally:
            dead.resume()
        after, used = first(launcher, run_dir, "late_used", client=late["client"], round=record["round"])
    deadline = late["deadline_seconds"]
    assert 1 <= deadline <= late["waited_seconds"] < 3600  # of messages.round-timeout
    assert late["reason"] == f"no answer within its deadline of {deadline:.4g} s (faults.deadline-factor)"
    assert record["answered"] == CLIENTS - 1
    age = after["round"] - record["round"]
    assert (used["age"], used["weight"]) == (age, pytest.approx(used["examples"] / (1 + age) ** 0.5))
    (reply,) = [
        each for each in after["late_replies"] if (each["client"], each["round"]) == (used["client"], used["round"])
    ]
    assert reply["status"] == "ok"
    assert 0 < reply["bytes"] <= after["bytes_up"]
