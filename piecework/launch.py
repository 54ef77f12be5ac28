"""Start a run on one of three engines and follow it: in this process, on Flower's Ray simulation, or as real processes.

The two engines of Flower get a private FLWR_HOME, private ports and a fixed environment: `flwr run` alone would reuse whatever
SuperLink answers, freeze its environment, reinstall dependencies, and return 0 for a failed run.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from server_app.local_grid import LocalGrid
from server_app.records import RunDir
from server_app.roster import TooFewNodesError
from server_app.rounds import RunAbortedError, preflight, run_experiment
from server_app.settings import Settings

APP = Path(__file__).resolve().parents[1]
OnRound = Callable[[dict[str, Any]], None]
START_SECONDS = 60.0
STATUS_SECONDS = 15.0


class EngineError(RuntimeError):
    """An engine could not be started, or stopped working."""


def launch(settings: Settings, run_dir: RunDir, on_round: OnRound, restarts: int = 0) -> dict[str, Any]:
    """Run to the end; after a crash resume, at most `restarts` times. Returns the summary; raises what cannot be resumed."""
    preflight(settings)
    engine = {"local": run_local, "ray": run_ray, "deployment": run_deployment}[settings.engine]
    for attempt in range(restarts + 1):
        try:
            engine(settings, run_dir, on_round)
            break
        except (EngineError, RunAbortedError, TooFewNodesError, OSError):
            if attempt == restarts or run_dir.load_checkpoint() is None:
                raise
            settings = settings.model_copy(update={"resume_from": str(run_dir.path)})
    summary = run_dir.summary()
    if summary is None:
        raise EngineError(f"the run ended without a summary in {run_dir.path}")
    return summary


def run_local(settings: Settings, run_dir: RunDir, on_round: OnRound) -> None:
    """The in-process grid, with `workers` spawned workers where that is more than one."""
    with LocalGrid(settings.clients, settings.to_run_config(), settings.workers) as grid:
        run_experiment(grid, settings, run_dir, on_round)


def run_ray(settings: Settings, run_dir: RunDir, on_round: OnRound) -> None:
    """Flower's simulation: a SuperLink of our own, which starts Ray (or joins the cluster of RAY_ADDRESS)."""
    federation = f"num-supernodes={settings.clients} client-resources-num-cpus=1 client-resources-num-gpus=0.0"
    if "RAY_ADDRESS" not in os.environ:
        federation += (
            f" init-args-num-cpus={settings.workers} init-args-num-gpus=0"
            " init-args-logging-level='ERROR' init-args-log-to-driver=false"
        )
    with flower_home() as home, superlink(home, "--simulation", "--isolation", "subprocess"):
        follow(home, settings, run_dir, on_round, "--federation-config", federation)


def run_deployment(settings: Settings, run_dir: RunDir, on_round: OnRound) -> None:
    """Real processes on this machine: SuperLink with a database, SuperExec, and for each client a SuperNode with its own."""
    with ExitStack() as stack:
        home = stack.enter_context(flower_home())
        database = str(home.path / "state.db")
        stack.enter_context(superlink(home, "--isolation", "process", "--database", database))
        stack.enter_context(process(home, "superexec", "flower-superexec", *executor(home.port)))
        ports = free_ports(settings.clients)
        for client, port in enumerate(ports):
            node_config = f"partition-id={client} num-partitions={settings.clients}"
            arguments = ["--insecure", "--isolation", "process", "--superlink", f"127.0.0.1:{home.port}"]
            arguments += ["--host", "127.0.0.1", "--port", str(port), "--node-config", node_config]
            stack.enter_context(process(home, f"supernode-{client}", "flower-supernode", *arguments))
        for client, port in enumerate(ports):
            wait_until_healthy(port, home.path / f"supernode-{client}.log")
            stack.enter_context(process(home, f"clientapp-{client}", "flower-superexec", *executor(port)))
        follow(home, settings, run_dir, on_round)


def executor(port: int) -> list[str]:
    """The arguments of a SuperExec that serves the SuperLink or SuperNode on a port."""
    return ["--insecure", "--runtime-api-address", f"127.0.0.1:{port}"]


