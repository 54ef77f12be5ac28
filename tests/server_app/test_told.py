"""What a run under plain `flwr run` says in Flower's log."""

import logging
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid
from helpers import few_digits, tiny_settings

from piecework.server_app.app import app
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.server_app.told import tell_start

FEW_DIGITS = {"clients": 0, "clients_per_round": 0, "training.local-iterations": 1}


@pytest.fixture(autouse=True)
def log() -> Iterator[logging.Logger]:
    """The run's log, with the handlers and the level that it had."""
    own = logging.getLogger("piecework")
    handlers, level = list(own.handlers), own.level
    yield own
    own.handlers[:] = handlers
    own.setLevel(level)


def test_a_run_says_who_trains_each_round_and_where_it_writes(
    tmp_path: Path, log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_settings(output_dir=str(tmp_path), dataset=f"npz:{few_digits()}", num_rounds=2, **FEW_DIGITS)
    config = settings.to_run_config()
    with LocalGrid(3, config) as grid:
        app(grid, Context(1, 1, {}, RecordDict(), dict(config)))
    assert set(logging.getLogger("flwr").handlers) <= set(log.handlers)  # else `flwr run` would show nothing of it
    said = [record.message for record in caplog.records if record.name == log.name]
    assert said[0] == f"fedepth, 2 rounds, on npz:{few_digits()}"
    assert said[1] == (
        "clients: as many as num-partitions of the nodes' node-config says, because clients = 0; 3 nodes are connected, and "
        "the run waits up to 120 s for the others (messages.node-timeout)"
    )
    assert said[2] == f"results: {tmp_path / 'run'}"
    assert f"output-dir = {str(tmp_path)!r}" in said[3]
    assert "every part of the model can be trained by all clients" in said
    rounds = [
        record.message for record in caplog.records if record.name == "flwr" and record.message.startswith("round ")
    ]
    written = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert [line.split("INFO    ")[-1] for line in written if " round " in line] == rounds  # each once
    assert [line.split("  ")[0] for line in rounds] == ["round 1/2", "round 2/2"]
    assert all("3/3 clients ok" in line and line.endswith(" s") for line in rounds)
    assert said[-2:] == [
        f"completed after 2 rounds: {tmp_path / 'run'}",
        f"read it: piecework report {tmp_path / 'run'}",
    ]


def simulated(nodes: int) -> InMemoryGrid:
    """The grid of Flower's simulation, as it hands it to a ServerApp."""
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
    state: Any = factory.state()
    run = replace(Run.create_empty(run_id=1), primary_task_id=1, federation_id=NOOP_FEDERATION_ID)
    state.run_ids[1], state.task_store[1] = RunRecord(run=run), Task(task_id=1, run_id=1)
    for _ in range(nodes):
        node = state.create_node("", "", secrets.token_bytes(32), heartbeat_interval=1e9)
        state.acknowledge_node_heartbeat(node_id=node, heartbeat_interval=1e9)
    grid = InMemoryGrid(state_factory=factory)
    grid.set_run(run)
    return grid


@pytest.mark.parametrize(
    ("nodes", "clients", "enough", "level", "told"),
    [
        (
            2,
            0,
            0,
            "INFO",
            "clients: 2, because clients = 0 takes all, and Flower simulates 2 nodes, as many as by default; for 20 add "
            "--federation-config 'num-supernodes=20' to flwr run",
        ),
        (3, 3, 0, "INFO", "clients: 3, as the setting clients says; Flower simulates 3 nodes"),
        (
            2,
            6,
            0,
            "WARNING",
            "clients = 6, but Flower simulates 2 nodes, as many as by default: the run will not begin; for 6 add "
            "--federation-config 'num-supernodes=6' to flwr run",
        ),
        (
            3,
            6,
            4,
            "WARNING",
            "clients = 6, but Flower simulates 3 nodes: the run will not begin; for 6 add --federation-config "
            "'num-supernodes=6' to flwr run",
        ),
        (
            3,
            6,
            3,
            "WARNING",
            "clients = 6, but Flower simulates 3 nodes: the run begins without the others after 120 s (messages.node-timeout, "
            "faults.min-clients); for 6 add --federation-config 'num-supernodes=6' to flwr run",
        ),
    ],
)
def test_a_simulation_says_how_many_nodes_it_has_and_why(
    nodes: int, clients: int, enough: int, level: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "piecework")
    settings = tiny_settings(clients=clients, clients_per_round=0, dataset="digits", faults__min_clients=enough)
    tell_start(simulated(nodes), settings, RunDir(tmp_path / "run"))
    assert [(record.levelname, record.message) for record in caplog.records][1] == (level, told)
