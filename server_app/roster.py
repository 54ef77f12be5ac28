"""Who is there: which Flower node is which client, and what each of them can afford.

A client is known by the `partition-id` of its node-config: Flower's node id changes when a device restarts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from client_app.randomness import generator
from client_app.task import Outcome, content_bytes
from device_profiles.fleet import Fleet, device_state
from device_profiles.profile import DeviceState

QUERY = "query.device"
MIN_EXAMPLES = 2  # batch norm has no statistics of one


def sampled(present: Sequence[int], wanted: int, seed: int, server_round: int) -> list[int]:
    """The clients of a round: a function of (seed, round) and of who is there; all of them where `wanted` is 0."""
    chosen = generator(seed, server_round, "sample").choice(
        np.array(present), size=min(wanted or len(present), len(present)), replace=False
    )
    return sorted(int(client) for client in chosen)


class TooFewNodesError(RuntimeError):
    """Fewer nodes connected in time than the run needs."""


@dataclass
class Member:
    """A node: its client number, device's name, versions, examples, and measured figures where it measures itself."""

    node_id: int
    client: int
    device: str
    versions: str
    examples: int = MIN_EXAMPLES
    measured: dict[str, float] = field(default_factory=dict)


@dataclass
class Roster:
    """The members by client number. `clients` is how many the run is for (0 = decided by who connects)."""

    fleet: Fleet
    seed: int
    clients: int
    reserve: int
    members: dict[int, Member] = field(default_factory=dict)
    federation: int = 0
    last_error: str = ""
    query_bytes: int = 0
    _known: set[int] = field(default_factory=set)

    def gather(self, grid: Grid, timeout: float) -> None:
        """Wait, at most `timeout` seconds, until all clients are there. Raises TooFewNodesError."""
        deadline = time.monotonic() + timeout
        while True:
            self.update(grid, max(1.0, deadline - time.monotonic()))
            expected = self.clients or self.federation
            if self.members and len(self.members) >= expected:
                self.clients = expected
                return
            if time.monotonic() >= deadline:
                raise TooFewNodesError(
                    f"{len(self.members)} of {expected or 'at least 1'} clients connected within {timeout:g} s (node-timeout): "
                    "start more nodes, lower `clients`, or give each node its own partition-id"
                    + (f"; the last answer that could not be used: {self.last_error}" if self.last_error else "")
                )
            time.sleep(0.2)

    def update(self, grid: Grid, timeout: float) -> None:
        """Ask nodes that are new who they are; a client that came back under a new node id replaces its old entry."""
        new = [node for node in grid.get_node_ids() if node not in self._known]
        if not new:
            return
        queries = [Message(RecordDict(), dst_node_id=node, message_type=QUERY) for node in new]
        for reply in grid.send_and_receive(queries, timeout=timeout):
            if reply.has_error():
                self.last_error = str(reply.error.reason)
                continue
            self._known.add(reply.metadata.src_node_id)
            try:
                self.query_bytes += content_bytes(reply.content)
                self._admit(reply)
            except (KeyError, ValueError, TypeError) as error:
                self.last_error = f"{type(error).__name__}: {error}"

    def _admit(self, reply: Message) -> None:
        metrics = dict(reply.content.metric_records["metrics"])
        device, _, versions = Outcome.from_record(reply.content.config_records["outcome"]).reason.partition("|")
        client = int(metrics.pop("partition-id"))  # type: ignore[arg-type]
        self.federation = int(metrics.pop("num-partitions"))  # type: ignore[arg-type]
        if self.clients and not 0 <= client < self.clients:
            return
        examples = int(metrics.pop("num-examples"))  # type: ignore[arg-type]
        measured = {key: float(value) for key, value in metrics.items()}  # type: ignore[arg-type]
        self.members[client] = Member(reply.metadata.src_node_id, client, device, versions, examples, measured)

    def present(self, grid: Grid) -> list[int]:
        """The clients whose nodes are connected now and who have something to learn from, in order."""
        nodes = set(grid.get_node_ids())
        return sorted(c for c, m in self.members.items() if m.node_id in nodes and m.examples >= MIN_EXAMPLES)

    def client_of(self, node_id: int) -> int | None:
        """The client behind a node."""
        return next((m.client for m in self.members.values() if m.node_id == node_id), None)

    def state(self, client: int, server_round: int, reference: int, message_bytes: int) -> DeviceState:
        """What a client has in a round: emulated, or as it last measured itself. `reference` is in bytes."""
        member = self.members.get(client)
        if member is not None and member.device == "auto":
            budget = int(member.measured["memory-available"]) - self.reserve - 3 * message_bytes
            flops, disk = member.measured["flops-per-second"], member.measured["disk-bandwidth"]
            return DeviceState("auto", max(0, budget), flops, float("inf"), disk)
        name = member.device if member is not None and member.device else None
        return device_state(self.fleet, client, self.clients, self.seed, server_round, reference, name)

    def note_free_memory(self, client: int, available: float) -> None:
        """A device that measures itself says with every reply how much memory is free."""
        self.members[client].measured["memory-available"] = available

    def take_query_bytes(self) -> int:
        """Bytes of the answers to queries since the last call; the questions are empty."""
        taken, self.query_bytes = self.query_bytes, 0
        return taken
