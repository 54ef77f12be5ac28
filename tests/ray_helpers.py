"""Raylets on this machine as nodes of a cluster, grids that do something at a chosen time, and when two runs are the same."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from helpers import FEW, model_of

from piecework.server_app.records import RunDir

TINY_RUN: dict[str, Any] = {
    "dataset": FEW,
    "clients": 4,
    "clients_per_round": 3,
    "num_rounds": 2,
    "fleet": "unlimited",
    "training__local_iterations": 2,
    "evaluation__every": 2,
}
MEMORY = 4 * 2**30  # bytes that a node says it has
PATIENCE = 120.0  # seconds for what a test waits for, on a machine that does much else


@contextmanager
def two_raylets(states: Path) -> Iterator[Any]:
    """A cluster of two raylets with one processor each; the second keeps clients' states in a folder of its own."""
    from piecework.engines.cluster.address import protect

    protect()
    from ray.cluster_utils import Cluster

    from piecework.engines.cluster.start import started

    cluster, own = Cluster(), {"PIECEWORK_STATE_DIR": str(states)}
    try:
        for environment in (None, own):
            add_node(cluster, environment)
        with started(address=cluster.address):
            yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, environment: dict[str, str] | None = None) -> Any:
    return cluster.add_node(
        num_cpus=1, memory=MEMORY, object_store_memory=80 * 2**20, include_dashboard=False, env_vars=environment
    )


def lose_node(cluster: Any, node: Any) -> None:
    """Kill the processes of a node. That it is gone Ray knows some time later."""
    cluster.remove_node(node, allow_graceful=False)


def is_alive(node: Any) -> bool:
    """Whether Ray takes a node to be there."""
    import ray

    return any(each["Alive"] and each["NodeID"] == node.node_id for each in ray.nodes())


@contextmanager
def third_node(cluster: Any, **environment: str) -> Iterator[Any]:
    """One more node, until the end of the test, unless the test itself ends it."""
    node = add_node(cluster, environment)
    try:
        yield node
    finally:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)
        wait_until(lambda: not is_alive(node), "Ray does not see that the node is gone")


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition that other processes bring about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def facts(run_dir: RunDir, *others: str) -> list[dict[str, Any]]:
    """What the records say of a run, but for times, resident memory, bytes that depend on the length of a path, and others."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items() if not any(word in key for word in unlike)}
        return [plain(each) for each in value] if isinstance(value, list) else value

    unlike = ("seconds", "rss", "bytes", *others)
    return [plain(record) for record in run_dir.rounds()]


def require_same_model(one: RunDir, other: RunDir) -> None:
    ours, theirs = model_of(one), model_of(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])


def require_same_run(one: RunDir, other: RunDir) -> None:
    require_same_model(one, other)
    assert facts(one) == facts(other)


def store_of(run_dir: RunDir) -> Path:
    """The folder of the clients in a run's folder."""
    (experiment,) = [path for path in (run_dir.path / "clients").iterdir() if path.is_dir()]
    return experiment


def states(run_dir: RunDir) -> dict[str, bytes]:
    """The newest states of clients in a run's folder, by client and file."""
    found = {}
    for client in store_of(run_dir).glob("*/state"):
        newest = max(client.iterdir(), key=lambda path: int(path.name))
        found |= {
            f"{client.parent.name}/{newest.name}/{path.name}": path.read_bytes()
            for path in newest.iterdir()
            if path.suffix == ".safetensors"
        }
    return found


def statuses(run_dir: RunDir) -> list[dict[int, str]]:
    """How each client fared, in the order of rounds."""
    return [{client["client"]: client["status"] for client in record["clients"]} for record in run_dir.rounds()]


def grid_that_ends(**attributes: Any) -> Any:
    """A grid that brings states home at the end of the run, as the engine does, and says where they were."""
    from piecework.engines.cluster.grid import RayGrid

    class Ends(RayGrid):
        ended_with: dict[int, str]

        def __exit__(self, *error: object) -> None:
            type(self).ended_with = dict(self._homes.places)
            if error[0] is None:
                self.bring_home()
            super().__exit__(*error)

    return type("Ends", (Ends,), attributes)


def make_ready(grid: Any, name: str) -> None:
    """Wait until a node can train a client at once: its worker has started, and Ray keeps memory for it there."""

    def is_ready() -> bool:
        grid._collect(time.monotonic())
        node = grid._nodes.known.get(name)
        return node is not None and bool(node.idle) and grid._nodes.reserve(node, 2**20)

    wait_until(is_ready, "no worker starts on a node")


def killing_grid(times: int, action: Any, server_round: str = "1") -> Any:
    """A grid that does something to the worker that trains client 1 in a round, as often as this, when it has begun."""
    from piecework.engines.cluster.grid import RayGrid

    class Kills(RayGrid):
        left = times

        def _begin(self, want: Any, node: Any, worker: str) -> None:
            due = is_training(self, want, server_round)
            super()._begin(want, node, worker)
            if want.client == 1 and due and Kills.left:
                Kills.left -= 1
                action(self, node, worker)

    return Kills


def is_training(grid: Any, want: Any, server_round: str) -> bool:
    """Whether a message is one of the training of a round."""
    metadata = grid._order[want.identifier][0]
    return bool((metadata.message_type, metadata.group_id) == ("train", server_round))


def kill_worker(grid: Any, node: Any, worker: str) -> None:
    os.kill(grid._nodes.processes[worker], signal.SIGKILL)
