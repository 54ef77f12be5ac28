"""Which client trains where: what each node has, what it holds, and what was admitted to it.

Ray admits by what is declared and never limits. So the book is kept here, in bytes that were traced: a node takes a client
while the floors of its workers and the prices of the clients that they train fit its memory. Longest predicted first, so that
a round does not end with a straggler; and where a client's state lies, if a worker is free there.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from piecework.device_profiles.profile import is_limit
from piecework.training.messages import Task

HEAD = "head"  # the place of states that lie in the run's own folder, on the head and on nodes that share it
FLOOR = 512 * 2**20  # bytes of a worker that trains nothing, until it says how many it has


class Want(NamedTuple):
    """What a waiting message needs: `price` bytes beside the worker's own, `seconds` of computing (0 = unknown).

    `avoided` is a node on which its worker died: it goes to another if there is one.
    """

    identifier: str
    client: int
    price: int
    seconds: float = 0.0
    avoided: str = ""


@dataclass
class Node:
    """A machine of the cluster: `memory` is what Ray may give there, in bytes, beside its object store.

    `floors` are the bytes of its workers, and `prices` those of the messages that they work on. `place` names where states of
    clients that train here lie: HEAD, or the node itself.
    """

    name: str
    memory: int
    place: str = HEAD
    floors: dict[str, int] = field(default_factory=dict)
    prices: dict[str, int] = field(default_factory=dict)

    @property
    def idle(self) -> list[str]:
        """Its workers that have nothing to do, in the order in which they started."""
        return [worker for worker in self.floors if worker not in self.prices]

    @property
    def free(self) -> int:
        """The bytes that are left for prices."""
        return self.memory - sum(self.floors.values()) - sum(self.prices.values())

    def could_ever_take(self, price: int) -> bool:
        """Whether a message fits beside one worker, if no other trains."""
        return price <= self.memory - min(self.floors.values(), default=FLOOR)


def gpu_fraction(workers: int, gpus: int) -> float:
    """Return the fraction of a GPU per client with which `workers` clients spread evenly over all; rounded down to fit."""
    return math.floor(1e4 / math.ceil(workers / gpus)) / 1e4 if gpus else 0.0


def price_of(task: Task, message_bytes: int) -> int:
    """Return the most bytes that a client holds while it does a task: its steps' peak within its budget, and its message.

    The message is there twice, as it arrives and as the reply. Costs that are not enforced are not true bytes; then the task
    takes a step of the whole model.
    """
    listed = [*task.costs.values(), *(step.bytes for step in task.evaluation)]
    peak = max(listed, default=task.reference) if task.enforced else task.reference
    if task.enforced and is_limit(task.budget):
        peak = min(peak, task.budget)
    return peak + 2 * message_bytes


def choose(waiting: Iterable[Want], nodes: Collection[Node], homes: dict[int, str]) -> tuple[Want, Node, str] | None:
    """Return what begins next, on which node and worker; None if nothing can.

    `waiting` has the longest first, and `homes` says where clients' states lie. Of those that may begin at once, first come
    those whose state is where a worker is idle, and the longest of them. What waits for room does not hold up what fits. No
    more of `waiting` is looked at than needed, because it may have thousands.
    """
    free = {node.name: node.free for node in nodes if node.idle}
    elsewhere: tuple[Want, Node, str] | None = None
    for want in waiting if free else ():
        home = homes.get(want.client)
        able = [node for node in nodes if node.name in free and want.price <= free[node.name]]
        if want.avoided and any(node.name != want.avoided and node.could_ever_take(want.price) for node in nodes):
            able = [node for node in able if node.name != want.avoided]
        if at_home := [node for node in able if home in (None, node.place)]:
            node = max(at_home, key=lambda node: free[node.name])
            return want, node, node.idle[0]
        if able and elsewhere is None:
            node = max(able, key=lambda node: free[node.name])
            elsewhere = want, node, node.idle[0]
    return elsewhere
