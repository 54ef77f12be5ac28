"""Runs on real Ray: two nodes with stores of their own are the local engine to the bit, and what dies is run again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers import FEW, model_of, run_local

from piecework.engines.cluster.address import protect
from piecework.server_app.records import RunDir

pytest.importorskip("ray")
pytestmark = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[2]
TINY_RUN: dict[str, Any] = {
    "dataset": FEW,
    "clients": 4,
    "clients_per_round": 3,
    "num_rounds": 2,
    "fleet": "unlimited",
    "training__local_iterations": 2,
    "evaluation__every": 2,
}


@pytest.fixture(scope="module")
def two_nodes(session_folder: Path) -> Iterator[Any]:
    """A cluster of two raylets with one processor each; the second keeps clients' states in a folder of its own."""
    protect()
    from ray.cluster_utils import Cluster

    from piecework.engines.cluster.start import started

    cluster, own = Cluster(), {"PIECEWORK_STATE_DIR": str(session_folder / f"states-{os.getpid()}")}
    try:
        for environment in (None, own):
            add_node(cluster, environment)
        with started(address=cluster.address):
            yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, environment: dict[str, str] | None = None) -> Any:
    return cluster.add_node(
        num_cpus=1, memory=4 * 2**30, object_store_memory=80 * 2**20, include_dashboard=False, env_vars=environment
    )


def facts(run_dir: RunDir) -> list[dict[str, Any]]:
    """What the records say of a run, but for times, resident memory, and bytes that depend on the length of a path."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items() if not any(word in key for word in unlike)}
        return [plain(each) for each in value] if isinstance(value, list) else value

    unlike = ("seconds", "rss", "bytes")
    return [plain(record) for record in run_dir.rounds()]


def require_same_run(one: RunDir, other: RunDir) -> None:
    ours, theirs = model_of(one), model_of(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])
    assert facts(one) == facts(other)


def states(run_dir: RunDir) -> dict[str, bytes]:
    """The newest states of clients in a run's folder, by client and file."""
    (experiment,) = [path for path in (run_dir.path / "clients").iterdir() if path.is_dir()]
    found = {}
    for client in experiment.glob("*/state"):
        newest = max(client.iterdir(), key=lambda path: int(path.name))
        found |= {
            f"{client.parent.name}/{newest.name}/{path.name}": path.read_bytes()
            for path in newest.iterdir()
            if path.suffix == ".safetensors"
        }
    return found


@pytest.mark.parametrize("strategy", ["fedepth", "fedprophet", "prism", "spafl", "local"])
def test_two_nodes_are_the_local_engine_to_the_bit(tmp_path: Path, two_nodes: Any, strategy: str) -> None:
    """States travel between the nodes, and are in the run's folder at the end, the same as if they had never left it."""
    from piecework.engines.cluster.grid import RayGrid

    class Ends(RayGrid):
        """Brings states home at the end of the run, as the engine does."""

        def __exit__(self, *error: object) -> None:
            self.homes = dict(self._homes.places)
            Ends.ended_with = self.homes
            self.bring_home()
            super().__exit__(*error)

        ended_with: dict[int, str]

    settings = TINY_RUN | {"strategy": strategy}
    ray_run = run_local(tmp_path / "ray", Ends, **settings)
    local = run_local(tmp_path / "local", **settings)
    require_same_run(ray_run, local)
    assert states(ray_run) == states(local)
    if states(local):
        assert len(set(Ends.ended_with.values())) == 2  # both nodes trained, and kept what they trained


def killing_grid(times: int, action: Any, server_round: str = "1") -> Any:
    """A grid that does something to the worker that trains client 1 in a round, as often as this, when it has begun."""
    from piecework.engines.cluster.grid import RayGrid

    class Kills(RayGrid):
        left = times

        def _begin(self, want: Any, node: Any, worker: str) -> None:
            metadata = self._order[want.identifier][0]
            due = (metadata.message_type, metadata.group_id) == ("train", server_round)
            super()._begin(want, node, worker)
            if want.client == 1 and due and Kills.left:
                Kills.left -= 1
                action(self, node, worker)

    return Kills


