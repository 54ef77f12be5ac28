"""What a run does at this moment: the phase of the round, and how many of the clients that it asked have answered.

The server says it to whoever shows the run in its process (planning/now.py), and writes it to `now.json` in the run's folder,
for those that look on from another process. The file is a hint and no record: it may be lost, and it is gone when the run ends.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from piecework.device_profiles.documents import read_json
from piecework.federation.reports import ClientReport
from piecework.planning.now import doing
from piecework.planning.timing import round_flops
from piecework.strategies.server import MethodServer

FILE = "now.json"
SAY_EVERY, WRITE_EVERY = 0.1, 0.5  # seconds: a round of emulated clients may bring hundreds of answers in one
RECENT = 5  # rounds whose median is the expected duration of a phase
AWAITED = "timeout"  # the status of a client that has not answered
LOG = logging.getLogger("piecework")
Message = TypeVar("Message")


@dataclass(frozen=True)
class Moment:
    """What a run does now.

    `since` is when the phase began, and `written` when this was written, in seconds of Unix time. `slowest` is the device that
    is predicted to take the longest of those that have not answered. `seconds_left` are those of the phase when this was
    written: negative if it takes longer than was expected, None if unknown. Before the first round and after the last `round`
    is 0.
    """

    round: int
    rounds: int
    phase: str
    asked: int = 0
    done: int = 0
    failed: int = 0
    slowest: str = ""
    since: float = 0.0
    written: float = 0.0
    seconds_left: float | None = None

    def text(self) -> str:
        """Return the moment in words: what is done, and how much of it."""
        count = f" {self.done}/{self.asked}" if self.asked else ""
        failed = f" ({self.failed} failed)" if self.failed else ""
        return f"round {self.round}: {self.phase}{count}{failed}" if self.round else f"{self.phase}{count}{failed}"

    def details(self, now: float | None = None) -> str:
        """Return what is left of the phase, and which device takes the longest; empty if nothing is known.

        `now` is the present, in Unix time: nothing may have been written for long.
        """
        said = []
        if self.seconds_left is not None:
            passed = (time.time() if now is None else now) - self.written  # negative if the clock was set back
            left = self.seconds_left - max(0.0, passed)
            due = "should end now" if left > -1 else f"is late by {math.floor(-left)} s"
            said.append(f"{self.phase} {f'ends in {math.ceil(left)} s' if left > 0 else due}")
        return "  ".join(said + ([f"slowest: {self.slowest}"] if self.slowest else []))


def read_moment(folder: Path) -> Moment | None:
    """Return what the run in a folder does now; None if it does not say, or if what it says cannot be read."""
    try:
        found = read_json((folder / FILE).read_text(encoding="utf-8"))
        return Moment(**found) if isinstance(found.get("round"), int) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def tell(moment: Moment) -> None:
    """Tell whoever shows the run in this process what it does."""
    doing("%s", moment.text(), details=moment.details)


class Moments:
    """Tells what a run does. `rounds` is how many it has, and `folder` is the run's.

    `parallel` says that all clients work at once.
    """

    def __init__(self, folder: Path, rounds: int, server: MethodServer, *, parallel: bool) -> None:
        self.path, self.rounds, self.server, self.parallel = folder / FILE, rounds, server, parallel
        self.round, self.phase, self.since = 0, "", time.time()
        self.durations: dict[str, list[float]] = {}
        # On the monotonic clock: the other one may be set back by hours while the run goes on.
        self.began, self.said, self.written, self.writable = time.monotonic(), -math.inf, -math.inf, True

    def begin(self, phase: str, server_round: int = 0) -> None:
        """Say that a phase begins. The one before it has ended."""
        now, began = time.time(), time.monotonic()
        if self.round:
            self.durations.setdefault(self.phase, []).append(began - self.began)
        self.round, self.phase, self.since, self.began = server_round, phase, now, began
        self._say(Moment(server_round, self.rounds, phase, since=now, written=now))

    def follow(self, replies: Iterator[Message]) -> Iterator[Message]:
        """Yield the replies to the tasks of the phase, and say how many have come. Closing it closes `replies`."""
        predicted, log = predict_seconds(self.server), self.server.dispatcher.log
        if log:
            self._count(predicted)
        for came, reply in enumerate(replies, start=1):
            yield reply
            if came == len(log) or time.monotonic() - self.said > SAY_EVERY:
                self._count(predicted)

    def _count(self, predicted: Mapping[int, float]) -> None:
        elapsed, log = time.monotonic() - self.began, self.server.dispatcher.log
        awaited = [client for client, report in log.items() if report.status == AWAITED]
        done = len(log) - len(awaited)
        failed = sum(report.status not in (AWAITED, "ok") for report in log.values())
        slowest = max(awaited, key=lambda client: (predicted.get(client, 0.0), -client), default=None)
        moment = Moment(
            self.round,
            self.rounds,
            self.phase,
            len(log),
            done,
            failed,
            "" if slowest is None else self._name(slowest, log[slowest]),
            self.since,
            time.time(),
            seconds_left(self.durations.get(self.phase, []), elapsed, done, len(awaited), parallel=self.parallel),
        )
        self._say(moment)

    def _name(self, client: int, report: ClientReport) -> str:
        assigned = self.server.round.assigned.get(client)
        device = report.device or (assigned.device.device if assigned is not None else "")
        return f"{device} (client {client})" if device else f"client {client}"

    def _say(self, moment: Moment) -> None:
        tell(moment)
        now = self.said = time.monotonic()
        if not self.writable or (now - self.written < WRITE_EVERY and moment.done not in (0, moment.asked)):
            return
        self.written = now
        temporary = self.path.with_name(f"{FILE}.tmp")
        try:
            temporary.write_text(json.dumps(asdict(moment)), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            self.writable = False
            LOG.warning("%s cannot be written (%s): the run goes on without it", self.path, error)

    def end(self) -> None:
        """Say nothing more."""
        if self.writable:
            self.path.unlink(missing_ok=True)


def seconds_left(before: Sequence[float], elapsed: float, done: int, awaited: int, *, parallel: bool) -> float | None:
    """Return the seconds that a phase will go on, `elapsed` seconds after it began; None if that is unknown.

    They are negative if it has already taken longer than was expected. `before` are its durations in earlier rounds. Without
    any the clients that are `done` tell how long those that are still `awaited` take, unless they all work at once
    (`parallel`).
    """
    if not awaited:
        return None
    if before:
        return median(before[-RECENT:]) - elapsed
    return None if parallel or not done else elapsed / done * awaited


def predict_seconds(server: MethodServer) -> dict[int, float]:
    """Return the seconds for which each client is predicted to compute, from the FLOPs of its task and its device's speed."""
    return {client: _seconds(server, client, task) for client, task in server.dispatcher.tasks.items()}


def _seconds(server: MethodServer, client: int, task: Any) -> float:
    assigned, cut = server.round.assigned.get(client), server.method.cut
    if assigned is None or client not in server.registry.members:
        return 0.0
    cost_model = cut.cost_model if task.adversarial else cut.cost_model.unattacked
    # norms are measured in the served model, which a method may not train, in a forward pass that takes little time
    listed = [item for item in assigned.assignment.items if task.needed_bytes(item) is not None and not item.measured]
    parts = [cut.part(task.fit_item(item, assigned.device.allowed_bytes)) for item in listed]
    examples = server.registry.members[client].examples
    return round_flops(server.settings, cost_model, parts, examples) / assigned.device.flops_per_second
