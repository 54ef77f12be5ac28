"""The devices of fleets, and of this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from device_profiles.fleet import load_fleet, shipped_fleets
from device_profiles.profile import format_bytes, measure_device


def fleet_rows(name: str) -> list[dict[str, Any]]:
    """The devices of a fleet, or of every shipped one. Raises FleetError."""
    fleets = [load_fleet(name)] if name else [load_fleet(shipped) for shipped in shipped_fleets()]
    return [
        {"fleet": fleet.name, "assignment": fleet.assignment, **asdict(device)}
        for fleet in fleets
        for device in fleet.devices
    ]


def measured_here() -> list[dict[str, Any]]:
    """The figures of this machine, as a device with `device = auto` finds them."""
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


def fleet_table(rows: list[dict[str, Any]]) -> Table:
    """Devices for people."""
    names = ("fleet", "assignment", "device", "memory", "FLOP/s", "network", "disk")
    table = Table(*names, box=None, pad_edge=False)
    for row in rows:
        ratio = row["memory_ratio"]
        most = "up to " if row["assignment"] in ("uniform", "memories") else ""
        memory = most + format_bytes(row["memory_bytes"]) if ratio is None else f"{ratio:.2f} x reference step"
        network = f"{format_bytes(int(row['bandwidth']))}/s" if row["bandwidth"] else "-"
        disk = f"{format_bytes(int(row['disk_bandwidth']))}/s"
        table.add_row(
            row["fleet"], row["assignment"], row["name"], memory, f"{row['flops_per_second']:.2g}", network, disk
        )
    return table
