"""How long each client took for its latest tasks, and how long the answer to the next one is awaited.

Of each client's last KEPT tasks i are known: the seconds s_i in which it trained and T_i in all, its work w_i (FLOPs), and the
bytes b_i that were sent for it. A task of work w and of b bytes is predicted to take

  P(w, b) = max_i [s_i max(1, w / w_i) + (T_i - s_i) max(1, b / b_i)]

and its answer is awaited for min(`messages.round-timeout`, max(`faults.deadline-floor`, `faults.deadline-factor` P)) seconds.
Less work is never predicted to take less time, because what a task costs beside its work (the start of a process) is unknown.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KEPT = 3  # tasks of each client
UNKNOWN = "auto"  # of devices with this name no one is like another


class Load(NamedTuple):
    """What a task asks of a client: FLOPs of training, 0 for a message that asks for none, and bytes that are sent."""

    work: float
    bytes: int


class Done(NamedTuple):
    """A task that a client did: the seconds of its training and of all until its answer was there, and its load."""

    training: float
    total: float
    work: float
    bytes: int


def predict_seconds(tasks: Iterable[Done], load: Load) -> float | None:
    """Return the seconds that a task will take after these (P in the module's head), or None after none."""
    return max((_as_in(done, load) for done in tasks), default=None)


def _as_in(done: Done, load: Load) -> float:
    training = done.training * _growth(load.work, done.work) if load.work else 0.0
    return training + (done.total - done.training) * _growth(load.bytes, done.bytes)


def _growth(now: float, then: float) -> float:
    return max(1.0, now / then) if then else 1.0


def before_deadlines(clients: int, least: int) -> int:
    """Return how many of so many clients must have answered before others may be too late: half of them, and `least`.

    A client that is much faster than others, or says so, would else train alone.
    """
    return max(least, math.ceil(clients / 2))


def deadline_message(deadline: float) -> str:
    """Return why a client is late whose answer was awaited for `deadline` seconds."""
    return f"no answer within its deadline of {deadline:.4g} s (faults.deadline-factor)"


@dataclass
class Pace:
    """The latest tasks of each client, and the deadlines that follow from them.

    `factor` and `floor` (seconds) are those of the settings, and `longest` is the seconds after which no answer is awaited any
    more. A client without a task takes as long as the slowest client of its device class, if two of these are known, because
    one may be an exception, or lie; devices that measure themselves have no class. If nothing is known, its answer is awaited
    for `longest`.
    """

    factor: float
    floor: float
    longest: float
    tasks: dict[int, list[Done]] = field(default_factory=dict)
    devices: dict[int, str] = field(default_factory=dict)

    def note(self, client: int, device: str, done: Done) -> None:
        """Note a task that a client did. Its training cannot have taken longer than all of it, whatever the client says."""
        done = done._replace(training=min(done.training, done.total))
        self.tasks[client] = [*self.tasks.get(client, []), done][-KEPT:]
        self.devices[client] = device

    def deadline(self, client: int, device: str, load: Load) -> float:
        """Return the seconds for which the answer to a task is awaited; `longest` without `faults.deadline-factor`."""
        if not self.factor:
            return self.longest
        found = predict_seconds(self.tasks.get(client, []) or self._of_class(device), load)
        return self.longest if found is None else min(self.longest, max(self.floor, self.factor * found))

    def _of_class(self, device: str) -> list[Done]:
        alike = [client for client, name in self.devices.items() if name == device != UNKNOWN]
        return [done for client in alike for done in self.tasks[client]] if len(alike) > 1 else []

    def to_values(self) -> dict[str, Any]:
        """Return the tasks by client as JSON values."""
        return {
            str(client): {"device": self.devices[client], "tasks": [list(done) for done in tasks]}
            for client, tasks in self.tasks.items()
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take over the tasks of `to_values`."""
        for client, known in values.items():
            self.tasks[int(client)] = [Done(*done) for done in known["tasks"]]
            self.devices[int(client)] = known["device"]
