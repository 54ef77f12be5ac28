"""The emulated clock: how long a client's task would take on its device, and a round on its slowest client.

Data access follows FedProphet (Tang et al.; `training_latency` in the authors' code). Work that fits into a client's memory
reads its input. Work that does not fit is swapped: features are written after the forward pass and read for the backward pass,
parameters are read and written in both passes, and optimiser values once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from piecework.device_profiles.profile import DeviceState

FLOAT = 4  # bytes; features and parameters are counted in single precision


@dataclass(frozen=True)
class Batch:
    """The cost of training on one mini-batch.

    `features` is the number of values that the backward pass needs, for the whole batch. `flops` counts everything, including
    attack steps, at 2 per multiply-accumulate; the authors charge 2 x (1 + attack steps) x the multiply-accumulates of a
    forward pass, a third of that. `optimizer_scale` is the number of values kept per parameter, including itself and its
    gradient: 2 for SGD, 3 with momentum, 5 for Adam.
    """

    flops: float
    input_bytes: int
    parameters: int
    features: int
    attack_steps: int = 0
    optimizer_scale: int = 3

    @property
    def pass_bytes(self) -> int:
        """Bytes of a forward pass or of an attack step: features and parameters."""
        return FLOAT * (self.features + self.parameters)

    @property
    def training_bytes(self) -> int:
        """Bytes of a training step: features, parameters, gradients and optimiser values."""
        return FLOAT * (self.features + self.optimizer_scale * self.parameters)


def batch_access_seconds(state: DeviceState, batch: Batch) -> float:
    """Return the seconds to read a batch, or to swap its training step; each attack step that does not fit is swapped too."""
    memory = max(state.budget_bytes, 1)  # a round may leave a device almost nothing, but no task may be endless
    passes = ceil(batch.pass_bytes / memory)
    swapped = FLOAT * (2 * batch.features + 4 * batch.parameters)
    seconds = _disk_seconds(state, batch.input_bytes, 1)
    if batch.training_bytes > memory:
        optimizer = FLOAT * 2 * (batch.optimizer_scale - 2) * batch.parameters
        seconds = _swap_seconds(state, swapped + optimizer, passes + ceil(batch.training_bytes / memory))
    if batch.pass_bytes > memory:
        seconds += batch.attack_steps * _swap_seconds(state, swapped, 2 * passes)
    return seconds


def task_seconds(
    state: DeviceState, batches: Sequence[Batch], bytes_down: int = 0, bytes_up: int = 0, times: int = 1
) -> float:
    """Return the seconds of a client's task: the network (bytes down and up), then data access and computing, batch by batch.

    Each batch comes `times` times. Parameters are read once, with the first batch, unless that batch is swapped. Raises
    ValueError for a negative amount.
    """
    seconds = simulated_seconds(state, times * sum(batch.flops for batch in batches), bytes_down, bytes_up)
    seconds += times * sum(batch_access_seconds(state, batch) for batch in batches)
    if batches and batches[0].training_bytes <= state.budget_bytes:
        seconds += _disk_seconds(state, FLOAT * batches[0].parameters, 0)
    return seconds


def simulated_seconds(
    state: DeviceState,
    flops: float,
    bytes_down: int,
    bytes_up: int,
    disk_bytes: int = 0,
    accesses: int = 0,
    disk_written: int = 0,
    writes: int = 0,
) -> float:
    """Return the seconds of a task whose steps all fit into memory, computed from its totals.

    The task receives `bytes_down`, computes `flops` (2 per multiply-accumulate), reads `disk_bytes` from the disk and writes
    `disk_written` to it in `accesses` accesses, of which `writes` write, and sends `bytes_up`. The times are added, which is an
    upper bound, because a small board overlaps little. Raises ValueError for a negative amount.
    """
    if min(flops, bytes_down, bytes_up, disk_bytes, accesses, disk_written, writes) < 0:
        raise ValueError(
            f"amounts of work must not be negative: flops {flops}, down {bytes_down}, up {bytes_up}, disk {disk_bytes}, "
            f"accesses {accesses}, written {disk_written}, writes {writes}"
        )
    network = (bytes_down + bytes_up) / state.bandwidth  # 0 if infinite: the network is not modelled
    written = disk_written / state.write_bandwidth + writes * state.write_latency
    return network + flops / state.flops_per_second + _disk_seconds(state, disk_bytes, accesses - writes) + written


def _disk_seconds(state: DeviceState, amount: float, accesses: float) -> float:
    return amount / state.disk_bandwidth + accesses * state.disk_latency


def _swap_seconds(state: DeviceState, amount: float, accesses: int) -> float:
    """Return the seconds in which `amount` bytes are swapped: all that is written is read again, and the other way round."""
    half, times = amount / 2, accesses / 2
    writing = half / state.write_bandwidth + times * state.write_latency
    return _disk_seconds(state, half, times) + writing


def round_seconds(client_seconds: Iterable[float]) -> float:
    """Return the seconds of a round in which clients work in parallel: those of the slowest, or 0 without clients."""
    return max(client_seconds, default=0.0)


class Closing(NamedTuple):
    """How a round ends: the clients whose answers count, the quickest first, and its seconds."""

    counted: list[int]
    seconds: float


def closing(answers: Mapping[int, float], deadlines: Mapping[int, float], enough: int = 0, least: int = 1) -> Closing:
    """Return how a round ends whose clients answer after so many seconds, each of them awaited until its deadline.

    A client without a deadline is awaited until it answers. Deadlines are in force once `least` clients have answered. The
    round ends at once with `enough` answers (0 = of all).
    """
    counted, there = list[int](), math.inf
    for client in sorted(answers, key=lambda each: (answers[each], each)):
        if answers[client] > deadlines.get(client, math.inf) and len(counted) >= least:
            continue
        counted.append(client)
        there = answers[client] if len(counted) == least else there
        if len(counted) == enough:
            return Closing(counted, answers[client])
    return Closing(
        counted, round_seconds(seconds_awaited(s, deadlines.get(c, math.inf), there) for c, s in answers.items())
    )


def seconds_awaited(answer: float, deadline: float, there: float) -> float:
    """Return the seconds for which a client is awaited that answers after `answer`; enough answers are there after `there`."""
    return min(answer, max(deadline, there))


@dataclass
class Stragglers:
    """Clients that still do the task of a closed round, on the simulated clock.

    `tasks` are JSON values: each has the `client`, the `round` of its task, and the seconds `left` until it answers. `done` is
    what becomes known of its device when it has answered.
    """

    tasks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, client: int, server_round: int, left: float, done: Sequence[str | float] = ()) -> None:
        """Add a client that answers `left` seconds after its round was closed."""
        self.tasks.append({"client": client, "round": server_round, "left": left, "done": list(done)})

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        for task in self.tasks:
            task["left"] -= seconds

    def until_next(self) -> float:
        """Return the seconds until one of them answers, or 0 if none is at work."""
        return min((task["left"] for task in self.tasks if task["left"] > 0), default=0.0)

    def take_answered(self) -> list[dict[str, Any]]:
        """Remove and return those that have answered, the first first; `left` says how long ago."""
        done = sorted((t for t in self.tasks if t["left"] <= 0), key=lambda task: (task["left"], task["client"]))
        self.tasks = [task for task in self.tasks if task["left"] > 0]
        return done

    @property
    def clients(self) -> set[int]:
        """The clients that are still at work."""
        return {task["client"] for task in self.tasks if task["left"] > 0}
