"""The clients of `benchmarks.soak`: by a schedule drawn from a seed they come and go, stall, fail and lie."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from flwr.app import Error, Message
from flwr.app.message.message import make_message

from benchmarks.hostile import change
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.training.settings import Settings

SPOILT = ("nan", "inf", "large", "negative", "type", "shape", "words", "cut", "gone", "more")
LIES: Sequence[tuple[str, Any, Any]] = (
    *(("array", 3, kind) for kind in SPOILT),
    ("parcel", 0, ("cut", 100)),
    ("parcel", 0, ("prefix", 2**32 - 1)),
    ("parcel", 1, ("list", "[" * 100_000)),
    ("parcel", 0, ("shape", [2**31, 2**31])),
    ("figure", "num-examples", 10**9),
    ("figure", "train-loss", float("nan")),
    ("figure", "seconds", -1.0),
    ("figure", "own", [0.0] * 10_000),
    ("field", "status", "memory"),
    ("field", "done", '[{"atoms":[0],"copies":1e999}]'),
    ("field", "reason", "\x1b]0;owned\x07" * 1000),
    ("without", "metrics", None),
    ("without", "arrays", None),
    ("without", "outcome", None),
)
ERRORS = (
    Error(2, "ValueError: no reason"),
    Error(8, "its process died"),
    Error(3, "its node is gone"),
    Error(0, "x" * 10**4),
)
OF_1000 = {"error": 20, "lie": 60, "late": 4, "never": 1}  # of 1,000 answers; all others are the clients' own
FORGOTTEN = 50  # rounds after which an answer that never comes is forgotten here; the transport has given it up before
NEVER = sys.maxsize


@dataclass
class Faults:
    """The schedule of a run, drawn from a seed, and how often each fault came."""

    seed: int
    clients: int
    came: Counter[str] = field(default_factory=Counter)

    def of(self, server_round: int, client: int) -> tuple[str, Random]:
        """Return how a client answers in a round, empty for its own answer, and the generator of the details."""
        drawn = Random(f"{self.seed} {server_round} {client}")
        number = drawn.randrange(1000)
        for kind, many in OF_1000.items():
            if number < many:
                return kind, drawn
            number -= many
        return "", drawn

    def away(self, server_round: int) -> set[int]:
        """Return the clients that are not connected in a round: each is away for ten rounds now and then, half at most."""
        drawn = [Random(f"{self.seed} away {server_round // 10} {client}").random() for client in range(self.clients)]
        return {
            client
            for client in sorted(range(self.clients), key=drawn.__getitem__)[: self.clients // 2]
            if drawn[client] < 0.2
        }


class SoakGrid(LocalGrid):
    """Nodes come and go, and some of their answers are replaced. A client that returns has another node id."""

    def __init__(self, settings: Settings, faults: Faults) -> None:
        self.faults, self.round = faults, 1
        self.lives = [0] * faults.clients  # how often each client has returned
        self.gone = set[int]()
        self.asked: dict[str, int] = {}  # the rounds of training messages
        self.held: dict[str, int] = {}  # until which round answers are held back
        self.signal_due: signal.Signals | None = None
        super().__init__(settings.clients, settings.to_run_config(), settings.workers)

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.process.pid for worker in self._workers.values() if worker.process.pid]

    def _feed(self) -> None:
        super()._feed()
        busy = [connection for connection, name in self._busy.items() if name in self.asked]
        if self.signal_due is not None and busy:
            pid = self._workers[busy[0]].process.pid
            assert pid is not None
            os.kill(pid, self.signal_due)
            self.faults.came[self.signal_due.name] += 1
            self.signal_due = None

    def begin(self, server_round: int) -> None:
        """Let the schedule of a round come into force."""
        self.round, before = server_round, self.gone
        self.gone = self.faults.away(server_round)
        for client in before - self.gone:
            self.lives[client] += 1
            self.faults.came["returned"] += 1
        for identifier in [name for name, asked in self.asked.items() if asked < server_round - FORGOTTEN]:
            if identifier in self._done or identifier not in self._order:
                for held in (self.asked, self.held, self._order, self._done):
                    held.pop(identifier, None)
        self.held = {name: until for name, until in self.held.items() if until > server_round}

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are connected."""
        clients = self.faults.clients
        return [FIRST_NODE + each + clients * self.lives[each] for each in range(clients) if each not in self.gone]

    def _wait(self, identifier: str, message: Message) -> None:
        metadata = message.metadata.__dict__
        node, client = metadata["_dst_node_id"], self._client(metadata["_dst_node_id"])
        if message.metadata.message_type == "train":
            self.asked[identifier] = self.round
            kind, drawn = self.faults.of(self.round, client)
            if kind in ("late", "never"):
                self.faults.came[kind] += 1
                self.held[identifier] = self.round + drawn.randint(1, 3) if kind == "late" else NEVER
        metadata["_dst_node_id"] = FIRST_NODE + client  # the worker goes by it
        super()._wait(identifier, message)
        metadata["_dst_node_id"] = node

    def _client(self, node: int) -> int:
        return (node - FIRST_NODE) % self.faults.clients

    def _has(self, identifier: str) -> bool:
        return identifier not in self.held and super()._has(identifier)

    def _give_up(self, identifiers: set[str]) -> None:
        if unanswered := identifiers - self.held.keys():
            self.faults.came["no answer in time"] += len(unanswered)
            super()._give_up(unanswered)

    def _take(self, identifier: str) -> Message:
        metadata, _ = self._order[identifier]
        reply, asked = super()._take(identifier), self.asked.pop(identifier, 0)
        reply.metadata.__dict__["_src_node_id"] = metadata.dst_node_id
        kind, drawn = self.faults.of(asked, self._client(metadata.dst_node_id)) if asked else ("", None)
        if drawn is None or kind not in ("error", "lie"):
            return reply
        self.faults.came[kind] += 1
        if kind == "error":
            return make_message(reply.metadata, error=drawn.choice(ERRORS))
        if not reply.has_error():
            change(reply.content, *drawn.choice(LIES))
        return reply
