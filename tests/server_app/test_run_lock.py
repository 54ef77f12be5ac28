"""One writer a run: the second process names the first and touches nothing; a killed one leaves no lock behind."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import TRIO, run_local, tiny_settings

from piecework.client_app import file_lock
from piecework.engines.launch import launch, run_attempts, watch
from piecework.engines.processes import EngineError, FlowerHome
from piecework.server_app.experiment import run_experiment
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import RunLockedError, killed_writer, require_free, run_lock, writer
from piecework.training.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from pathlib import Path
from piecework.server_app.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds a run's lock until its stdin is closed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_process_names_the_first_and_changes_nothing(tmp_path: Path) -> None:
    run = run_local(tmp_path, strategy="fedavg", **TRIO)
    again = {"num_rounds": 2, "strategy": "fedavg", "resume_from": str(run.path), **TRIO}
    with held_elsewhere(run.path) as other:
        before = contents(run.path)
        with pytest.raises(RunLockedError) as caught:
            run_local(tmp_path, **again)
        assert f"{run.path} is being written by process {other.pid} on {platform.node()} since 2" in str(caught.value)
        with pytest.raises(RunLockedError, match=f"process {other.pid} on "):
            run_local(tmp_path, strategy="fedavg", **TRIO)  # a new run of the same name
        assert contents(run.path) == before
    run_local(tmp_path, **again)
    assert [record["round"] for record in run.rounds()] == [1, 2]


@pytest.mark.slow
def test_two_commands_cannot_resume_one_run(tmp_path: Path) -> None:
    run = run_local(tmp_path, strategy="fedavg", clients=3, clients_per_round=0)
    call = [sys.executable, "-m", "piecework.cli", "run", "--json", "--set", f"resume-from={run.path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with held_elsewhere(run.path) as other:
        before = contents(run.path)
        done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert contents(run.path) == before
    assert done.returncode == 2
    assert f"is being written by process {other.pid} on" in json.loads(done.stdout)["reason"]
    assert f"is being written by process {other.pid} on" in done.stderr


def watched(folder: Path) -> str:
    """What the launcher of a run with processes says of it."""
    home = FlowerHome(folder)
    home.processes["superlink"] = ([], subprocess.Popen([sys.executable, "-SEc", ""]))
    home.processes["superlink"][1].wait()
    return watch(home, "1", RunDir(folder), 0, None, lambda _: None)


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    assert killed_writer(tmp_path) is None
    with held_elsewhere(tmp_path) as other:
        assert writer(tmp_path) is not None
        assert killed_writer(tmp_path) is None
        other.send_signal(signal.SIGKILL)
        while writer(tmp_path) is not None:  # until it has ended, though nothing has waited for it yet
            pass
        assert (killed_writer(tmp_path) or "").startswith(f"process {other.pid} since 2")
        other.wait()
        assert (killed_writer(tmp_path) or "").startswith(f"process {other.pid} since 2")
        assert watched(tmp_path).startswith(f"its ServerApp, process {other.pid} since 2")
        with run_lock(tmp_path):
            assert str(os.getpid()) in (writer(tmp_path) or "")
            assert killed_writer(tmp_path) is None
    assert writer(tmp_path) is killed_writer(tmp_path) is None
    holder = {"pid": other.pid, "host": "another host", "since": "2026"}
    (tmp_path / "lock").write_text(json.dumps(holder))
    assert killed_writer(tmp_path) is None


def test_a_restart_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """The first attempt loses its ServerApp after a round, the second goes on."""
    settings = tiny_settings(
        **TRIO | {"strategy": "fedavg", "dataset": "digits", "num_rounds": 2, "output_dir": str(tmp_path)}
    )
    run, begun = RunDir(tmp_path / "run"), list[str]()

    def engine(asked: Settings, run_dir: RunDir, _: object) -> None:
        begun.append(asked.resume_from)
        with LocalGrid(asked.clients, asked.to_run_config(), 1) as nodes:
            run_experiment(nodes, asked.with_values({"num-rounds": len(begun)}), run_dir)
        if len(begun) == 1:
            raise EngineError("Flower ended the run (its ServerApp, process 7 since 2026, was killed)")

    run_attempts(engine, settings, run, lambda _: None, restarts=1)
    assert begun == ["", str(run.path)]
    assert [record["round"] for record in run.rounds()] == [1, 2]


def test_one_process_cannot_write_a_run_twice_either(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(RunLockedError, match=f"process {os.getpid()} on "), run_lock(tmp_path):
        raise AssertionError
    with run_lock(tmp_path):
        pass


def test_nothing_is_started_for_a_run_that_is_written(tmp_path: Path) -> None:
    """Any engine: the launcher looks before it starts one."""
    settings = tiny_settings(engine="deployment", output_dir=str(tmp_path))
    with run_lock(tmp_path / "run"), pytest.raises(RunLockedError, match="is being written by"):
        launch(settings, RunDir(tmp_path / "run"), lambda record: None)


def test_a_restart_waits_for_what_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_elsewhere(tmp_path) as other:

        def end(_: float) -> None:
            other.communicate("")

        monkeypatch.setattr(time, "sleep", end)
        require_free(tmp_path, seconds=60)
    require_free(tmp_path)
    require_free(tmp_path / "nothing")


def test_a_refused_new_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        run_local(tmp_path, strategy="nowhere")
    assert list(tmp_path.iterdir()) == []


def test_without_locks_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", unsupported)
    with run_lock(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked ([Errno 37] No locks available)" in caplog.text


def test_who_only_looks_keeps_nobody_from_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look holds a shared lock for a moment: the writer tries again, and only another writer is in its way."""
    (tmp_path / "lock").touch()
    looks = (tmp_path / "lock").open("r")
    assert file_lock.lock(looks, shared=True)
    waits = list[float]()

    def look_ends(seconds: float) -> None:
        waits.append(seconds)
        looks.close()

    monkeypatch.setattr(time, "sleep", look_ends)
    with run_lock(tmp_path):
        assert str(os.getpid()) in (writer(tmp_path) or "")
        with pytest.raises(RunLockedError, match=f"process {os.getpid()} on "), run_lock(tmp_path):
            raise AssertionError
    assert len(waits) == 1, "for the look, and not for the writer"
