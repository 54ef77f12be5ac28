"""What packs and removes clients' files on a node, beside its workers, whose training would hold it up.

It is one process a node: a task of Ray's would start one nearly each time. It imports neither torch nor what trains, so that it
takes little memory.
"""

from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from piecework.engines.cluster.packed import Packed, drop, pack


class Keeper:
    """Reads and removes what clients keep in a `folder` of its node for an experiment."""

    def pack(self, folder: str, experiment: str, client: int) -> Packed:
        """Pack a client's folder."""
        return pack(Path(folder) / experiment / str(client))

    def drop(self, folder: str, experiment: str) -> None:
        """Remove an experiment, whose clients' states have come home."""
        drop(Path(folder) / experiment)


KEEPER: Any = ray.remote(Keeper)
KEEPER_BYTES = 2**27  # of a keeper and the archive that it makes
RETRIES = 3  # of what a keeper that died was asked


def start_keeper(node: str) -> Any:
    """Start the keeper of a node; returns Ray's handle. If it dies, Ray starts it again, and repeats what it was asked."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "memory": KEEPER_BYTES, "max_restarts": -1, "max_task_retries": RETRIES}
    return KEEPER.options(**options, scheduling_strategy=strategy).remote()
