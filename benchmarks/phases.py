"""How long the head of a Ray cluster is in each phase of a run, and which node has which client when; for other benchmarks.

A phase's seconds are its own: what it calls of another phase counts there. The head is one thread, so they add up to the run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

from piecework.engines.cluster.grid import RayGrid
from piecework.engines.cluster.shared_arrays import SharedArrays
from piecework.federation import dispatcher, reply_guard, reports
from piecework.server_app import rounds
from piecework.strategies.server import MethodServer

SEND, SHARE, RECEIVE, CHECK, ADD, EVALUATE, WRITE, REST, WAIT = PHASES = (
    *("send", "share", "receive", "check", "add", "evaluate", "write", "rest", "wait"),
)
STEPS: tuple[tuple[Any, str, str], ...] = (
    (reply_guard.ReplyGuard, "push_messages", SEND),
    (RayGrid, "_feed", SEND),
    (SharedArrays, "put", SHARE),
    (RayGrid, "_collect", WAIT),
    (RayGrid, "_settle", RECEIVE),
    (RayGrid, "_take", RECEIVE),
    (reports.ClientReport, "take", RECEIVE),
    (dispatcher.Dispatcher, "read", CHECK),
    (MethodServer, "aggregate_train", ADD),
    (rounds.Run, "_evaluate", EVALUATE),
    (rounds.Run, "_checkpoint", WRITE),
)


class Call(NamedTuple):
    """A client that a node had: the seconds when the head gave it to the node, and when the head had the answer."""

    node: str
    client: int
    began: float
    ended: float


@dataclass
class Watched:
    """A round: its bounds in seconds, the head's seconds in each phase and of the processor, and the calls of training."""

    began: float
    processor: float
    ended: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    calls: list[Call] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """The head's seconds without waiting."""
        return self.ended - self.began - self.seconds[WAIT]


class Watch:
    """Keeps the time. `rounds` are those that ended; a round lasts until the next one begins."""

    def __init__(self) -> None:
        self.rounds: list[Watched] = []
        self._now = Watched(time.perf_counter(), time.process_time())
        self._begun: dict[str, tuple[str, int, float]] = {}
        self._stack, self._since = [REST], time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens here as a phase."""
        self._count()
        self._stack.append(name)
        try:
            yield
        finally:
            self._count()
            self._stack.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        self._now.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def turn(self) -> None:
        """A round begins, or the last one has ended."""
        self._count()
        self._now.ended, self._now.processor = self._since, time.process_time() - self._now.processor
        self.rounds.append(self._now)
        self._now = Watched(self._since, time.process_time())

    def give(self, identifier: str, node: str, client: int, began: float) -> None:
        """A node got a client's task at this time."""
        self._begun[identifier] = node, client, began

    def got(self, identifier: str) -> None:
        """The head has the answer."""
        self._now.calls.append(Call(*self._begun.pop(identifier), time.perf_counter()))


@contextmanager
def watching() -> Iterator[Watch]:
    """Watch the runs of this process. `rounds` begin with what came before the first."""
    watch = Watch()
    with ExitStack() as stack:
        for owner, name, phase in STEPS:
            stack.enter_context(patch.object(owner, name, timed(watch, phase, getattr(owner, name))))
        built, begin, settle = dispatcher.Dispatcher._messages, RayGrid._begin, RayGrid._settle

        def messages(*arguments: Any) -> Iterator[Any]:
            left = built(*arguments)
            while True:
                with watch.phase(SEND):
                    message = next(left, None)
                if message is None:
                    return
                yield message

        def give(grid: Any, want: Any, node: Any, worker: str) -> None:
            began = time.perf_counter()
            begin(grid, want, node, worker)
            if grid._begun[want.identifier].trains:
                watch.give(want.identifier, node.name, want.client, began)

        def got(grid: Any, reference: Any) -> None:
            identifier = grid._calls[reference].identifier
            settle(grid, reference)
            if identifier in watch._begun:
                watch.got(identifier)

        stack.enter_context(patch.object(dispatcher.Dispatcher, "_messages", messages))
        stack.enter_context(patch.object(RayGrid, "_begin", give))
        stack.enter_context(patch.object(RayGrid, "_settle", got))
        for name in ("one_round", "finalize"):
            stack.enter_context(patch.object(rounds.Run, name, turning(watch, getattr(rounds.Run, name))))
        yield watch


def timed(watch: Watch, phase: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its time counted as a phase."""

    def run(*arguments: Any, **options: Any) -> Any:
        with watch.phase(phase):
            return step(*arguments, **options)

    return run


def turning(watch: Watch, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, before which a round ends."""

    def run(*arguments: Any) -> Any:
        watch.turn()
        return step(*arguments)

    return run
