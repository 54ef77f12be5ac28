"""Fleets: the devices that a run emulates, which client has which, and what a round takes from it.

Everything is a pure function of (fleet, seed, round, client), so server and clients compute the same without asking.
A fleet is written as TOML and travels in the run configuration as one JSON string with the same keys. Units in a file:
memory in bytes ("64MB", "512KiB", or an integer), flops in FLOPs/s, bandwidth and disk-bandwidth in bytes/s,
disk-latency in seconds an access. A pool is a list of devices that several fleets draw from.
"""

import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from device_profiles.profile import DeviceProfile, DeviceState
from device_profiles.profile import format_bytes as format_bytes  # noqa: PLC0414 - meant to be had from here too
from device_profiles.profile import parse_bytes as parse_bytes  # noqa: PLC0414

SHIPPED = Path(__file__).parent / "fleets"
POOLS = Path(__file__).parent / "pools"

# One stream of random numbers per purpose, so that adding a draw to one does not move the others.
ASSIGNMENT, MEMORY, MEMORY_LOSS, FLOPS_LOSS = 1, 2, 3, 4
# A range of losses may end at 1, and rounding may draw it; a device that stands still would never answer.
SLOWEST = 2.0**-53

Assignment = Literal["blocks", "round-robin", "random", "list", "memories", "uniform"]
# What each assignment needs besides devices, and no other may have.
NEEDS = {"memory-range": "uniform", "clients": "list", "memories": "memories"}


class FleetError(ValueError):
    """A fleet that cannot be found, read or used; it names the file, the key, the value and what is allowed."""


def _ordered(pair: Any) -> Any:
    if pair[0] > pair[1]:
        raise ValueError("the first must not be above the second")
    return pair


