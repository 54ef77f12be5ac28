"""What a run tells in Flower's log, which is all that `flwr run` shows of it: its clients, its rounds and its folder."""

import logging
from collections.abc import Mapping
from typing import Any

from flwr.serverapp import Grid
from flwr.supercore.constant import DEFAULT_SIMULATION_CONFIG

from piecework.server_app.records import RunDir
from piecework.server_app.round_line import round_line
from piecework.training.settings import Settings

FLOWER = logging.getLogger("flwr")
LOG = logging.getLogger("piecework")


def through_flower() -> None:
    """Let the run's own log appear in Flower's, which would show its warnings alone, without their level."""
    LOG.setLevel(logging.INFO)
    for handler in FLOWER.handlers:
        LOG.addHandler(handler)


def tell_start(grid: Grid, settings: Settings, run_dir: RunDir) -> None:
    """Log which clients take part and why, and where the results will be."""
    LOG.info("%s, %d rounds, on %s", settings.strategy, settings.num_rounds, settings.dataset)
    nodes = len(list(grid.get_node_ids()))
    if is_simulation(grid):
        tell_simulated(nodes, settings)
    else:
        tell_connected(nodes, settings)
    LOG.info("results: %s", run_dir.path.resolve())
    if not settings.resume_from:
        LOG.info(
            "    which is in output-dir = %r, seen from the folder where the SuperLink was started: %s",
            settings.output_dir,
            "to choose it, add -c 'output-dir=\"/a/folder\"'",
        )


def is_simulation(grid: Grid) -> bool:
    """Return whether a grid is that of Flower's simulation, whose nodes are all there from the beginning."""
    return type(grid).__name__ == "InMemoryGrid"  # importing it to compare would take seconds


def tell_simulated(nodes: int, settings: Settings) -> None:
    """Log how many clients Flower simulates, and how to have another number."""
    clients, enough = settings.clients, settings.faults.min_clients
    default = nodes == DEFAULT_SIMULATION_CONFIG.num_supernodes  # or chosen: a ServerApp cannot tell
    why = f"Flower simulates {nodes} nodes{', as many as by default' if default else ''}"
    if clients > nodes:
        then = "the run will not begin"
        if 0 < enough <= nodes:
            timeout = settings.messages.node_timeout
            then = f"the run begins without the others after {timeout:g} s (messages.node-timeout, faults.min-clients)"
        LOG.warning("clients = %d, but %s: %s; %s", clients, why, then, more_nodes(clients))
    elif clients:
        LOG.info("clients: %d, as the setting clients says; %s", clients, why)
    else:
        LOG.info("clients: %d, because clients = 0 takes all, and %s; %s", nodes, why, more_nodes(20))


def more_nodes(number: int) -> str:
    """Return how to have a number of simulated nodes."""
    return f"for {number} add --federation-config 'num-supernodes={number}' to flwr run"


def tell_connected(nodes: int, settings: Settings) -> None:
    """Log how many nodes are connected, and how many clients the run waits for."""
    wanted = (
        f"{settings.clients}, as the setting clients says"
        if settings.clients
        else "as many as num-partitions of the nodes' node-config says, because clients = 0"
    )
    LOG.info(
        "clients: %s; %d nodes are connected, and the run waits up to %g s for the others (messages.node-timeout)",
        wanted,
        nodes,
        settings.messages.node_timeout,
    )


def tell_round(record: Mapping[str, Any], settings: Settings) -> None:
    """Log a finished round in a line, which the run's own log has already (run_log.py)."""
    FLOWER.info("%s  %.1f s", round_line(dict(record), settings.num_rounds), record["seconds"])


def tell_end(run_dir: RunDir) -> None:
    """Log how a run ended, and the commands that read its results."""
    summary, folder = run_dir.summary() or {}, run_dir.path.resolve()
    LOG.info("%s after %s rounds: %s", summary.get("status"), summary.get("rounds"), folder)
    LOG.info("read it: piecework report %s", folder)
