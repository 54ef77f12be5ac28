"""A run that a signal ends says so and how to resume it, and what it started ends with it, also after SIGKILL."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import heed_interrupts
from flwr.app import Message
from helpers import TRIO, RecordingGrid, run_local, tiny_settings
from typer.testing import CliRunner

from piecework.cli import app, how_to_go_on, main
from piecework.commands.base import TERMINATED
from piecework.engines.cluster.address import RayCluster
from piecework.engines.guardian import lives
from piecework.engines.launch import halt, note_stop
from piecework.engines.processes import Connection, EngineError, FlowerHome, free_ports, process, wait_until_healthy
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import run_lock, writer
from piecework.server_app.signals import end_on_hangup, without_interrupts

ROOT = Path(__file__).resolve().parents[2]


class Interrupted(RecordingGrid):
    """Ctrl-C comes while the clients of round 2 train, or `signalled` is what another signal raises."""

    signalled: BaseException = KeyboardInterrupt()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if any(m.metadata.message_type == "train" and m.metadata.group_id == "2" for m in self.sent):
            raise self.signalled
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("signalled", [KeyboardInterrupt(), SystemExit(TERMINATED)], ids=["ctrl-c", "sigterm"])
def test_a_stopped_run_says_so_and_goes_on(tmp_path: Path, grids: Any, signalled: BaseException) -> None:
    settings = TRIO | {"strategy": "fedavg", "num_rounds": 3}
    with pytest.raises(type(signalled)):
        run_local(tmp_path, grids(Interrupted, signalled=signalled), **settings)
    run = RunDir(tmp_path / "run")
    summary = run.summary() or {}
    assert (summary["status"], summary["rounds"], summary["last_complete_round"]) == ("stopped", 1, 1)
    assert summary["reason"] == "stopped by a signal, after round 1"
    assert writer(run.path) is None
    run_local(tmp_path, resume_from=str(run.path), **settings)
    assert ((run.summary() or {})["status"], len(run.rounds())) == ("completed", 3)


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Restores what SIGTERM and SIGHUP do."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("own_handlers")
def test_sigterm_is_an_exit_that_stops_what_was_started_and_so_is_a_closed_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    for ending in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(ending)
        assert ended.value.code == TERMINATED == 143
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    end_on_hangup()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.slow
def test_the_command_says_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of the terminal, two workers among them."""
    sets = [
        "num-rounds=500",
        "clients=4",
        "clients-per-round=2",
        "training.local-epochs=1",
        "run-name=a run",
        "training.lr=0.07",
    ]
    call = [sys.executable, "-m", "piecework.cli", "run", *(f"--set={text}" for text in (*sets, "workers=2"))]
    # with traces that another test kept, nothing would be traced
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PIECEWORK_NO_CACHE": "1"}
    with subprocess.Popen(
        call, stdout=-1, stderr=-1, text=True, cwd=tmp_path, env=environment, start_new_session=True
    ) as command:
        assert command.stderr is not None
        assert command.stderr.readline() == "tracing the parts of convnet\n"
        assert "can be trained by all clients" in command.stderr.readline()
        assert [command.stderr.readline().split()[1] for _ in range(2)] == ["1/500", "2/500"]  # so round 1 is complete
        os.killpg(command.pid, signal.SIGINT)
        shown, said = command.communicate()
    assert command.returncode == 130
    assert "Traceback" not in said
    run = RunDir(tmp_path / "runs" / "a run")
    last = run.last_complete_round()
    assert f"stopped: stopped by a signal, after round {last}" in said
    assert said.splitlines()[-1] == f"resume it: piecework run --set 'resume-from={run.path}'"
    assert "status          stopped" in shown

    again = shlex.split(said.splitlines()[-1].removeprefix("resume it: piecework "))
    done = CliRunner().invoke(app, [*again, "--json", "--set=workers=1", f"--set=num-rounds={last + 1}"])
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["rounds"], run.settings()["training.lr"]) == ("completed", last + 1, 0.07)


def test_what_the_tests_start_heeds_ctrl_c_in_a_background_job_too() -> None:
    """There a shell lets SIGINT be ignored, and children inherit that."""
    heeded = [sys.executable, "-SEc", "import signal; print(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ignored = subprocess.run(heeded, capture_output=True, text=True, check=True).stdout
        heed_interrupts()
        restored = subprocess.run(heeded, capture_output=True, text=True, check=True).stdout
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ignored, restored) == ("False\n", "True\n")
    assert before is not signal.SIG_IGN