def _leaves_something(pair: Any) -> Any:
    if pair[0] == 1:
        raise ValueError("the first must be below 1, or nothing would ever be left")
    return pair


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0), BeforeValidator(parse_bytes)]
Floor = Annotated[int, Field(ge=0), BeforeValidator(parse_bytes)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Left = Annotated[float, Field(gt=0, le=1)]
# Beyond that the rarest device is drawn less than once in 10^10 clients; powers stay finite.
Skew = Annotated[float, Field(ge=-10, le=10)]
Name = Annotated[str, Field(min_length=1)]
# Tuples are not strict because a file has lists; the numbers in them still are.
Range = Annotated[tuple[Bytes, Bytes], Field(strict=False), AfterValidator(_ordered)]
Loss = Annotated[
    tuple[Fraction, Fraction], Field(strict=False), AfterValidator(_ordered), AfterValidator(_leaves_something)
]
Lefts = Annotated[tuple[Left, ...], Field(strict=False, min_length=1)]
Clients = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Memories = Annotated[tuple[Bytes, ...], Field(strict=False, min_length=1)]


class _Table(BaseModel):
    """What a file may hold; the frozen dataclasses are made of it once it is checked."""

    model_config = ConfigDict(strict=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-"))


class _DeviceTable(_Table):
    name: Name
    memory: Bytes | None = None
    memory_ratio: Positive | None = None
    flops: Positive
    bandwidth: Positive | None = None
    disk_bandwidth: Positive
    disk_latency: NotNegative = 0.0
    share: Positive = 1.0
    source: str = ""


class _PooledTable(_Table):
    name: Name
    memory: Bytes
    flops: Positive
    bandwidth: Positive | None = None
    disk_bandwidth: Positive
    disk_latency: NotNegative = 0.0
    source: str = ""


class _DegradationTable(_Table):
    memory: Loss = (0.0, 0.0)
    memory_floor: Floor = 0
    flops: Loss = (0.0, 0.0)
    flops_left: Lefts | None = None


class _PoolTable(_Table):
    description: str = ""
    device: Annotated[list[_PooledTable], Field(min_length=1)]


class _FleetTable(_Table):
    name: Name
    description: str = ""
    assignment: Assignment
    memory_range: Range | None = None
    clients: Clients | None = None
    memories: Memories | None = None
    pool: Name | None = None
    skew: Skew | None = None
    device: Annotated[list[_DeviceTable], Field(min_length=1)] | None = None
    degradation: _DegradationTable = _DegradationTable()


# Tables within tables, for messages about keys that are not known.
INNER: dict[tuple[type[_Table], int | str], type[_Table]] = {
    (_FleetTable, "device"): _DeviceTable,
    (_FleetTable, "degradation"): _DegradationTable,
    (_PoolTable, "device"): _PooledTable,
}
AnyTable = TypeVar("AnyTable", bound=_Table)


@dataclass(frozen=True)
class Fleet:
    """The emulated devices and the rules. `shares` belongs to `devices` (assignment "random"), `clients` names a device
    per client ("list"), `memories` is the bytes of each client ("memories"), `memory_range` (bytes, both ends included)
    is what "uniform" draws from; the one device of the last two carries the largest of them.

    Anew for every client and round, a fraction of memory and of speed within (low, high) is gone; instead of the
    latter, one of `flops_left` may be what is left. Memory never falls below `memory_floor` bytes.
    """

    name: str
    description: str
    assignment: Assignment
    devices: tuple[DeviceProfile, ...]
    shares: tuple[float, ...]
    clients: tuple[str, ...] = ()
    memory_range: tuple[int, int] | None = None
    memory_loss: tuple[float, float] = (0.0, 0.0)
    flops_loss: tuple[float, float] = (0.0, 0.0)
    memories: tuple[int, ...] = ()
    memory_floor: int = 0
    flops_left: tuple[float, ...] = ()

    @property
    def prescribed_clients(self) -> int | None:
        """How many clients a run with this fleet must have; None where any number will do."""
        return len(self.clients) or len(self.memories) or None

    def to_json(self) -> str:
        """The fleet as one compact line of JSON; `load_fleet` gives an equal fleet back.

        Keys that came with later versions are only there where they say something: the JSON is part of a run's
        settings, and those of a run that is resumed must not have changed.
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
            "device": [self._device(*pair) for pair in zip(self.devices, self.shares, strict=True)],
            "degradation": {"memory": self.memory_loss, **floor, **speed},
        }
        return json.dumps(fleet, separators=(",", ":"), allow_nan=False)

    def _device(self, device: DeviceProfile, share: float) -> dict[str, Any]:
        elsewhere = self.memory_range or self.memories
        return {
            "name": device.name,
            "memory": None if elsewhere else device.memory_bytes,
            "memory-ratio": device.memory_ratio,
            "flops": device.flops_per_second,
            "bandwidth": device.bandwidth,
            "disk-bandwidth": device.disk_bandwidth,
            **({"disk-latency": device.disk_latency} if device.disk_latency else {}),
            "share": share,
        }


def shipped_fleets() -> list[str]:
    """The names of the fleets that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def shipped_pools() -> list[str]:
    """The names of the pools of devices that come with the package."""
    return sorted(path.stem for path in POOLS.glob("*.toml"))


def load_fleet(source: str) -> Fleet:
    """The fleet that `source` is: a shipped name, the path of a .toml file, or the JSON of `Fleet.to_json`.

    Raises FleetError.
    """
    if source.lstrip().startswith("{"):
        return _fleet(_table(_FleetTable, lambda: json.loads(source), "fleet JSON"), "fleet JSON", Path())
    path = Path(source)
    if path.suffix != ".toml":
        path = SHIPPED / f"{source}.toml"
        if source not in shipped_fleets():
            known = ", ".join(shipped_fleets())
            raise FleetError(f"unknown fleet {source!r}; there are {known}, or the path of a .toml file")
    return _fleet(_table(_FleetTable, lambda: _toml(path), str(path)), str(path), path.parent)


def _toml(path: Path) -> Any:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _table(kind: type[AnyTable], read: Callable[[], Any], where: str) -> AnyTable:
    """What `read` returns, once its keys are right one by one. Raises FleetError."""
    try:
        return kind.model_validate(read())
    except ValidationError as error:
        raise FleetError("\n".join(f"{where}: {_explain(problem, kind)}" for problem in error.errors())) from None
    except (OSError, ValueError) as error:  # ValueError: broken TOML, JSON or UTF-8; the message has the line
        raise FleetError(f"{where}: {error}") from None


def _explain(problem: ErrorDetails, kind: type[_Table]) -> str:
    """`device 2 flops = -1: input should be greater than 0`; tables and list entries are counted from 1."""
    loc = problem["loc"]
    place = " ".join(str(part + 1) if isinstance(part, int) else part for part in loc)
    if problem["type"] == "missing":
        return f"{place} is missing"
    if problem["type"] == "extra_forbidden":
        table = INNER[kind, loc[0]] if len(loc) > 1 else kind
        allowed = ", ".join(str(field.alias) for field in table.model_fields.values())
        return f"{place}: unknown key; allowed are {allowed}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place} = {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _fleet(table: _FleetTable, where: str, folder: Path) -> Fleet:
    """The frozen fleet of a table. A pool's path is relative to `folder`. Raises FleetError."""
    rows, rule = _rows(table, where, folder), table.degradation
    _check(table, rows, where)
    largest = max(table.memory_range or table.memories or (0,)) or None
    return Fleet(
        name=table.name,
        description=table.description,
        assignment=table.assignment,
        devices=tuple(_profile(row, largest) for row in rows),
        shares=tuple(row.share for row in rows),
        clients=table.clients or (),
        memory_range=table.memory_range,
        memory_loss=rule.memory,
        flops_loss=rule.flops,
        memories=table.memories or (),
        memory_floor=rule.memory_floor,
        flops_left=rule.flops_left or (),
    )


def _check(table: _FleetTable, rows: list[_DeviceTable], where: str) -> None:
    """Whether keys that are right one by one agree with each other. Raises FleetError."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise FleetError(f"{where}: {message}")

    names = [row.name for row in rows]
    need(len(set(names)) == len(names), f"device names = {names}: each must be there once")
    for key, assignment in NEEDS.items():
        given = getattr(table, key.replace("-", "_")) is not None
        need(
            given == (table.assignment == assignment),
            f'{key} belongs to assignment = "{assignment}", which needs it',
        )
    unknown = sorted(set(table.clients or ()) - set(names))
    need(not unknown, f"clients names {unknown}; the devices are {names}")
    elsewhere = {"uniform": "memory-range", "memories": "memories"}.get(table.assignment)
    need(not elsewhere or len(names) == 1, f'assignment = "{table.assignment}" takes one device, not {len(names)}')
    wanted = f"memory comes from {elsewhere}; neither" if elsewhere else "exactly one"
    for number, row in enumerate(rows, 1):
        count = (row.memory is not None) + (row.memory_ratio is not None)
        message = f"device {number}: {wanted} of memory and memory-ratio is to be set, not {count}"
        need(count == (not elsewhere), message)
    both = table.degradation.flops_left is not None and "flops" in table.degradation.model_fields_set
    need(not both, "degradation flops and flops-left are two rules for the same; give one of them")


def _rows(table: _FleetTable, where: str, folder: Path) -> list[_DeviceTable]:
    """The devices, given or from a pool. Raises FleetError."""
    if (table.pool is None) == (table.device is None):
        raise FleetError(f"{where}: give either pool or [[device]] tables, not both and not neither")
    if table.skew is not None and (table.pool is None or table.assignment != "random"):
        raise FleetError(f'{where}: skew = {table.skew} belongs to a pool with assignment = "random"')
    return table.device or _pool(str(table.pool), table.skew or 0.0, where, folder)


def _profile(row: _DeviceTable, largest: int | None) -> DeviceProfile:
    memory = row.memory or largest
    return DeviceProfile(
        row.name, memory, row.memory_ratio, row.flops, row.bandwidth, row.disk_bandwidth, row.disk_latency
    )


def _pool(name: str, skew: float, where: str, folder: Path) -> list[_DeviceTable]:
    """The devices of a pool, their shares proportional to (flops x memory)^skew: 0 = all alike, below 0 = mostly weak."""
    path = folder / name if name.endswith(".toml") else POOLS / f"{name}.toml"
    if not name.endswith(".toml") and name not in shipped_pools():
        known = ", ".join(shipped_pools())
        raise FleetError(f"{where}: pool = {name!r}: there are {known}, or the path of a .toml file")
    devices = _table(_PoolTable, lambda: _toml(path), str(path)).device
    strength = [device.flops * device.memory for device in devices]
    # Of the strongest: only the proportions matter, and large powers of large numbers would overflow.
    shares = [(s / max(strength)) ** skew for s in strength]
    return [
        _DeviceTable.model_validate(device.model_dump(by_alias=True) | {"share": share})
        for device, share in zip(devices, shares, strict=True)
    ]


def _rng(seed: int, round: int, client: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, round, client, purpose]))


def device_of(fleet: Fleet, client: int, clients: int, seed: int) -> DeviceProfile:
    """The device of client `client` (from 0) of `clients`; the same in every round.

    Raises FleetError when there is no such client, or the fleet lists another number of clients.
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
        edges = np.cumsum(fleet.shares)
        drawn = _rng(seed, 0, client, ASSIGNMENT).random() * edges[-1]
        return fleet.devices[int(np.searchsorted(edges, drawn, side="right"))]
    assert fleet.memory_range is not None
    memory = _rng(seed, 0, client, MEMORY).integers(*fleet.memory_range, endpoint=True)
    return replace(fleet.devices[0], memory_bytes=int(memory))


def named_device(fleet: Fleet, name: str) -> DeviceProfile:
    """The device of this name. Raises FleetError, listing those there are."""
    for device in fleet.devices:
        if device.name == name:
            return device
    raise FleetError(f"fleet {fleet.name!r} has no device {name!r}; it has {', '.join(device_classes(fleet))}")


def device_state(
    fleet: Fleet, client: int, clients: int, seed: int, round: int, reference_bytes: int, name: str | None = None
) -> DeviceState:
    """What client `client` has in round `round`, after this round's degradation.

    `reference_bytes` is the memory of one reference step, which ratio budgets are taken of; `name` overrides the fleet's
    assignment. Raises FleetError as `device_of` does, ValueError when a ratio is asked of a reference that is not positive.
    """
    device = named_device(fleet, name) if name else device_of(fleet, client, clients, seed)
    memory_loss = _rng(seed, round, client, MEMORY_LOSS).uniform(*fleet.memory_loss)
    budget = device.budget(reference_bytes, memory_loss)
    if fleet.memory_floor:  # what is lost, not what the device never had
        budget = max(budget, min(fleet.memory_floor, device.budget(reference_bytes)))
    speed = device.flops_per_second * _flops_left(fleet, _rng(seed, round, client, FLOPS_LOSS))
    link = math.inf if device.bandwidth is None else device.bandwidth
    return DeviceState(device.name, budget, speed, link, device.disk_bandwidth, device.disk_latency)


def _flops_left(fleet: Fleet, rng: np.random.Generator) -> float:
    """The fraction of its speed that a device has in a round; never 0."""
    if fleet.flops_left:
        return fleet.flops_left[int(rng.random() * len(fleet.flops_left))]
    return float(max(1 - rng.uniform(*fleet.flops_loss), SLOWEST))


def budgets(fleet: Fleet, clients: int, seed: int, reference_bytes: int) -> list[int]:
    """Bytes of every client's device before any degradation, in client order."""
    return [device_of(fleet, client, clients, seed).budget(reference_bytes) for client in range(clients)]


def device_classes(fleet: Fleet) -> list[str]:
    """The names of the fleet's devices, in file order."""
    return [device.name for device in fleet.devices]