def kill_worker(grid: Any, node: Any, worker: str) -> None:
    os.kill(grid._nodes.processes[worker], signal.SIGKILL)


def test_a_client_whose_worker_is_killed_is_trained_again(tmp_path: Path, two_nodes: Any) -> None:
    """In round 2, when it has a state, which must still be there in round 3."""
    settings = TINY_RUN | {"strategy": "spafl", "clients": 3, "num_rounds": 3}
    grid = killing_grid(1, kill_worker, "2")
    require_same_run(run_local(tmp_path / "ray", grid, **settings), run_local(tmp_path / "local", **settings))
    assert grid.left == 0


def test_a_client_whose_worker_dies_twice_has_crashed(tmp_path: Path, two_nodes: Any) -> None:
    """The others count. A client that crashed is not asked for the same again in the next round."""
    run_dir = run_local(tmp_path, killing_grid(2, kill_worker), **TINY_RUN | {"strategy": "fedavg", "clients": 3})
    first, second = ({c["client"]: c["status"] for c in r["clients"]} for r in run_dir.rounds())
    assert first == {0: "ok", 1: "crashed", 2: "ok"}
    assert second == {0: "ok", 2: "ok"}


def test_a_suspended_worker_is_given_up_and_replaced(tmp_path: Path, two_nodes: Any) -> None:
    def suspend(grid: Any, node: Any, worker: str) -> None:
        os.kill(grid._nodes.processes[worker], signal.SIGSTOP)

    changes = {"strategy": "fedavg", "clients": 3, "messages__round_timeout": 20.0}
    run_dir = run_local(tmp_path, killing_grid(1, suspend), **TINY_RUN | changes)
    first, second = ({c["client"]: c["status"] for c in r["clients"]} for r in run_dir.rounds())
    assert first[1] == "timeout"
    assert {first[0], first[2], *second.values()} == {"ok"}


def test_a_node_is_lost_within_a_round(tmp_path: Path, two_nodes: Any) -> None:
    """What it was training is trained on the others, and counts as if nothing had happened."""
    third = add_node(two_nodes, {"PIECEWORK_STATE_DIR": str(tmp_path / "third")})

    def lose(grid: Any, node: Any, worker: str) -> None:
        two_nodes.remove_node(third, allow_graceful=False)

    settings = TINY_RUN | {"strategy": "fedavg"}
    require_same_run(
        run_local(tmp_path / "ray", killing_grid(1, lose), **settings), run_local(tmp_path / "local", **settings)
    )


def test_the_head_is_killed_and_resumed(tmp_path: Path) -> None:
    """Its own Ray dies with it, and the resumed run ends as one that nothing happened to. Another cluster may run beside it."""
    values = {"strategy": "spafl", "fleet": "unlimited", "training.local-iterations": 2, "clients-per-round": 2}
    sets = [f"--set={key}={value}" for key, value in values.items()]
    call = [sys.executable, "-m", "piecework", "run", "--nodes=2", "--set=workers=1", *sets]
    run_dir = RunDir(tmp_path / "runs" / "run")
    with subprocess.Popen(
        [*call, "--engine=ray", "--set=num-rounds=300", "--set=run-name=run", "--set=training.lr-rounds=300"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as first:
        while run_dir.last_complete_round() < 1:
            try:
                first.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(first.stderr.read() if first.stderr else "")
        family = psutil.Process(first.pid).children(recursive=True)
        first.kill()
    psutil.wait_procs(family, timeout=60)
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    last = run_dir.last_complete_round() + 1
    resumed = [*call, "--engine=ray", f"--set=num-rounds={last}", f"--set=resume-from={run_dir.path}"]
    subprocess.run(resumed, cwd=tmp_path, check=True, capture_output=True)
    local = [
        *call,
        "--engine=local",
        f"--set=num-rounds={last}",
        "--set=run-name=local",
        "--set=training.lr-rounds=300",
    ]
    subprocess.run(local, cwd=tmp_path, check=True, capture_output=True)
    ours, theirs = model_of(run_dir), model_of(RunDir(tmp_path / "runs" / "local"))
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])
    assert json.loads((run_dir.path / "summary.json").read_text())["status"] == "completed"
