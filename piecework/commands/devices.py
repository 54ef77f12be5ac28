"""List the devices of fleets and of pools, and of this machine."""

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.fleet_file import FleetError, pool_devices, shipped_fleets, shipped_pools
from piecework.device_profiles.names import did_you_mean
from piecework.device_profiles.profile import format_bytes, measure_device
from piecework.device_profiles.units import format_flops
from piecework.training.settings import Settings

# The prefix of a pool's name where a fleet's name could be.
POOL = "pool:"
COLUMNS = ("device", "memory", "speed", "network", "disk")


def fleet_rows(name: str) -> list[dict[str, Any]]:
    """List the devices of a fleet or a pool, or of every shipped one.

    A name that both have means the fleet; `pool:NAME` means the pool. Raises FleetError.
    """
    fleets, pools = shipped_fleets(), shipped_pools()
    if not name:
        return [row for fleet in fleets for row in _of_fleet(fleet)] + [row for pool in pools for row in _of_pool(pool)]
    if name in fleets or name.endswith(".toml") or name.lstrip().startswith("{"):
        return _of_fleet(name)
    if name.removeprefix(POOL) in pools:
        return _of_pool(name.removeprefix(POOL))
    raise FleetError(
        f"unknown fleet or pool {name!r}; there are the fleets {', '.join(fleets)}, the pools {', '.join(pools)}, "
        f"or the path of a .toml file of a fleet{did_you_mean(name, [*fleets, *pools])}"
    )


def _of_fleet(name: str) -> list[dict[str, Any]]:
    fleet = load_fleet(name)
    return [{"fleet": fleet.name, "assignment": fleet.assignment, **asdict(device)} for device in fleet.devices]


def _of_pool(name: str) -> list[dict[str, Any]]:
    return [{"fleet": f"{POOL}{name}", "assignment": "-", **asdict(device)} for device in pool_devices(name)]


def measure_here() -> list[dict[str, Any]]:
    """Return the figures of this machine, as a device with `device = auto` measures them."""
    import torch  # lists of devices need none

    torch.set_num_threads(Settings().training.torch_threads)
    measured = measure_device(Path.cwd())
    return [
        {
            "fleet": "-",
            "assignment": "-",
            "name": "this machine",
            "memory_bytes": measured.memory_available_bytes,
            "memory_ratio": None,
            "flops_per_second": measured.flops_per_second,
            "bandwidth": None,
            "disk_bandwidth": measured.disk_bandwidth,
            "disk_latency": None,
        }
    ]


def fleet_tables(rows: list[dict[str, Any]]) -> Group:
    """Return one table per fleet, which fits a terminal of 80 columns."""
    by_fleet = {title: list(of) for title, of in groupby(rows, lambda row: (row["fleet"], row["assignment"]))}
    cells = {title: [device_cells(row) for row in of] for title, of in by_fleet.items()}
    widths = [
        max(map(len, column)) for column in zip(COLUMNS, *(line for of in cells.values() for line in of), strict=True)
    ]
    shown: list[Table | Text] = []
    for (fleet, assignment), lines in cells.items():
        if fleet != "-":
            shown.append(Text(fleet if assignment == "-" else f"{fleet} (assignment: {assignment})", style="bold"))
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name, width in zip(COLUMNS, widths, strict=True):
            table.add_column(name, min_width=width)
        for line in lines:
            table.add_row(*map(Text, line))
        shown += [table, Text()]
    if any(row["memory_ratio"] is not None for row in rows):
        shown.append(
            Text("x step: times the memory of a reference step, a FedAvg step of the whole model", style="dim")
        )
    return Group(*shown)


def device_cells(row: dict[str, Any]) -> list[str]:
    """Return the `COLUMNS` of a device."""
    ratio = row["memory_ratio"]
    maximum = "up to " if row["assignment"] in ("uniform", "memories") else ""
    memory = maximum + format_bytes(row["memory_bytes"]) if ratio is None else f"{ratio_text(ratio)} x step"
    network = f"{format_bytes(int(row['bandwidth']))}/s" if row["bandwidth"] else "-"
    disk = f"{format_bytes(int(row['disk_bandwidth']))}/s"
    if (written := row.get("disk_write_bandwidth")) and written != row["disk_bandwidth"]:
        disk += f", writes {format_bytes(int(written))}/s"
    return [row["name"], memory, f"{format_flops(row['flops_per_second'])}/s", network, disk]


def ratio_text(ratio: float) -> str:
    """Return a ratio with two decimals, or with more if two are not all: 0.004 is not nothing, and 0.9999 not a step."""
    return f"{ratio:.2f}" if round(ratio, 2) == ratio else f"{ratio:.4g}"
