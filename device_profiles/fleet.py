"""Fleets: the devices that a run emulates, which client has which, and what a round takes from it.

Everything is a pure function of (fleet, seed, round, client), so server and clients compute the same without asking.
A fleet is written as TOML and travels in the run configuration as one JSON string with the same keys. Units in a file:
memory in bytes ("64MB", "512KiB", or an integer), flops in FLOPs/s, bandwidth and disk-bandwidth in bytes/s.
"""

import json
import tomllib
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from device_profiles.profile import DeviceProfile, DeviceState
from device_profiles.profile import format_bytes as format_bytes  # noqa: PLC0414 - meant to be had from here too
from device_profiles.profile import parse_bytes as parse_bytes  # noqa: PLC0414

SHIPPED = Path(__file__).parent / "fleets"

DEVICE_KEYS = ("name", "memory", "memory-ratio", "flops", "bandwidth", "disk-bandwidth", "share")
# One stream of random numbers per purpose, so that adding a draw to one does not move the others.
ASSIGNMENT, MEMORY, MEMORY_LOSS, FLOPS_LOSS = 1, 2, 3, 4

Assignment = Literal["blocks", "round-robin", "random", "list", "uniform"]


class FleetError(ValueError):
    """A fleet that cannot be found, read or used; it names the file, the key, the value and what is allowed."""


def _ordered(pair: Any) -> Any:
    if pair[0] > pair[1]:
        raise ValueError("the first must not be above the second")
    return pair


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0), BeforeValidator(parse_bytes)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
# Tuples are not strict because a file has lists; the numbers in them still are.
Range = Annotated[tuple[Bytes, Bytes], Field(strict=False), AfterValidator(_ordered)]
Loss = Annotated[tuple[Fraction, Fraction], Field(strict=False), AfterValidator(_ordered)]
Clients = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class _Table(BaseModel):
    """What a fleet file may hold; the frozen dataclasses are made of it once it is checked."""

    model_config = ConfigDict(strict=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-"))


class _DeviceTable(_Table):
    name: Name
    memory: Bytes | None = None
    memory_ratio: Positive | None = None
    flops: Positive
    bandwidth: Positive
    disk_bandwidth: Positive
    share: Positive = 1.0


class _DegradationTable(_Table):
    memory: Loss = (0.0, 0.0)
    flops: Loss = (0.0, 0.0)


class _FleetTable(_Table):
    name: Name
    description: str = ""
    assignment: Assignment
    memory_range: Range | None = None
    clients: Clients | None = None
    device: Annotated[list[_DeviceTable], Field(min_length=1)]
    degradation: _DegradationTable = _DegradationTable()


@dataclass(frozen=True)
class Fleet:
    """The emulated devices and the rules. `shares` belongs to `devices` (assignment "random"), `clients` names a device
    per client ("list"), `memory_range` (bytes, both ends included) is what "uniform" draws from: the one device of such
    a fleet carries the upper end. Losses are (low, high) fractions drawn anew for every client and round.
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

    def to_json(self) -> str:
        """The fleet as one compact line of JSON; `load_fleet` gives an equal fleet back."""
        no_memory = {"memory": None} if self.memory_range else {}
        fleet = {
            "name": self.name,
            "description": self.description,
            "assignment": self.assignment,
            "memory-range": self.memory_range,
            "clients": self.clients or None,
            "device": [
                dict(zip(DEVICE_KEYS, (*astuple(device), share), strict=True)) | no_memory
                for device, share in zip(self.devices, self.shares, strict=True)
            ],
            "degradation": {"memory": self.memory_loss, "flops": self.flops_loss},
        }
        return json.dumps(fleet, separators=(",", ":"))


def shipped_fleets() -> list[str]:
    """The names of the fleets that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_fleet(source: str) -> Fleet:
    """The fleet that `source` is: a shipped name, the path of a .toml file, or the JSON of `Fleet.to_json`.

    Raises FleetError.
    """
    if source.lstrip().startswith("{"):
        return _fleet(lambda: json.loads(source), "fleet JSON")
    path = Path(source)
    if path.suffix != ".toml":
        path = SHIPPED / f"{source}.toml"
        if source not in shipped_fleets():
            known = ", ".join(shipped_fleets())
            raise FleetError(f"unknown fleet {source!r}; there are {known}, or the path of a .toml file")
    return _fleet(lambda: tomllib.loads(path.read_text(encoding="utf-8")), str(path))


def _explain(problem: ErrorDetails) -> str:
    """`device 2 flops = -1: input should be greater than 0`; tables and list entries are counted from 1."""
    loc = problem["loc"]
    place = " ".join(str(part + 1) if isinstance(part, int) else part for part in loc)
    if problem["type"] == "missing":
        return f"{place} is missing"
    if problem["type"] == "extra_forbidden":
        inner: dict[int | str, type[_Table]] = {"device": _DeviceTable, "degradation": _DegradationTable}
        table = inner[loc[0]] if len(loc) > 1 else _FleetTable
        allowed = ", ".join(str(field.alias) for field in table.model_fields.values())
        return f"{place}: unknown key; allowed are {allowed}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place} = {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _fleet(read: Callable[[], Any], where: str) -> Fleet:
    """The frozen fleet of what `read` returns, once the keys are right one by one and agree with each other."""
    try:
        table = _FleetTable.model_validate(read())
    except ValidationError as error:
        raise FleetError("\n".join(f"{where}: {_explain(problem)}" for problem in error.errors())) from None
    except (OSError, ValueError) as error:  # ValueError: broken TOML, JSON or UTF-8; the message has the line
        raise FleetError(f"{where}: {error}") from None

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise FleetError(f"{where}: {message}")

    names = [device.name for device in table.device]
    uniform = table.assignment == "uniform"
    need(len(set(names)) == len(names), f"device names = {names}: each must be there once")
    need(uniform == (table.memory_range is not None), 'memory-range belongs to assignment = "uniform", which needs it')
    listed = table.assignment == "list"
    need(listed == (table.clients is not None), 'clients belongs to assignment = "list", which needs it')
    unknown = sorted(set(table.clients or ()) - set(names))
    need(not unknown, f"clients names {unknown}; the devices are {names}")
    need(not uniform or len(names) == 1, f'assignment = "uniform" takes one device, not {len(names)}')
    largest = table.memory_range[1] if table.memory_range else None
    devices = []
    for number, d in enumerate(table.device, 1):
        given = (d.memory is not None) + (d.memory_ratio is not None)
        wanted = "memory comes from memory-range; neither" if uniform else "exactly one"
        need(given == (not uniform), f"device {number}: {wanted} of memory and memory-ratio is to be set, not {given}")
        memory = d.memory or largest
        devices.append(DeviceProfile(d.name, memory, d.memory_ratio, d.flops, d.bandwidth, d.disk_bandwidth))
    return Fleet(
        name=table.name,
        description=table.description,
        assignment=table.assignment,
        devices=tuple(devices),
        shares=tuple(device.share for device in table.device),
        clients=table.clients or (),
        memory_range=table.memory_range,
        memory_loss=table.degradation.memory,
        flops_loss=table.degradation.flops,
    )


def _rng(seed: int, round: int, client: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, round, client, purpose]))


