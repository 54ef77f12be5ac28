"""Start a run on one of three engines and follow it: in this process, on Ray, or as real processes.

Flower's two engines get a private FLWR_HOME, private ports and a fixed environment: `flwr run` alone would reuse any SuperLink
that answers, freeze its environment, reinstall dependencies, and return 0 for a failed run.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import tomli_w
import torch

from piecework.app_folder import app_folder
from piecework.engines.cluster.address import RayCluster, find_cluster, protect, ray_cluster
from piecework.engines.processes import (
    Connection,
    EngineError,
    FlowerHome,
    flower_home,
    for_own_user,
    free_ports,
    process,
    stop,
    superlink,
    wait_until_healthy,
)
from piecework.federated_data.labels import label_remarks
from piecework.federation.errors import RunAbortedError, TooFewNodesError
from piecework.server_app.experiment import run_experiment
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.moment import read_moment, tell
from piecework.server_app.preflight import preflight
from piecework.server_app.records import RunDir
from piecework.server_app.recovery import find_recovery
from piecework.server_app.run_folder import nothing_left
from piecework.server_app.run_lock import RunLockedError, killed_writer, require_free, run_lock
from piecework.server_app.start import say
from piecework.server_app.summary import how_stopped, summarise
from piecework.training.accelerator import find_device
from piecework.training.settings import Settings
from piecework.training.settings.table import nest

OnRound = Callable[[dict[str, Any]], None]
Engine = Callable[[Settings, RunDir, OnRound], None]
STATUS_SECONDS = 15.0
PATIENCE_SECONDS = 180.0
PAUSE_SECONDS = 5.0
ENDING_SECONDS = 60.0
UNREACHABLE = "Connection to the SuperLink is unavailable"  # what Flower says of each failure to connect
LOG = logging.getLogger("piecework")


class SuperLinkLostError(RuntimeError):
    """The SuperLink is lost, but the run may continue. It must not be restarted, as two runs would write the same folder."""


def launch(
    settings: Settings,
    run_dir: RunDir,
    on_round: OnRound,
    restarts: int = 0,
    connection: Connection | RayCluster | None = None,
) -> dict[str, Any]:
    """Run to the end; after a crash resume from the last checkpoint, at most `restarts` times.

    With a `connection` the run is submitted to that SuperLink, or joins that Ray cluster. Returns the summary. Raises errors
    that a restart cannot fix, and RunLockedError if another process writes this run.
    """
    *_, data, _ = preflight(settings)
    for remark in label_remarks(data):
        LOG.warning("%s", remark)
    require_free(run_dir.path)  # checked before anything is started; the writing process takes the lock itself
    there = connection if isinstance(connection, Connection) else None
    cluster = None
    if settings.engine == "ray" and not there:
        cluster = ray_cluster(connection.address if isinstance(connection, RayCluster) else "")
    if cluster:
        find_cluster(cluster)
    elif not there:
        find_device(settings.training.accelerator)  # the clients will run on this machine
    ray = partial(run_ray, cluster=cluster)
    engines: dict[str, Engine] = {"local": run_local, "ray": ray, "deployment": run_deployment}
    engine = partial(run_there, connection=there) if there else engines[settings.engine]
    if settings.resume_from and nothing_left(run_dir, settings, find_recovery(run_dir)):
        return run_dir.summary() or {}
    started, earlier = time.monotonic(), run_dir.seconds() if settings.resume_from else 0.0
    try:
        run_attempts(engine, settings, run_dir, on_round, restarts)
    except (KeyboardInterrupt, SystemExit):
        note_stop(run_dir, earlier + time.monotonic() - started)
        raise
    summary = run_dir.summary()
    if summary is None:
        raise EngineError(f"the run ended without a summary in {run_dir.path}")
    return summary


def run_attempts(engine: Engine, settings: Settings, run_dir: RunDir, on_round: OnRound, restarts: int) -> None:
    """Run once, and up to `restarts` times more after failures."""
    for attempt in range(restarts + 1):
        try:
            engine(settings, run_dir, on_round)
            break
        except (EngineError, RunAbortedError, TooFewNodesError, OSError) as error:
            if attempt == restarts:
                raise
            LOG.warning("the run ended (%s): restart %d of %d", str(error).splitlines()[0], attempt + 1, restarts)
            time.sleep(min(60, PAUSE_SECONDS * attempt))  # the cause may need time to go away
            require_free(run_dir.path, ENDING_SECONDS)  # a ServerApp without us may still be writing
            settings = resume_settings(settings, run_dir)


def resume_settings(settings: Settings, run_dir: RunDir) -> Settings:
    """Return the settings that resume a run from its last checkpoint, or start it again if it has none."""
    begun = (run_dir.path / "settings.toml").is_file()
    return settings.with_values({"resume-from": str(run_dir.path)}) if begun else settings


def note_stop(run_dir: RunDir, seconds: float) -> None:
    """Write the summary of a run that a signal ended, if its writer had no time to: Ray's ServerApp dies at once.

    `seconds` is the duration of all its processes.

    A ServerApp that still holds the lock will write its own summary.
    """
    if (run_dir.path / "settings.toml").is_file() and run_dir.summary_version() is None:
        with suppress(RunLockedError), run_lock(run_dir.path):
            run_dir.write_summary(summarise(run_dir, *how_stopped(run_dir), seconds))


def run_local(settings: Settings, run_dir: RunDir, on_round: OnRound) -> None:
    """Run on the in-process grid, with `workers` spawned workers if that is more than one."""
    with LocalGrid(settings.clients, settings.to_run_config(), settings.workers) as grid:
        run_experiment(grid, settings, run_dir, on_round)


def run_ray(settings: Settings, run_dir: RunDir, on_round: OnRound, cluster: RayCluster | None) -> None:
    """Run on Ray: one of our own, or a cluster."""
    if find_spec("ray") is None:
        raise EngineError("--engine ray needs Ray, which is not installed: pip install 'piecework[simulation]'")
    if cluster is None:
        protect()
    from piecework.engines.cluster.grid import RayGrid
    from piecework.engines.cluster.start import joined_ray, own_ray

    gpus = max(1, torch.cuda.device_count()) if settings.training.accelerator == "cuda" else 0
    with (
        joined_ray(find_cluster(cluster)) if cluster else own_ray(settings.workers, gpus),
        # How many work on a cluster is for Ray to say, node by node: `workers` are those of this machine.
        RayGrid(settings.clients, settings.to_run_config(), 0 if cluster else settings.workers) as grid,
    ):
        run_experiment(grid, settings, run_dir, on_round)
        grid.bring_home()


def run_deployment(settings: Settings, run_dir: RunDir, on_round: OnRound) -> None:
    """Run real processes on this machine."""
    with federation(settings.clients) as home:
        follow(home, settings, run_dir, on_round)


@contextmanager
def federation(clients: int) -> Iterator[FlowerHome]:
    """Run a SuperLink with a database, a SuperExec, a SuperNode per client, and their executor in the body."""
    with ExitStack() as stack:
        home = stack.enter_context(flower_home())
        database = str(home.path / "state.db")
        stack.enter_context(superlink(home, "--isolation", "process", "--database", database))
        stack.enter_context(process(home, "superexec", "flower-superexec", *executor(home.port)))
        ports = free_ports(clients)
        for client, port in enumerate(ports):
            node_config = f"partition-id={client} num-partitions={clients}"
            arguments = ["--insecure", "--isolation", "process", "--superlink", f"127.0.0.1:{home.port}"]
            arguments += ["--host", "127.0.0.1", "--port", str(port), "--node-config", node_config]
            stack.enter_context(process(home, f"supernode-{client}", *for_own_user("flower-supernode"), *arguments))
        for client, port in enumerate(ports):
            wait_until_healthy(home, f"supernode-{client}", port)
        for name, command in client_executors(ports).items():
            stack.enter_context(process(home, name, *command))
        yield home


def run_there(settings: Settings, run_dir: RunDir, on_round: OnRound, connection: Connection) -> None:
    """Run on an existing SuperLink with its nodes; the ServerApp must see the run's folder under the same path."""
    with flower_home(connection) as home:
        follow(home, settings, run_dir, on_round)