LAUNCHER = """
import multiprocessing, sys, time
from piecework.engines.processes import flower_home, process
for step in sys.argv[3:]:
    multiprocessing.get_context("spawn").Process(target=exec, args=(sys.argv[1], {"step": step})).start()
with flower_home() as home, process(home, "superlink", sys.executable, "-SEc", sys.argv[2]):
    print(home.path, flush=True)
    time.sleep(600)
"""
BUSY_WORKER = """
from piecework.server_app.signals import end_with_parent
end_with_parent()
print("busy", flush=True)
while True:
    exec(step)
"""
SUSPENDED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
DETACHING = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-SEc", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """A worker in the middle of a step, a suspended one, a process of Flower, one that this detached; nor their folder."""
    steps = ["pass", SUSPENDED if sys.platform == "linux" else "pass"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    call = [sys.executable, "-c", LAUNCHER, BUSY_WORKER, DETACHING, *steps]
    with subprocess.Popen(call, stdout=-1, text=True, env=environment) as launcher:
        assert launcher.stdout is not None
        said = {launcher.stdout.readline().strip() for _ in range(3)}
        assert said == {"busy", *map(str, tmp_path.iterdir())}
        until, family = time.monotonic() + 30, list[psutil.Process]()
        while len(family) < 6 and time.monotonic() < until:  # the guardian and multiprocessing's tracker are among them
            family = psutil.Process(launcher.pid).children(recursive=True)
        while sys.platform == "linux" and psutil.STATUS_STOPPED not in [each.status() for each in family]:
            pass
        launcher.kill()
    while any(map(lives, family)) and time.monotonic() < until:
        pass
    left = [process.cmdline() for process in family if lives(process)]
    psutil.wait_procs([process for process in family if lives(process) and process.kill() is None], timeout=1)
    assert (len(family), left, list(tmp_path.iterdir())) == (6, [], [])


def test_workers_never_see_ctrl_c_or_a_closed_terminal() -> None:
    """Also not before they could ignore it, while they import torch."""
    blocked = "import signal; print({signal.SIGINT, signal.SIGHUP} <= signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    call = [sys.executable, "-c", blocked]
    with without_interrupts():
        inside = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    after = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert (inside, after) == ("True\n", "False\n")


def test_the_server_app_is_ended_before_its_clients(tmp_path: Path) -> None:
    """Else it would end by itself, as a run whose clients are gone."""
    home = FlowerHome(tmp_path)
    with ExitStack() as stack:
        for name in ("superlink", "superexec", "supernode-0"):
            stack.enter_context(process(home, name, sys.executable, "-c", "import signal; signal.pause()"))
        started = {name: child for name, (_, child) in home.processes.items()}
        halt(home, "1")
        assert {name for name, child in started.items() if child.poll() is not None} == {"superexec"}
    assert all(child.poll() is not None for child in started.values())


def test_a_process_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    home = FlowerHome(tmp_path)
    home.start("superlink", [sys.executable, "-SEc", "raise SystemExit('no such database')"])
    with pytest.raises(EngineError, match=r"superlink ended with exit code 1:\nno such database"):
        wait_until_healthy(home, "superlink", free_ports(1)[0])


def test_the_launcher_writes_the_summary_of_a_server_app_that_could_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    note_stop(run, 5.0)
    assert not run.path.exists()  # it never began
    run.create(tiny_settings())
    run.append_round({"round": 1, "clients": [], "enforced": True, "accuracy": None} | dict.fromkeys(SUMS, 0))
    with run_lock(run.path):
        note_stop(run, 5.0)
        assert run.summary() is None  # the ServerApp goes on, and will write its own
    note_stop(run, 5.0)
    summary = run.summary() or {}
    assert (summary["status"], summary["rounds"], summary["seconds"]) == ("stopped", 1, 5.0)
    assert summary["reason"] == "stopped by a signal, before its first round was complete"
    run.write_summary({"status": "completed"})
    note_stop(run, 5.0)
    assert run.summary() == {"status": "completed"}


SUMS = ("asked", "answered", "failed", "bytes_down", "bytes_up")


def test_the_command_that_goes_on_has_what_is_no_setting(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert how_to_go_on(run, None) == "nothing has been written yet: run the same command again"
    run.create(tiny_settings())
    begin = f"resume it: piecework run --set resume-from={run.path}"
    assert how_to_go_on(run, None) == begin
    assert how_to_go_on(run, Connection("host:1", None)) == f"{begin} --superlink host:1 --insecure"
    assert how_to_go_on(run, RayCluster("auto")) == f"{begin} --ray-address auto"
    secured = how_to_go_on(run, Connection("host:1", Path("/ca.crt")))
    assert secured == f"{begin} --superlink host:1 --root-certificates /ca.crt"
