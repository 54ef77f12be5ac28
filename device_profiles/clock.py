"""The emulated clock: how long a client's task would take on its device, and a round on its slowest client.

Data access is FedProphet's (Tang et al.; `training_latency` in the authors' code). Work that fits into a client's memory
reads its input. Work that does not is swapped: features go out after the forward pass and come back for the backward
pass, parameters go both ways in both, the optimiser's values both ways once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from piecework.device_profiles.profile import DeviceState

FLOAT = 4  # bytes; features and parameters are counted in single precision


@dataclass(frozen=True)
class Batch:
    """What training on one mini-batch takes. `features` are the values that the backward pass needs, of the whole batch.

    flops: of everything, attack steps included, 2 per multiply-accumulate. The authors charge 2 x (1 + attack steps) x
        the multiply-accumulates of a forward pass, a third of that.
    optimizer_scale: values kept per parameter, itself and its gradient included: 2 for SGD, 3 with momentum, 5 for Adam.
    """

    flops: float
    input_bytes: int
    parameters: int
    features: int
    attack_steps: int = 0
    optimizer_scale: int = 3

    @property
    def pass_bytes(self) -> int:
        """Memory of a forward pass, or of an attack step: features and parameters."""
        return FLOAT * (self.features + self.parameters)

    @property
    def training_bytes(self) -> int:
        """Memory of the training step: features, parameters, gradients, the optimiser's values."""
        return FLOAT * (self.features + self.optimizer_scale * self.parameters)


def batch_access_seconds(state: DeviceState, batch: Batch) -> float:
    """Seconds for reading a batch, or for swapping its training step; each attack step that does not fit swaps too."""
    memory = max(state.budget_bytes, 1)  # a round may leave a device next to nothing, but never an endless task
    passes = ceil(batch.pass_bytes / memory)
    swapped = FLOAT * (2 * batch.features + 4 * batch.parameters)
    seconds = _disk_seconds(state, batch.input_bytes, 1)
    if batch.training_bytes > memory:
        optimizer = FLOAT * 2 * (batch.optimizer_scale - 2) * batch.parameters
        seconds = _disk_seconds(state, swapped + optimizer, passes + ceil(batch.training_bytes / memory))
    if batch.pass_bytes > memory:
        seconds += batch.attack_steps * _disk_seconds(state, swapped, 2 * passes)
    return seconds


def task_seconds(state: DeviceState, batches: Sequence[Batch], bytes_down: int = 0, bytes_up: int = 0) -> float:
    """Seconds of a client's task: the link (bytes down and up), then batch by batch access and computing.

    Parameters are read once, with the first batch, unless that one is swapped. Raises ValueError for a negative amount.
    """
    seconds = simulated_seconds(state, sum(batch.flops for batch in batches), bytes_down, bytes_up)
    seconds += sum(batch_access_seconds(state, batch) for batch in batches)
    if batches and batches[0].training_bytes <= state.budget_bytes:
        seconds += _disk_seconds(state, FLOAT * batches[0].parameters, 0)
    return seconds


def simulated_seconds(
    state: DeviceState, flops: float, bytes_down: int, bytes_up: int, disk_bytes: int = 0, accesses: int = 0
) -> float:
    """Seconds of a task whose steps all fit into memory, from its totals: receiving `bytes_down`, computing `flops` (2 per
    multiply-accumulate), moving `disk_bytes` to and from the disk in `accesses` accesses, and sending `bytes_up`, one
    after another: a small board overlaps little; the sum is an upper bound.

    Raises ValueError for a negative amount.
    """
    if min(flops, bytes_down, bytes_up, disk_bytes, accesses) < 0:
        raise ValueError(
            f"amounts of work must not be negative: flops {flops}, down {bytes_down}, up {bytes_up}, disk {disk_bytes}, "
            f"accesses {accesses}"
        )
    network = (bytes_down + bytes_up) / state.bandwidth  # 0 for an infinite one: the link is not modelled
    return network + flops / state.flops_per_second + _disk_seconds(state, disk_bytes, accesses)


def _disk_seconds(state: DeviceState, amount: float, accesses: int) -> float:
    return amount / state.disk_bandwidth + accesses * state.disk_latency


def round_seconds(client_seconds: Iterable[float]) -> float:
    """Seconds of a round in which clients work side by side: those of the slowest; 0 without clients."""
    return max(client_seconds, default=0.0)