def executor(*ports: int) -> list[str]:
    """Return the arguments of a SuperExec for the SuperLink or SuperNode on a port, or of a warm executor for several."""
    return ["--insecure", *(word for port in ports for word in ("--runtime-api-address", f"127.0.0.1:{port}"))]


def client_executors(ports: list[int], warm: bool = sys.platform == "linux") -> dict[str, list[str]]:
    """Return the commands that run the tasks of the SuperNodes on these ports, by name: a warm one for all, or one for each."""
    if warm:
        return {"clientapps": [sys.executable, "-P", "-m", "piecework.executor", *executor(*ports)]}
    return {f"clientapp-{client}": ["flower-superexec", *executor(port)] for client, port in enumerate(ports)}


def follow(home: FlowerHome, settings: Settings, run_dir: RunDir, on_round: OnRound, *arguments: str) -> None:
    """Submit the app and report its rounds until it ends. Raises RunAbortedError with the run's own reason.

    A run on an external SuperLink is stopped if this process is interrupted, because nothing else would watch it.
    """
    config = home.path / "run-config.toml"
    values = settings.to_run_config() | {"output-dir": str(run_dir.path.parent), "run-name": run_dir.path.name}
    config.write_text(tomli_w.dumps(nest(values)), encoding="utf-8")
    seen = len(run_dir.readable_rounds()[0]) if settings.resume_from else 0
    before, known = run_dir.summary_version(), run_dir.coverage()
    killed = killed_writer(run_dir.path)
    app = app_folder(home.path / "app", values)
    try:
        submitted = home.command("run", str(app), "piecework", "--run-config", str(config), *arguments)
    except EngineError as error:
        own = "" if UNREACHABLE in str(error) else str(error)  # the cause may be another: this says more
        told = "\n".join(filter(None, (own, home.connection.explain())))
        raise EngineError(told or str(error)) from error
    run_id = str(submitted["run-id"])
    try:
        status = watch(home, run_id, run_dir, seen, before, on_round, known, killed)
    except (KeyboardInterrupt, SystemExit):
        halt(home, run_id)
        raise
    summary = run_dir.summary() if run_dir.summary_version() != before else None
    if summary is None and status == "finished:completed":
        raise EngineError(
            f"the run completed, but {run_dir.path} is not where its ServerApp wrote: share the folder, or look there"
        )
    if summary is None:
        raise EngineError(f"Flower ended the run ({status}), the end of its log:\n{home.log_of(run_id)}")
    if summary["status"] != "completed":
        raise RunAbortedError(summary["reason"])


