"""Runs on real Ray: two nodes with stores of their own are the local engine to the bit, and what dies is run again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import run_local
from ray_helpers import (
    TINY_RUN,
    grid_that_ends,
    is_alive,
    kill_worker,
    killing_grid,
    lose_node,
    require_same_model,
    require_same_run,
    states,
    statuses,
    third_node,
)

from piecework.server_app.records import RunDir

pytest.importorskip("ray")
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("strategy", ["fedepth", "fedprophet", "prism", "spafl", "local"])
def test_two_nodes_are_the_local_engine_to_the_bit(tmp_path: Path, two_nodes: Any, strategy: str) -> None:
    """States travel between the nodes, and are in the run's folder at the end, the same as if they had never left it."""
    settings = TINY_RUN | {"strategy": strategy}
    grid = grid_that_ends()
    ray_run = run_local(tmp_path / "ray", grid, **settings)
    local = run_local(tmp_path / "local", **settings)
    require_same_run(ray_run, local)
    assert states(ray_run) == states(local)
    if states(local):
        assert len(set(grid.ended_with.values())) == 2  # both nodes trained, and kept what they trained


def test_a_client_whose_worker_is_killed_is_trained_again(tmp_path: Path, two_nodes: Any) -> None:
    """In round 2, when it has a state, which must still be there in round 3."""
    settings = TINY_RUN | {"strategy": "spafl", "clients": 3, "num_rounds": 3}
    grid = killing_grid(1, kill_worker, "2")
    require_same_run(run_local(tmp_path / "ray", grid, **settings), run_local(tmp_path / "local", **settings))
    assert grid.left == 0


def test_a_client_whose_worker_dies_twice_has_crashed(tmp_path: Path, two_nodes: Any) -> None:
    """The others count. A client that crashed is not asked for the same again in the next round."""
    run_dir = run_local(tmp_path, killing_grid(2, kill_worker), **TINY_RUN | {"strategy": "fedavg", "clients": 3})
    first, second = statuses(run_dir)
    assert first == {0: "ok", 1: "crashed", 2: "ok"}
    assert second == {0: "ok", 2: "ok"}


def test_a_suspended_worker_is_given_up_and_replaced(tmp_path: Path, two_nodes: Any) -> None:
    def suspend(grid: Any, node: Any, worker: str) -> None:
        os.kill(grid._nodes.processes[worker], signal.SIGSTOP)

    changes = {"strategy": "fedavg", "clients": 3, "messages__round_timeout": 20.0}
    run_dir = run_local(tmp_path, killing_grid(1, suspend), **TINY_RUN | changes)
    first, second = statuses(run_dir)
    assert first[1] == "timeout"
    assert {first[0], first[2], *second.values()} == {"ok"}


def test_a_node_is_lost_within_a_round(tmp_path: Path, two_nodes: Any) -> None:
    """What it was training is trained on the others, and counts as if nothing had happened."""
    with third_node(two_nodes, PIECEWORK_STATE_DIR=str(tmp_path / "third")) as third:

        def lose(grid: Any, node: Any, worker: str) -> None:
            lose_node(two_nodes, third)

        settings = TINY_RUN | {"strategy": "fedavg"}
        run = run_local(tmp_path / "ray", killing_grid(1, lose), **settings)
    require_same_run(run, run_local(tmp_path / "local", **settings))


def test_the_head_is_killed_and_resumed(tmp_path: Path, two_nodes: Any) -> None:
    """Its own Ray dies with it, and the resumed run ends as one that nothing happened to. A cluster beside it goes on."""
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
    require_same_model(run_dir, RunDir(tmp_path / "runs" / "local"))
    assert json.loads((run_dir.path / "summary.json").read_text())["status"] == "completed"
    assert all(is_alive(node) for node in two_nodes.list_all_nodes())