def device_of(fleet: Fleet, client: int, clients: int, seed: int) -> DeviceProfile:
    """The device of client `client` (from 0) of `clients`; the same in every round.

    Raises FleetError when there is no such client, or the fleet lists another number of clients.
    """
    if not 0 <= client < clients:
        raise FleetError(f"fleet {fleet.name!r}: there is no client {client}; {clients} clients are numbered from 0")
    count = len(fleet.devices)
    if fleet.assignment == "blocks":
        return fleet.devices[count * client // clients]
    if fleet.assignment == "round-robin":
        return fleet.devices[client % count]
    if fleet.assignment == "list":
        if len(fleet.clients) != clients:
            listed = len(fleet.clients)
            raise FleetError(f"fleet {fleet.name!r} lists {listed} clients, the run has {clients}; make them equal")
        return next(device for device in fleet.devices if device.name == fleet.clients[client])
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
    flops_loss = _rng(seed, round, client, FLOPS_LOSS).uniform(*fleet.flops_loss)
    budget = device.budget(reference_bytes, memory_loss)
    speed = device.flops_per_second * (1 - flops_loss)
    return DeviceState(device.name, budget, speed, device.bandwidth, device.disk_bandwidth)


def budgets(fleet: Fleet, clients: int, seed: int, reference_bytes: int) -> list[int]:
    """Bytes of every client's device before any degradation, in client order."""
    return [device_of(fleet, client, clients, seed).budget(reference_bytes) for client in range(clients)]


def device_classes(fleet: Fleet) -> list[str]:
    """The names of the fleet's devices, in file order."""
    return [device.name for device in fleet.devices]
