"""Fleets: the emulated devices of a run, their assignment to clients, and the degradation of each round.

Everything is a pure function of (fleet, seed, round, client), so server and clients compute the same values without messages. A
fleet is written as TOML (fleet_file.py reads it). The run configuration carries it as one JSON string with the same keys.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from piecework.device_profiles.fleet_file import Assignment, FleetError, profile_of, read_fleet
from piecework.device_profiles.profile import DeviceProfile, DeviceState, is_unlimited

# Each purpose has its own stream of random numbers, so that a new draw in one does not change the others.
ASSIGNMENT, MEMORY, MEMORY_LOSS, FLOPS_LOSS = 1, 2, 3, 4
# A range of losses may end at 1, and rounding may draw 1; a device of speed 0 would never answer.
SLOWEST = 2.0**-53


@dataclass(frozen=True)
class Fleet:
    """The emulated devices and how clients get them.

    `weights` are those of `devices` in draws (assignment "random"). `clients` names a device per client ("list").
    `memories` are the bytes of each client ("memories"). `memory_range` (bytes, both ends included) is the range of
    "uniform". The last two assignments have one device, with the largest of these memories.

    Every client loses in every round fractions of its memory and its speed, drawn from (low, high). If `flops_left` is given,
    one of its values is drawn instead as the remaining fraction of the speed. Degradation never takes memory below
    `memory_floor` bytes.
    """

    name: str
    description: str
    assignment: Assignment
    devices: tuple[DeviceProfile, ...]
    weights: tuple[float, ...]
    clients: tuple[str, ...] = ()
    memory_range: tuple[int, int] | None = None
    memory_loss: tuple[float, float] = (0.0, 0.0)
    flops_loss: tuple[float, float] = (0.0, 0.0)
    memories: tuple[int, ...] = ()
    memory_floor: int = 0
    flops_left: tuple[float, ...] = ()

    @property
    def prescribed_clients(self) -> int | None:
        """The number of clients that a run with this fleet must have; None for any."""
        return len(self.clients) or len(self.memories) or None

    def to_json(self) -> str:
        """Return the fleet as one compact line of JSON, which `load_fleet` reads back as an equal fleet.

        Keys of later versions are present only if they are set: the JSON is part of a run's settings, and those of a resumed
        run must not change.
        """
        speed = {"flops-left": self.flops_left} if self.flops_left else {"flops": self.flops_loss}
        floor = {"memory-floor": self.memory_floor} if self.memory_floor else {}
        fleet = {
            "name": self.name,
            "description": self.description,
            "assignment": self.assignment,
            "memory-range": self.memory_range,
            "clients": self.clients or None,
            **({"memories": self.memories} if self.memories else {}),
            "device": [self._device(*pair) for pair in zip(self.devices, self.weights, strict=True)],
            "degradation": {"memory": self.memory_loss, **floor, **speed},
        }
        return json.dumps(fleet, separators=(",", ":"), allow_nan=False)

    def _device(self, device: DeviceProfile, weight: float) -> dict[str, Any]:
        elsewhere = self.memory_range or self.memories
        return {
            "name": device.name,
            "memory": None if elsewhere else write_memory(device.memory_bytes),
            "memory-ratio": device.memory_ratio,
            "flops": device.flops_per_second,
            "bandwidth": device.bandwidth,
            "disk-bandwidth": device.disk_bandwidth,
            **({"disk-write-bandwidth": device.disk_write_bandwidth} if device.disk_write_bandwidth else {}),
            **({"disk-latency": device.disk_latency} if device.disk_latency else {}),
            **({} if device.disk_write_latency is None else {"disk-write-latency": device.disk_write_latency}),
            **({"cpus": device.cpus} if device.cpus else {}),
            **({"keep": device.keep} if device.keep else {}),
            "weight": weight,
        }


def write_memory(memory: int | None) -> int | str | None:
    """Return a device's memory as a fleet's JSON has it."""
    return "unlimited" if memory is not None and is_unlimited(memory) else memory


def load_fleet(source: str) -> Fleet:
    """Load the fleet `source`: a shipped name, the path of a .toml file, or the JSON of `Fleet.to_json`.

    Raises FleetError.
    """
    table, rows = read_fleet(source)
    policy, largest = table.degradation, max(table.memory_range or table.memories or (0,)) or None
    return Fleet(
        name=table.name,
        description=table.description,
        assignment=table.assignment,
        devices=tuple(profile_of(row, largest) for row in rows),
        weights=tuple(row.weight for row in rows),
        clients=table.clients or (),
        memory_range=table.memory_range,
        memory_loss=policy.memory,
        flops_loss=policy.flops,
        memories=table.memories or (),
        memory_floor=policy.memory_floor,
        flops_left=policy.flops_left or (),
    )


def _rng(seed: int, round: int, client: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, round, client, purpose]))


def device_of(fleet: Fleet, client: int, clients: int, seed: int) -> DeviceProfile:
    """Return the device of client `client` (from 0) of `clients`, which is the same in every round.

    Raises FleetError if there is no such client, or if the fleet lists another number of clients.
    """
    if not 0 <= client < clients:
        raise FleetError(f"fleet {fleet.name!r}: there is no client {client}; {clients} clients are numbered from 0")
    if fleet.prescribed_clients not in (None, clients):
        listed = fleet.prescribed_clients
        raise FleetError(f"fleet {fleet.name!r} lists {listed} clients, the run has {clients}; make them equal")
    count = len(fleet.devices)
    if fleet.assignment == "blocks":
        return fleet.devices[count * client // clients]
    if fleet.assignment == "round-robin":
        return fleet.devices[client % count]
    if fleet.assignment == "list":
        return next(device for device in fleet.devices if device.name == fleet.clients[client])
    if fleet.assignment == "memories":
        return replace(fleet.devices[0], memory_bytes=fleet.memories[client])
    if fleet.assignment == "random":
        edges = np.cumsum(fleet.weights)
        drawn = _rng(seed, 0, client, ASSIGNMENT).random() * edges[-1]
        return fleet.devices[int(np.searchsorted(edges, drawn, side="right"))]
    assert fleet.memory_range is not None
    memory = _rng(seed, 0, client, MEMORY).integers(*fleet.memory_range, endpoint=True)
    return replace(fleet.devices[0], memory_bytes=int(memory))


def find_device(fleet: Fleet, name: str) -> DeviceProfile:
    """Return the device of this name. Raises FleetError, which lists the existing names."""
    for device in fleet.devices:
        if device.name == name:
            return device
    raise FleetError(f"fleet {fleet.name!r} has no device {name!r}; it has {', '.join(device_classes(fleet))}")


def device_state(
    fleet: Fleet, client: int, clients: int, seed: int, round: int, reference_bytes: int, name: str | None = None
) -> DeviceState:
    """Return what client `client` has in round `round`, after this round's degradation.

    `reference_bytes` is the memory of one reference step, of which ratio budgets are fractions. `name` overrides the fleet's
    assignment. Raises FleetError as `device_of` does, and ValueError for a ratio of a reference that is not positive.
    """
    device = find_device(fleet, name) if name else device_of(fleet, client, clients, seed)
    memory_loss = _loss(fleet.memory_loss, seed, round, client, MEMORY_LOSS)
    budget = device.budget(reference_bytes, memory_loss)
    if fleet.memory_floor:  # the floor limits losses; it does not add memory
        budget = max(budget, min(fleet.memory_floor, device.budget(reference_bytes)))
    speed = device.flops_per_second * _flops_left(fleet, seed, round, client)
    link = math.inf if device.bandwidth is None else device.bandwidth
    return DeviceState(
        device.name,
        budget,
        speed,
        link,
        device.disk_bandwidth,
        device.disk_latency,
        device.keep,
        disk_write_bandwidth=device.disk_write_bandwidth,
        disk_write_latency=device.disk_write_latency,
    )


def _loss(limits: tuple[float, float], seed: int, round: int, client: int, purpose: int) -> float:
    """Return the fraction that a device loses in a round. Most fleets lose none, and to draw it takes 0.1 ms."""
    low, high = limits
    return float(low if low == high else _rng(seed, round, client, purpose).uniform(low, high))


def _flops_left(fleet: Fleet, seed: int, round: int, client: int) -> float:
    """Return the fraction of its speed that a device has in a round; never 0."""
    if fleet.flops_left:
        drawn = _rng(seed, round, client, FLOPS_LOSS).random()
        return fleet.flops_left[int(drawn * len(fleet.flops_left))]
    return max(1 - _loss(fleet.flops_loss, seed, round, client, FLOPS_LOSS), SLOWEST)


def device_classes(fleet: Fleet) -> list[str]:
    """List the names of the fleet's devices in file order."""
    return [device.name for device in fleet.devices]