def halt(home: FlowerHome, run_id: str) -> None:
    """Stop the ServerApp of a run first: otherwise it would count the end of its clients as their failure."""
    for name in ("superexec", "superlink"):
        if name in home.processes:
            return stop(home.processes[name][1])
    try:
        home.command("stop", run_id, "piecework")
    except EngineError as error:
        LOG.warning("run %s on %s could not be stopped: %s", run_id, home.connection.address, error)


def watch(
    home: FlowerHome,
    run_id: str,
    run_dir: RunDir,
    seen: int,
    before: tuple[int, int] | None,
    on_round: OnRound,
    known: dict[str, Any] | None = None,
    killed: str | None = None,
) -> str:
    """Report the rounds after the first `seen` until the run has a new summary or has ended; return its status.

    `before` is the version of the previous summary, and `killed` an earlier ServerApp that was killed. If the present one is
    killed, its lock shows it at once; Flower would report it up to a minute later. What clients can train is reported first,
    unless it is `known`. A SuperLink may be away for PATIENCE_SECONDS: its ServerApp continues when it is back. Raises
    SuperLinkLostError.
    """
    status, now, moment = "", time.monotonic(), None
    heard, next_check = now, now + STATUS_SECONDS
    while not status.startswith("finished") and run_dir.summary_version() in (None, before):
        if (gone := killed_writer(run_dir.path)) not in (None, killed):
            if not home.processes:
                halt(home, run_id)
            return f"its ServerApp, {gone}, was killed"
        home.revive()
        if time.monotonic() > next_check:  # rarely, because every call of `flwr` takes seconds of a core
            try:
                status = home.command("ls", "--run-id", run_id, "piecework")["runs"][0]["status"]
                heard = time.monotonic()
            except EngineError as error:
                if time.monotonic() - heard > PATIENCE_SECONDS:
                    raise SuperLinkLostError(
                        f"no answer from {home.connection.address} for {PATIENCE_SECONDS:g} s, where run {run_id} may go on: "
                        f"look after it before you start another in {run_dir.path} ({error})"
                    ) from error
            next_check = time.monotonic() + STATUS_SECONDS
        if (found := run_dir.coverage()) and found != known:
            known = found
            say(found)
        seen = report_from(run_dir, seen, on_round)
        if (found_now := read_moment(run_dir.path)) not in (None, moment):
            moment = found_now
            tell(found_now)
        time.sleep(0.2)
    report_from(run_dir, seen, on_round)
    return status


def report_from(run_dir: RunDir, seen: int, on_round: OnRound) -> int:
    """Report the rounds after the first `seen`; return how many there are, which drops if the run went back to a checkpoint."""
    rounds = run_dir.readable_rounds()[0]
    for before, record in list(pairwise([{}, *rounds]))[seen:]:
        for node in (each for each in record.get("unusable_nodes", []) if each not in before.get("unusable_nodes", [])):
            LOG.warning("node %s does not take part: %s", node.get("name") or node["node"], node["reason"])
        on_round(record)
    return len(rounds)
