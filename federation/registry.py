"""The client registry: which Flower node is which client, and the resources of each client.

A client is identified by the `partition-id` of its node-config, because Flower's node id changes when a device restarts.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from piecework.device_profiles.fleet import Fleet, device_of, device_state
from piecework.device_profiles.profile import DeviceState, measured_budget
from piecework.federated_data.own_data import Expected
from piecework.federation.claims import Claims
from piecework.federation.errors import TooFewNodesError
from piecework.training.answers import AnswerError, printable, read_figures, read_node, reason_of
from piecework.training.messages import EXPECTED, content_bytes, expected_record
from piecework.training.randomness import generator
from piecework.training.readable import UNUSABLE
from piecework.training.settings.shared import MemorySettings

LOG = logging.getLogger("piecework")
QUERY = "query.device"
QUERY_SECONDS = 300.0  # after this time a query without an answer is repeated
GRACE_SECONDS = 15.0  # how long a round waits for an answer: the node first starts a process and imports torch
TOLD = 3  # nodes whose answer could not be used, in an error
# Flower's reason of an exception in a ClientApp: <class 'module.Name'>:<'message'>
FLOWERS_REASON = re.compile(r"^<class '(?:\w+\.)*(\w+)'>:<(['\"])(.*)\2>$", re.DOTALL)
AGAIN_SECONDS = 30.0  # after this time a node whose answer could not be used is queried again
MEASURED = "memory-available", "flops-per-second", "disk-bandwidth"  # by a device that measures itself
LACKING = "unknown strategy", "is not known", "unknown data set"  # what a node says that lacks the package of a plugin
MIN_EXAMPLES = 2  # batch norm has no statistics of one example


def sample_clients(present: Sequence[int], wanted: int, seed: int, server_round: int) -> list[int]:
    """Draw `wanted` of the present clients (0 = all), in order: a function of the seed, the round and `present`."""
    chosen = generator(seed, server_round, "sample").choice(
        np.array(present), size=min(wanted or len(present), len(present)), replace=False
    )
    return sorted(int(client) for client in chosen)


@dataclass
class Member:
    """What a node reported: its client number, device name, software, and numbers of training, validation and test examples.

    `measured` holds its figures (bytes, FLOP/s, bytes/s) if it measures itself. `device` is empty if the fleet assigns one.
    With `own_data` its examples are not a part of the server's, so each message to it says how those are read.
    """

    node_id: int
    client: int
    device: str
    software: str
    examples: int = MIN_EXAMPLES
    validation: int = 0
    test: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    own_data: bool = False


@dataclass
class ClientRegistry:
    """The members by client number. `clients` is the number of clients in the run (0 = as many as Flower's federation has).

    `busy` are the nodes that have not answered an earlier message. `query_bytes` are those of answers not yet recorded.

    `bound` are the clients that belong to one node for the whole run, with its name. It is the name under which the node's key
    was registered (`piecework register`), so only a node with node authentication has one.

    `expected` is what the run expects of nodes' own data.

    `packages` are those whose plugins clients need; the error of a node that lacks them names them.

    `auto` are the clients whose devices measure themselves (device = 'auto').

    With `keeps_classes`, a client keeps the device class with which it began, in `classes`: a private run divides by how many
    clients have it.

    Two nodes that are online and claim one client are both refused, because nothing says which of them has its data. Once the
    run has `started`, the node that works keeps its client, and only the other is refused: no newcomer can put out a member.
    """

    fleet: Fleet
    seed: int
    clients: int
    memory: MemorySettings
    members: dict[int, Member] = field(default_factory=dict)
    federation: int = 0
    query_bytes: int = 0
    busy: set[int] = field(default_factory=set)
    bound: dict[int, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    expected: Expected | None = None
    started: bool = False
    auto: set[int] = field(default_factory=set)
    keeps_classes: bool = False
    classes: dict[int, str] = field(default_factory=dict)
    _online: set[int] = field(default_factory=set)
    _names: dict[int, str] = field(default_factory=dict)
    _clients: dict[int, int] = field(default_factory=dict)
    _claims: Claims = field(default_factory=Claims)
    _asked: dict[str, tuple[int, float]] = field(default_factory=dict)
    _failed: dict[int, tuple[str, float]] = field(default_factory=dict)
    _gone: list[str] = field(default_factory=list)  # the last of those that failed and left

    def wait_for_clients(self, grid: Grid, timeout: float, enough: int = 0) -> None:
        """Wait until all clients are connected. After `timeout` seconds, `enough` of them suffice, unless that is 0.

        Raises TooFewNodesError.
        """
        deadline = time.monotonic() + timeout
        while True:
            self.update(grid)
            expected, late = self.clients or self.federation, time.monotonic() >= deadline
            complete = len(self.members) >= (enough if enough and late else expected)
            if self.members and complete and (late or not self.incomplete()):
                self._start(expected)
                return
            if late:
                refused = [
                    f"{self._describe_node(node)}: {reason}" for node, (reason, _) in sorted(self._failed.items())
                ] or self._gone
                raise TooFewNodesError(
                    f"{len(self.members)} of {expected or 'at least 1'} clients connected within {timeout:g} s "
                    "(messages.node-timeout): start more nodes, lower `clients`, or give each node its own partition-id"
                    + (f". Not used: {'; '.join(refused[:TOLD])}" if refused else "")
                    + (f"; and {len(refused) - TOLD} more" if len(refused) > TOLD else "")
                )
            time.sleep(0.2)

    def _start(self, clients: int) -> None:
        self.clients, self.started = clients, True
        if self.keeps_classes:
            self.classes = {client: member.device for client, member in self.members.items()} | self.classes
        names = {client: self._names.get(member.node_id, "") for client, member in self.members.items()}
        self.bound |= {client: name for client, name in names.items() if name}

    def update(self, grid: Grid) -> None:
        """Query new nodes, and register those whose answers have arrived, without waiting for the others.

        A client that returns under a new node id replaces its old entry, but not while the old node is online.
        """
        online, now = set(grid.get_node_ids()), time.monotonic()
        self._online = online
        self._asked = {message: sent for message, sent in self._asked.items() if sent[0] in online}
        for node in sorted(self._failed.keys() - online):  # as of a device that starts anew after each error
            self._gone = [f"{self._describe_node(node)}, which is gone: {self._failed.pop(node)[0]}"]
        self._claims.keep(online)
        waiting = {node for node, _ in self._asked.values()}
        waiting |= {node for node, (_, since) in self._failed.items() if now - since < AGAIN_SECONDS}
        if new := online - self._clients.keys() - waiting:
            self._names = {info.node_id: info.name for info in grid.get_nodes()}
        for node in sorted(new):
            query = Message(self.first_content(), dst_node_id=node, message_type=QUERY, ttl=QUERY_SECONDS)
            self._asked |= {message: (node, now) for message in grid.push_messages([query]) if message}
        while self._asked and (replies := list(grid.pull_messages(self._asked.keys()))):
            for reply in replies:
                sent = self._asked.pop(reply.metadata.reply_to_message_id, None)
                if sent is not None:
                    self._take_in(sent[0], reply)

    def first_content(self) -> RecordDict:
        """Return what a message to a node with data of its own says of the run's."""
        return RecordDict({EXPECTED: expected_record(self.expected)} if self.expected is not None else {})

    def incomplete(self) -> bool:
        """Return whether a new node was queried less than GRACE_SECONDS ago and has not answered yet."""
        return any(time.monotonic() - since < GRACE_SECONDS for _, since in self._asked.values())

    def _take_in(self, node: int, reply: Message) -> None:
        try:
            if reply.has_error():
                reason = FLOWERS_REASON.sub(r"\1: \3", str(reply.error.reason))
                if self.packages and any(text in reason for text in LACKING):  # first, because long reasons are cut
                    reason = f"each node needs: pip install {' '.join(self.packages)}; {reason}"
                raise ValueError(f"error {reply.error.code}: {reason}")
            self.query_bytes += content_bytes(reply.content)
            self._clients[node] = self._admit(node, reply)
            self._failed.pop(node, None)
        except UNUSABLE as error:
            reason = printable(reason_of(error))
            if self._failed.get(node, ("",))[0] != reason:
                LOG.warning("%s does not take part: %s", self._describe_node(node), reason)
            self._failed[node] = reason, time.monotonic()

    def _admit(self, node: int, reply: Message) -> int:
        figures: dict[str, Any] = dict(read_figures(reply.content.metric_records["metrics"]))
        info = read_node(reply.content.config_records["node"])
        client, partitions = int(figures["partition-id"]), int(figures["num-partitions"])
        if not self.clients and self.federation not in (0, partitions):
            raise AnswerError(
                f"num-partitions is {partitions}: the first node that connected has {self.federation}; set `clients`, or give "
                "all nodes the same number"
            )
        if client >= (self.clients or partitions):
            raise ValueError(
                f"partition-id {client} is out of range in a run with {self.clients or partitions} clients"
            )
        examples, validation, test = figures["num-examples"], figures["num-validation"], figures.get("num-test", 0)
        measured = {key: float(figures[key]) for key in MEASURED if key in figures}
        counts = examples, validation, test
        member = Member(node, client, info.device, info.software, *counts, measured, bool(figures.get("own-data")))
        self._check_device(member, self.clients or partitions)
        self._check_node(member)
        self.members[client], self.federation = member, partitions
        (self.auto.add if member.device == "auto" else self.auto.discard)(client)
        return client

    def _check_device(self, member: Member, clients: int) -> None:
        """Reject a device that is not in the fleet, of another class than before if those are kept, or device = 'auto' without
        its measurements. Raises ValueError.
        """
        if (before := self.classes.get(member.client, member.device)) != member.device:
            raise AnswerError(
                f"client {member.client} has device = {member.device!r}, and began with {before!r}: in a private run it keeps "
                "its device class"
            )
        if member.device == "auto":
            if missing := [key for key in MEASURED if not member.measured.get(key)]:
                raise ValueError(f"device auto measured no {missing[0]}: {member.measured}")
        else:
            device_state(self.fleet, member.client, clients, self.seed, 1, 1, member.device or None)

    def _check_node(self, member: Member) -> None:
        """Bind a client to the name of its node, if that has one. Raises AnswerError if it is, or may be, another node's."""
        client, node = member.client, member.node_id
        name = self._names.get(node, "")
        if (owner := self.bound.get(client, name)) != name:
            raise AnswerError(f"partition-id {client} belongs to {owner!r}: node {node} is registered as {name!r}")
        if others := [each for each, owner in self.bound.items() if owner == name and each != client]:
            raise AnswerError(f"node {node}, {name!r}, claims partition-id {client}: its own is {others[0]}")
        if rivals := self._claims.add(node, client):
            raise AnswerError(self._refuse(client, node, rivals))
        if name and self.started:
            self.bound[client] = name

    def _refuse(self, client: int, node: int, rivals: list[int]) -> str:
        """Refuse `rivals` too, unless one of them works as this client in a run that has started. Return the reason."""
        holder = self.members.get(client)
        if self.started and holder is not None and holder.node_id in rivals:
            held, other = self._describe_node(holder.node_id), self._describe_node(node)
            self._claims.drop(node)
            return f"partition-id {client} is that of {held}, which is online: {other} needs its own"
        claimants = " and ".join(self._describe_node(each) for each in sorted([node, *rivals]))
        reason = f"partition-id {client} is claimed by {claimants}: none of them takes part until each has its own"
        self.members.pop(client, None)
        self.auto.discard(client)
        for rival in rivals:
            self._clients.pop(rival, None)
            self._failed[rival] = reason, time.monotonic()
        return reason

    def _describe_node(self, node: int) -> str:
        name = self._names.get(node, "")
        return f"node {node} ({name!r})" if name else f"node {node}"

    def unusable(self) -> list[dict[str, int | str]]:
        """Return the nodes whose answer to the query was an error or unusable: each with its name, or '', and the reason."""
        return [
            {"node": node, "name": self._names.get(node, ""), "reason": reason}
            for node, (reason, _) in sorted(self._failed.items())
        ]

    def present(self, grid: Grid) -> list[int]:
        """Return in order the clients that are connected, not busy, and have at least MIN_EXAMPLES training examples."""
        nodes = set(grid.get_node_ids()) - self.busy
        return sorted(c for c, m in self.members.items() if m.node_id in nodes and m.examples >= MIN_EXAMPLES)

    def devices(self) -> dict[str, int]:
        """Return the number of members of each device class."""
        names = (
            member.device or device_of(self.fleet, member.client, self.clients or self.federation, self.seed).name
            for member in self.members.values()
        )
        return dict(sorted(Counter(names).items()))

    def client_of(self, node_id: int) -> int | None:
        """Return the client of a node id, current or former, or None if the node is unknown."""
        return self._clients.get(node_id)

    def busy_clients(self) -> list[int]:
        """Return in order the clients whose nodes have not answered an earlier message."""
        return sorted(client for client, member in self.members.items() if member.node_id in self.busy)

    def state(self, client: int, server_round: int, reference: int, message_bytes: int) -> DeviceState:
        """Return a client's resources in a round: emulated, or as last measured by the device itself.

        `reference` is the bytes of one reference step, of which ratio budgets are fractions. `message_bytes` is the size of a
        message, whose copies must fit a device that measures itself.
        """
        member = self.members.get(client)
        if member is not None and member.device == "auto":
            budget = measured_budget(int(member.measured["memory-available"]), self.memory.reserve, message_bytes)
            flops, disk = member.measured["flops-per-second"], member.measured["disk-bandwidth"]
            return DeviceState("auto", budget, flops, float("inf"), disk, tolerance=self.memory.excess)
        name = member.device if member is not None and member.device else None
        state = device_state(self.fleet, client, self.clients, self.seed, server_round, reference, name)
        return replace(state, tolerance=self.memory.excess)

    def note_free_memory(self, client: int, available: float) -> None:
        """Store the free memory (bytes) that a self-measuring device had before its last task."""
        self.members[client].measured["memory-available"] = available

    def take_query_bytes(self) -> int:
        """Return the bytes of the answers to queries since the last call.

        The queries, which carry what the run expects of nodes' data, are in no count: a resumed run sends them again.
        """
        taken, self.query_bytes = self.query_bytes, 0
        return taken
