"""Find, read and check the files of fleets and of pools, before a `Fleet` is made.

Units in a file: memory in bytes ("64MB", "512KiB", an integer, or "unlimited"), flops in FLOPs/s, bandwidth, disk-bandwidth and
disk-write-bandwidth in bytes/s, disk-latency and disk-write-latency in seconds per access, cpus in cores of the device's
container. A disk without keys for writing writes as fast as it reads. `keep` is optional: the model fraction that scaling
methods assign to the device; by default the largest that fits. A pool is a list of devices for several fleets.

A file may lie in an installed package: my_package/my_fleet.toml.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from piecework.device_profiles.documents import SHOWN, abbreviate, read_json, read_toml
from piecework.device_profiles.names import did_you_mean
from piecework.device_profiles.profile import UNLIMITED, DeviceProfile, parse_bytes, parse_memory

SHIPPED = Path(__file__).parent / "fleets"
POOLS = Path(__file__).parent / "pools"

Assignment = Literal["blocks", "round-robin", "random", "list", "memories", "uniform"]
# The key that each assignment requires besides devices, and that no other assignment may have.
NEEDS = {"memory-range": "uniform", "clients": "list", "memories": "memories"}


class FleetError(ValueError):
    """A fleet cannot be found, read or used. The message names the file, the key, the value and what is allowed."""


def _require_ascending(pair: Any) -> Any:
    if pair[0] > pair[1]:
        raise ValueError("the first must not be above the second")
    return pair


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("a name has no control characters")
    return name


def _bound_figure(figure: float) -> float:
    """Bound a figure, so that the times that are computed from it are finite."""
    if figure and not 1e-6 <= figure <= 1e24:
        raise ValueError("a figure must be from 1e-06 to 1e+24")
    return figure


def _bound_weight(weight: float) -> float:
    """Bound a weight, so that the sum of a fleet's weights is finite."""
    if not 1e-100 <= weight <= 1e100:
        raise ValueError("a weight must be from 1e-100 to 1e+100")
    return weight


def _bound_share(left: float) -> float:
    """Bound what is left, so that the times that are divided by it are finite."""
    if left < 1e-6:
        raise ValueError("a fraction must be from 1e-06 to 1")
    return left


