"""The machines of the cluster and their workers: who came, who went, and what Ray was told to keep for us."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from piecework.engines.cluster.book import FLOOR, Node, gpu_fraction
from piecework.engines.cluster.keeper import KEEPER_BYTES
from piecework.engines.cluster.start import require_same
from piecework.engines.cluster.travel import checksums, read_data
from piecework.engines.cluster.worker import Worker
from piecework.engines.processes import EngineError
from piecework.federation.errors import RunAbortedError
from piecework.server_app.local_grid import NodeConfig, dump_module
from piecework.training.settings import Settings
from piecework.training.setup import prepare_dataset

STEP = 2**26  # bytes by which reservations grow
RESERVE_SECONDS = 0.1
PATIENCE_SECONDS = 60.0  # until a node that has not started a worker is not waited for any more
RESUMED_SECONDS = 600.0  # the same in a run that goes on, because a node may hold states of its clients
MOST_STARTS = 3  # of workers that die before they could train, one after another
LOG = logging.getLogger("piecework")
WORKER: Any = ray.remote(Worker)
_list_nodes: Any = ray.nodes


@dataclass
class Reserved:
    """What Ray keeps for us on a node: `bytes` in `groups`. `asked` is a group of `more` bytes that it has not given yet."""

    bytes: int = 0
    groups: list[Any] = field(default_factory=list)
    asked: Any = None
    more: int = 0


class Nodes:
    """The nodes of the cluster, and in `starting` the references of workers that have not said yet that they are there.

    `workers` are those a node, at most; 0 = one for each core. Raises EngineError where a node cannot take part.
    """

    def __init__(self, run_config: dict[str, Any], clients: int, node_config: NodeConfig, workers: int) -> None:
        self.known: dict[str, Node] = {}
        self.starting: dict[Any, str] = {}
        self.processes: dict[str, int] = {}  # each worker's, on its node
        self._settings = Settings.from_run_config(run_config)
        self._data = prepare_dataset(self._settings)
        self._checksums = checksums(self._data)
        self._sent: dict[str, Any] = {}
        self._arguments = run_config, clients, node_config, dump_module(run_config), self._checksums
        self._most = workers
        self._actors: dict[str, tuple[Any, str]] = {}  # and the name of the node that each is on
        self._reserved: dict[str, Reserved] = {}
        self._numbers = itertools.count(1)
        self._failed: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._all: dict[str, Mapping[str, Any]] = {}
        self.refresh()
        self._first, self._begun = {*self.known}, time.monotonic()
        self._given_up: set[str] = set()

    def refresh(self) -> None:
        """Start workers on nodes that came, and forget nodes that went."""
        self._all = {node["NodeID"]: node for node in _list_nodes() if node["Alive"]}
        for name in self.known.keys() - self._all.keys():
            LOG.warning("node %s of the Ray cluster is gone", name[:8])
            del self.known[name]
            self._give_back(name)
            self._actors = {worker: found for worker, found in self._actors.items() if found[1] != name}
        for name in self._all.keys() - self.known.keys():
            resources = self._all[name]["Resources"]
            cores, lacks = int(resources.get("CPU", 0)), self._on_gpus and resources.get("GPU", 0) < 1
            if cores < 1 or lacks or name in self._refused:
                continue
            self.known[name] = node = Node(name, max(0, int(resources.get("memory", 0)) - KEEPER_BYTES))
            for _ in range(max(1, min(cores, self._most or cores, node.memory // (2 * FLOOR)))):
                self._start(name)

    @property
    def _on_gpus(self) -> bool:
        return self._settings.training.accelerator == "cuda"

    @property
    def count(self) -> int:
        """How many workers there are."""
        return len(self._actors)

    def unheard(self, asked: Callable[[str], bool]) -> list[str]:
        """Return the nodes that were there at first, are still, and were not `asked` yet: they have started no worker."""
        return sorted(name for name in self._first & self.known.keys() if not asked(name))

    def all_came(self, asked: Callable[[str], bool]) -> bool:
        """Whether no node is `unheard`, or the others take too long to start a worker, which is told."""
        missing = self.unheard(asked)
        if missing and time.monotonic() <= self._begun + self._patience:
            return False
        for name in {*missing} - self._given_up:
            LOG.warning(
                "node %s of the Ray cluster has said nothing of its clients' states in %g s: the run goes on without them",
                self.address(name),
                self._patience,
            )
        self._given_up.update(missing)
        return True

    @property
    def _patience(self) -> float:
        """Seconds; they leave half of the time that messages have, because nothing is sent meanwhile."""
        longest = max(PATIENCE_SECONDS, self._settings.messages.round_timeout / 2)
        return min(RESUMED_SECONDS, longest) if self._settings.resume_from else PATIENCE_SECONDS

    def address(self, name: str) -> str:
        """Return a node's host, for the user."""
        return str(self._all.get(name, {}).get("NodeManagerAddress", name[:8]))

    def _start(self, name: str) -> None:
        worker = f"{name[:8]}/{next(self._numbers)}"
        actor = WORKER.options(
            num_cpus=1,
            num_gpus=self._gpu_fraction(name),
            memory=FLOOR,
            scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
        ).remote(*self._arguments)
        self._actors[worker] = actor, name
        self.starting[actor.greet.remote()] = worker

    def _gpu_fraction(self, name: str) -> float:
        """Return the part of a GPU that each worker of a node gets, so that they spread evenly over all."""
        resources = self._all[name]["Resources"]
        if not self._on_gpus:
            return 0.0
        cores = int(resources.get("CPU", 0))
        return gpu_fraction(min(cores, self._most or cores), int(resources.get("GPU", 0)))

    def greet(self, reference: Any) -> None:
        """Take in a worker that has started, with the data set if its node has none.

        Raises EngineError for a node that has other software, or cannot keep the data. One that came later is left out.
        """
        worker = self.starting.pop(reference)
        actor, name = self._actors.get(worker, (None, ""))
        if (node := self.known.get(name)) is None or actor is None:
            return
        try:
            greeting = ray.get(reference)
            require_same(greeting.host, greeting.software)
            if not greeting.data and (why := ray.get(actor.take_data.remote(self._files()))):
                raise EngineError(f"node {greeting.host}: {why}")
        except (ray.exceptions.RayTaskError, EngineError) as error:
            own = isinstance(error, EngineError)
            return self._refuse(name, str(error) if own else f"no worker starts there: {_last_line(error)}")
        except ray.exceptions.RayError as error:
            return self._note_failure(worker, name, error)
        self._failed.pop(name, None)
        node.floors[worker] = max(FLOOR, greeting.bytes)
        self.processes[worker] = greeting.process

    def _refuse(self, name: str, why: str) -> None:
        """Leave out a node. Raises EngineError if it was there at first."""
        if name in self._first:
            raise EngineError(f"{self.address(name)}: {why}")
        LOG.warning("node %s of the Ray cluster is left out: %s", self.address(name), why)
        self._refused.add(name)
        self._give_back(name)
        for worker in [worker for worker, (_, node) in self._actors.items() if node == name]:
            with suppress(ray.exceptions.RayError):
                ray.kill(self._actors.pop(worker)[0])
        self.known.pop(name, None)

    def _note_failure(self, worker: str, name: str, error: ray.exceptions.RayError) -> None:
        self.refresh()
        if name not in self.known:
            return
        self._failed[name] += 1
        if self._failed[name] >= MOST_STARTS:
            if len(self.known) > 1:
                self._first.discard(name)
                return self._refuse(name, _last_line(error))
            raise RunAbortedError(f"workers of Ray end before they can train: {_last_line(error)}")
        self.replace(worker)

    def _files(self) -> dict[str, Any]:
        """Return references of the data set's files, which are put where Ray shares them when the first node asks."""
        if not self._sent:
            self._sent = {name: ray.put(data) for name, data in read_data(self._data)}
        return self._sent

    @property
    def ready(self) -> bool:
        """Whether all workers have started."""
        return not self.starting

    def require_some(self) -> None:
        """Raise RunAbortedError if no node is left."""
        if not self._actors:
            self.refresh()
        if not self._actors:
            raise RunAbortedError("no node of the Ray cluster has a processor for clients")

    def describe(self) -> str:
        """Return in words how far the workers have started."""
        count = len(self._actors)
        return f"{count - len(self.starting)} of {count} workers have started, on {len(self.known)} nodes"

    def actor(self, worker: str) -> Any:
        """Return Ray's handle of a worker."""
        return self._actors[worker][0]

    def describe_worker(self, worker: str) -> str:
        """Return in words which process a worker is, and where."""
        name = self._actors[worker][1] if worker in self._actors else ""
        return f"its worker, process {self.processes.get(worker, 0)} on {self.address(name)},"

    def node_of(self, worker: str) -> Node | None:
        """Return the node that a worker is on; None if that is gone."""
        return self.known.get(self._actors[worker][1]) if worker in self._actors else None

    def replace(self, worker: str) -> None:
        """End a worker, if it still lives, and start another one on its node, if that still lives."""
        if worker not in self._actors:
            return
        actor, name = self._actors.pop(worker)
        with suppress(ray.exceptions.RayError):
            ray.kill(actor)
        self.refresh()
        if name in self.known:
            self.known[name].floors.pop(worker, None)
            self.known[name].prices.pop(worker, None)
            self._start(name)

    def retire(self, node: Node, price: int) -> None:
        """End idle workers of a node until a message of this price fits beside those that are left."""
        while node.free < price and len(node.idle) > 1:
            worker = node.idle[-1]
            node.floors.pop(worker)
            with suppress(ray.exceptions.RayError):
                ray.kill(self._actors.pop(worker)[0])

    def reserve(self, node: Node, price: int) -> bool:
        """Have Ray keep memory on a node for what trains there and `price` more, so that other jobs see it.

        Returns whether there is as much. Reservations grow and are kept until the end. One that Ray has not given in time
        waits for the next call: of a group that is removed while it is made, Ray 2.55 keeps the memory for ever.
        """
        needed = sum(node.prices.values()) + price
        held = self._reserved.setdefault(node.name, Reserved())
        while needed > held.bytes:
            if held.asked is None:
                missing, most = needed - held.bytes, node.memory - sum(node.floors.values()) - held.bytes
                held.more = max(missing, min(-(-missing // STEP) * STEP, most))
                selector = [{"ray.io/node-id": node.name}]
                held.asked = placement_group([{"memory": held.more}], bundle_label_selector=selector)
            if not held.asked.wait(RESERVE_SECONDS):
                return False
            held.bytes += held.more
            held.groups.append(held.asked)
            held.asked = None
        return True

    def _give_back(self, name: str) -> None:
        """Give back what is reserved on a node. If that is gone, Ray would ask for another one with the same name for ever."""
        if (held := self._reserved.pop(name, None)) is not None:
            for group in [*held.groups, *filter(None, [held.asked])]:
                remove_placement_group(group)

    def close(self) -> None:
        """End all workers, and give back what was reserved."""
        for actor, _ in self._actors.values():
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        for name in [*self._reserved]:
            self._give_back(name)
        self._actors.clear()
        self.known.clear()
        self.starting.clear()


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