class FlowerHome:
    """A private FLWR_HOME with the address of a private SuperLink."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (self.port,) = free_ports(1)
        connection = {"address": f"127.0.0.1:{self.port}", "insecure": True}
        config = {"superlink": {"default": "piecework", "piecework": connection}}
        (path / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        self.environment = os.environ | {
            "FLWR_HOME": str(path),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def command(self, *arguments: str) -> dict[str, Any]:
        """Run `flwr` and read its JSON. Raises EngineError."""
        call = ["flwr", *arguments, "--format", "json"]
        done = subprocess.run(call, env=self.environment, capture_output=True, text=True, check=False, cwd=self.path)
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            raise EngineError(f"`{' '.join(call[:2])}` failed: {done.stdout}{done.stderr}") from None
        if done.returncode or not answer.get("success", True):
            raise EngineError(f"`{' '.join(call[:2])}` failed: {answer.get('error-message', done.stdout)}")
        return answer

    def log_of(self, run_id: str) -> str:
        """What a run printed, the end of it."""
        call = ["flwr", "log", run_id, "piecework", "--show"]
        done = subprocess.run(call, env=self.environment, capture_output=True, text=True, check=False, cwd=self.path)
        return "\n".join((done.stdout + done.stderr).splitlines()[-120:])


@contextmanager
def flower_home() -> Iterator[FlowerHome]:
    """A FLWR_HOME that is removed afterwards."""
    if not (APP / "pyproject.toml").is_file():
        raise EngineError("engines ray and deployment need Piecework's source folder: install it with `pip install -e`")
    with tempfile.TemporaryDirectory(prefix="piecework-", ignore_cleanup_errors=True) as folder:
        yield FlowerHome(Path(folder))


@contextmanager
def superlink(home: FlowerHome, *arguments: str) -> Iterator[None]:
    """A SuperLink on the home's port, healthy."""
    address = ["--insecure", "--host", "127.0.0.1", "--port", str(home.port)]
    with process(home, "superlink", "flower-superlink", *address, *arguments):
        wait_until_healthy(home.port, home.path / "superlink.log")
        yield


@contextmanager
def process(home: FlowerHome, name: str, *command: str) -> Iterator[None]:
    """A process that ends, with all its children, when the body does. Its output goes to `<home>/<name>.log`."""
    with (home.path / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(command, env=home.environment, stdout=log, stderr=log, cwd=home.path)
        try:
            yield
        finally:
            stop(child)


def stop(child: "subprocess.Popen[bytes]") -> None:
    """End a process we started and its descendants: first asked, then, after ten seconds, killed."""
    try:
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        _quietly(member.terminate)
    _, alive = psutil.wait_procs(family, timeout=10)
    for member in alive:
        _quietly(member.kill)
    child.wait()


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        return  # it ended by itself in between


def wait_until_healthy(port: int, log: Path) -> None:
    """Wait for /health. Raises EngineError with the end of the log."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise EngineError(f"nothing answered on port {port} within {START_SECONDS:g} s:\n{tail(log)}")


def follow(home: FlowerHome, settings: Settings, run_dir: RunDir, on_round: OnRound, *arguments: str) -> None:
    """Submit the app and report its rounds until it ends. Raises RunAbortedError with the run's own reason."""
    config = home.path / "run-config.toml"
    values = settings.to_run_config() | {"output-dir": str(run_dir.path.parent), "run-name": run_dir.path.name}
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    seen = len(run_dir.rounds()) if settings.resume_from else 0
    (run_dir.path / "summary.json").unlink(missing_ok=True)
    submitted = home.command("run", str(APP), "piecework", "--run-config", str(config), *arguments)
    run_id = str(submitted["run-id"])
    next_check, status, finished = time.monotonic() + STATUS_SECONDS, "", False
    while not finished:
        if time.monotonic() > next_check:  # seldom: every call of `flwr` takes seconds of a core
            status = home.command("ls", "--run-id", run_id, "piecework")["runs"][0]["status"]
            finished, next_check = status.startswith("finished"), time.monotonic() + STATUS_SECONDS
        rounds = run_dir.rounds()
        for record in rounds[seen:]:
            on_round(record)
        seen = max(seen, len(rounds))
        finished = finished or run_dir.summary() is not None
        if not finished:
            time.sleep(0.2)
    summary = run_dir.summary()
    if summary is None:
        raise EngineError(f"Flower ended the run before it began: {status}\n{home.log_of(run_id)}")
    if summary["status"] != "completed":
        raise RunAbortedError(summary["reason"])


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in sockets]


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log file."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]) if log.is_file() else ""