def _leaves_something(pair: Any) -> Any:
    if pair[0] == 1:
        raise ValueError("the first must be below 1, or nothing would ever be left")
    return pair


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_bound_figure)]
# The weights of a pool are powers of its devices' strength, so the bounds are wide; sums of weights stay finite.
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_bound_weight)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_bound_figure)]
Bytes = Annotated[int, Field(gt=0, le=UNLIMITED), BeforeValidator(parse_bytes)]
Memory = Annotated[int, Field(gt=0, le=UNLIMITED), BeforeValidator(parse_memory)]
Floor = Annotated[int, Field(ge=0, le=UNLIMITED), BeforeValidator(parse_bytes)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Left = Annotated[float, Field(gt=0, le=1), AfterValidator(_bound_share)]
# Beyond this the rarest device is drawn less than once in 10^10 clients; powers stay finite.
Skew = Annotated[float, Field(ge=-10, le=10)]
Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
# Tuples are not strict because a file has lists; the numbers in them still are.
Range = Annotated[tuple[Bytes, Bytes], Field(strict=False), AfterValidator(_require_ascending)]
Loss = Annotated[
    tuple[Fraction, Fraction],
    Field(strict=False),
    AfterValidator(_require_ascending),
    AfterValidator(_leaves_something),
]
Lefts = Annotated[tuple[Left, ...], Field(strict=False, min_length=1)]
Clients = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Memories = Annotated[tuple[Bytes, ...], Field(strict=False, min_length=1)]


class _Table(BaseModel):
    """The allowed keys of a file, from which the frozen dataclasses are made once they are checked."""

    model_config = ConfigDict(strict=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-"))


class DeviceTable(_Table):
    name: Name
    memory: Memory | None = None
    memory_ratio: Positive | None = None
    flops: Positive
    bandwidth: Positive | None = None
    disk_bandwidth: Positive
    disk_write_bandwidth: Positive | None = None
    disk_latency: NotNegative = 0.0
    disk_write_latency: NotNegative | None = None
    cpus: Positive | None = None
    keep: Left | None = None
    weight: Weight = 1.0
    source: str = ""


class _PooledTable(_Table):
    name: Name
    memory: Bytes
    flops: Positive
    bandwidth: Positive | None = None
    disk_bandwidth: Positive
    disk_write_bandwidth: Positive | None = None
    disk_latency: NotNegative = 0.0
    disk_write_latency: NotNegative | None = None
    cpus: Positive | None = None
    source: str = ""


class _DegradationTable(_Table):
    memory: Loss = (0.0, 0.0)
    memory_floor: Floor = 0
    flops: Loss = (0.0, 0.0)
    flops_left: Lefts | None = None


class _PoolTable(_Table):
    description: str = ""
    device: Annotated[list[_PooledTable], Field(min_length=1)]


class FleetTable(_Table):
    name: Name
    description: str = ""
    assignment: Assignment
    memory_range: Range | None = None
    clients: Clients | None = None
    memories: Memories | None = None
    pool: Name | None = None
    skew: Skew | None = None
    device: Annotated[list[DeviceTable], Field(min_length=1)] | None = None
    degradation: _DegradationTable = _DegradationTable()


# Nested tables, for messages about unknown keys.
INNER: dict[tuple[type[_Table], int | str], type[_Table]] = {
    (FleetTable, "device"): DeviceTable,
    (FleetTable, "degradation"): _DegradationTable,
    (_PoolTable, "device"): _PooledTable,
}
# What messages say instead of pydantic's type names.
EXPECTED = {"model_type": "a table", "list_type": "a list", "tuple_type": "a list"}
AnyTable = TypeVar("AnyTable", bound=_Table)


def shipped_fleets() -> list[str]:
    """List the names of the shipped fleets."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def shipped_pools() -> list[str]:
    """List the names of the shipped pools of devices."""
    return sorted(path.stem for path in POOLS.glob("*.toml"))


def read_fleet(source: str) -> tuple[FleetTable, list[DeviceTable]]:
    """Read and check a shipped name, a .toml file or the JSON of a fleet; return it with its devices. Raises FleetError."""
    if source.lstrip().startswith("{"):
        return _check_table(_table(FleetTable, lambda: read_json(source), "fleet JSON"), "fleet JSON", Path())
    path = Path(source)
    known = f"there are {', '.join(shipped_fleets())}, or the path of a .toml file"
    if path.suffix != ".toml":
        path = SHIPPED / f"{source}.toml"
        if source not in shipped_fleets():
            raise FleetError(f"unknown fleet {abbreviate(source)}; {known}{did_you_mean(source, shipped_fleets())}")
    elif not path.is_file():
        path = _in_package(path) or path
        if not path.exists():
            raise FleetError(f"there is no file {source[:200]} (looked for from {Path.cwd()}); {known}")
    return _check_table(_table(FleetTable, lambda: _toml(path), str(path)), str(path), path.parent)


def _in_package(path: Path) -> Path | None:
    """Return the file of an installed package, which my_package/my_fleet.toml names wherever the package lies."""
    package, *rest = path.parts
    try:
        spec = find_spec(package) if rest and package.isidentifier() else None
    except ValueError:  # a module that was made and not found, such as __main__
        spec = None
    places = spec.submodule_search_locations if spec is not None else None
    found = [Path(place, *rest) for place in places or ()]
    return next((file for file in found if file.is_file()), None)


def profile_of(row: DeviceTable, memory: int | None = None) -> DeviceProfile:
    """Return the device of a table; `memory` (bytes) is for a device with neither memory nor a ratio."""
    return DeviceProfile(
        row.name,
        row.memory or memory,
        row.memory_ratio,
        row.flops,
        row.bandwidth,
        row.disk_bandwidth,
        row.disk_latency,
        row.cpus,
        row.keep,
        row.disk_write_bandwidth,
        row.disk_write_latency,
    )


def pool_devices(name: str) -> list[DeviceProfile]:
    """Return the devices of a shipped pool. Raises FleetError."""
    path = POOLS / f"{name}.toml"
    return [profile_of(row) for row in _pool(path, 0.0, str(path))]


def _toml(path: Path) -> Any:
    return read_toml(path.read_text(encoding="utf-8"))


def _table(kind: type[AnyTable], read: Callable[[], Any], where: str) -> AnyTable:
    """Return what `read` returns, after its keys were checked one by one. Raises FleetError."""
    try:
        return kind.model_validate(read())
    except ValidationError as error:
        problems = error.errors()
        messages = [f"{where}: {_explain(problem, kind)}" for problem in problems if not _follows(problem, problems)]
        raise FleetError("\n".join(messages)) from None
    except (OSError, ValueError) as error:  # ValueError: broken TOML, JSON or UTF-8; the message has the line
        raise FleetError(f"{where}: {error}") from None


def _follows(problem: ErrorDetails, problems: list[ErrorDetails]) -> bool:
    """Return whether a problem follows from others: pydantic also calls a list too short if its entries are wrong."""
    loc = problem["loc"]
    inside = (other["loc"] for other in problems if len(other["loc"]) > len(loc))
    return problem["type"] == "too_short" and any(other[: len(loc)] == loc for other in inside)


def _explain(problem: ErrorDetails, kind: type[_Table]) -> str:
    """Explain a problem: `device 2 flops = -1: input should be greater than 0`. Tables and entries count from 1."""
    loc = problem["loc"]
    place = " ".join(str(part + 1) if isinstance(part, int) else part for part in loc)[:SHOWN]
    if problem["type"] == "missing":
        return f"{place} is missing"
    if problem["type"] == "extra_forbidden":
        table = INNER[kind, loc[0]] if len(loc) > 1 else kind
        allowed = ", ".join(str(field.alias) for field in table.model_fields.values())
        return f"{place}: unknown key; allowed are {allowed}"
    if problem["type"] in EXPECTED:
        devices = loc == ("device",)
        expected = "a table for each device, headed [[device]]" if devices else EXPECTED[problem["type"]]
        return f"{place} = {abbreviate(problem['input'])}: expected {expected}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place} = {abbreviate(problem['input'])}: {message[0].lower()}{message[1:]}"


def _check_table(table: FleetTable, where: str, folder: Path) -> tuple[FleetTable, list[DeviceTable]]:
    """Return the table and its devices. A pool's path is relative to `folder`. Raises FleetError."""
    rows = _rows(table, where, folder)
    _check(table, rows, where)
    return table, rows


def _check(table: FleetTable, rows: list[DeviceTable], where: str) -> None:
    """Check that valid keys agree with each other. Raises FleetError."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise FleetError(f"{where}: {message}")

    names = [row.name for row in rows]
    _each_once(names, where)
    for key, assignment in NEEDS.items():
        given = getattr(table, key.replace("-", "_")) is not None
        require(
            given == (table.assignment == assignment),
            f'{key} belongs to assignment = "{assignment}", which needs it',
        )
    unknown = sorted(set(table.clients or ()) - set(names))
    require(not unknown, f"clients names {abbreviate(unknown)}; the devices are {abbreviate(names)}")
    elsewhere = {"uniform": "memory-range", "memories": "memories"}.get(table.assignment)
    require(not elsewhere or len(names) == 1, f'assignment = "{table.assignment}" takes one device, not {len(names)}')
    wanted = f"memory comes from {elsewhere}; neither" if elsewhere else "exactly one"
    for number, row in enumerate(rows, 1):
        count = (row.memory is not None) + (row.memory_ratio is not None)
        message = f"device {number}: {wanted} of memory and memory-ratio is to be set, not {count}"
        require(count == (not elsewhere), message)
    both = table.degradation.flops_left is not None and "flops" in table.degradation.model_fields_set
    require(not both, "degradation flops and flops-left both describe lost speed; give one of them")


def _each_once(names: list[str], where: str) -> None:
    if len(set(names)) < len(names):
        raise FleetError(f"{where}: device names = {abbreviate(names)}: each must be unique")


def _rows(table: FleetTable, where: str, folder: Path) -> list[DeviceTable]:
    """Return the devices, given or from a pool. Raises FleetError."""
    if (table.pool is None) == (table.device is None):
        raise FleetError(f"{where}: give exactly one of pool and [[device]] tables")
    if table.skew is not None and (table.pool is None or table.assignment != "random"):
        raise FleetError(f'{where}: skew = {table.skew} belongs to a pool with assignment = "random"')
    if table.device is not None:
        return table.device
    where = f"{where}: pool = {table.pool!r}"
    path = _find_pool(str(table.pool), where, folder)
    return _pool(path, table.skew or 0.0, f"{where}: {path}")


def _find_pool(name: str, where: str, folder: Path) -> Path:
    """Return the file of a pool, a path relative to `folder` or a shipped name. Raises FleetError."""
    path = folder / name if name.endswith(".toml") else POOLS / f"{name}.toml"
    if not name.endswith(".toml") and name not in shipped_pools():
        known = ", ".join(shipped_pools())
        raise FleetError(f"{where}: there are {known}, or the path of a .toml file")
    if not path.is_file():
        raise FleetError(f"{where}: no such file as {path}")
    return path


def _pool(path: Path, skew: float, where: str) -> list[DeviceTable]:
    """Return the devices of a pool, drawn with weights (flops x memory)^skew: 0 = equal, below 0 = mostly weak."""
    devices = _table(_PoolTable, lambda: _toml(path), where).device
    _each_once([device.name for device in devices], where)
    strength = [device.flops * device.memory for device in devices]
    # Divided by the strongest: only the proportions matter, and large powers of large numbers would overflow.
    try:
        weights = [_bound_weight((s / max(strength)) ** skew) for s in strength]
    except (OverflowError, ValueError):
        raise FleetError(f"{where}: skew = {skew} gives some devices weights outside 1e-100 to 1e100") from None
    return [
        DeviceTable.model_validate(device.model_dump(by_alias=True) | {"weight": weight})
        for device, weight in zip(devices, weights, strict=True)
    ]
