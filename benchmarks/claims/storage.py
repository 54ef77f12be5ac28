"""The simulated time of a run on SD cards, eMMC and NVMe, from its records: what a client trains does not depend on its disk.

A client's recorded time is the sum of its network, its computing and its disk (device_profiles/clock.py). Bytes and FLOPs
are recorded, and the fleet has the device's speeds, so the rest is the disk's. Without a time for each access that part
is inversely proportional to the disk's bandwidth. Of steps that read ahead (`memory.fit` with pages) the rest is only what they
wait for the disk: on a quicker disk than the recorded one the result is too long, by 2.5 % at most for the devices of claims.
On a slower one it would be too short, so the fleets of claims whose steps page have SD cards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecework.device_profiles.clock import round_seconds
from piecework.device_profiles.fleet import Fleet, device_state
from piecework.device_profiles.profile import DeviceState

# Bytes per second, measured; device_profiles/pools/boards.toml names the sources: the card of a Raspberry Pi 4, the eMMC 5.1 of
# a phone, the NVMe disk of a Jetson Orin Nano.
STORAGE = {"sd": 45.7e6, "emmc": 281e6, "nvme": 1362e6}


@dataclass(frozen=True)
class Devices:
    """The devices of a run: its fleet, and what it gives to clients and rounds depends on."""

    fleet: Fleet
    clients: int
    seed: int


def seconds_of_rounds(rounds: Sequence[Mapping[str, Any]], devices: Devices) -> list[dict[str, float]]:
    """Return the seconds of each round by storage: those of its slowest client. Raises ValueError for a disk with a latency."""
    return [
        {
            storage: round_seconds(
                client_seconds(client, _state(client, record["round"], devices), bandwidth)
                for client in record["clients"]
            )
            for storage, bandwidth in STORAGE.items()
        }
        for record in rounds
    ]


def client_seconds(client: Mapping[str, Any], state: DeviceState, disk_bandwidth: float) -> float:
    """Return the seconds of a client's task if its disk moves `disk_bandwidth` bytes a second. Raises ValueError.

    `client` is its record of the round: bytes, FLOPs, and the seconds on its own disk. `state` is its device in that round.
    """
    if latency := state.disk_latency or state.write_latency:
        raise ValueError(
            f"device {state.device!r} has a disk-latency of {latency:g} s, and records do not say how many accesses "
            "there were: leave it out of the fleet"
        )
    rest = (client["bytes_down"] + client["bytes_up"]) / state.bandwidth + client["flops"] / state.flops_per_second
    own_disk = max(0.0, client["simulated_seconds"] - rest)  # below 0 by rounding only
    return float(rest + own_disk * state.disk_bandwidth / disk_bandwidth)


def _state(client: Mapping[str, Any], server_round: int, devices: Devices) -> DeviceState:
    # The memory of a reference step decides the budget alone, which takes no time.
    return device_state(
        devices.fleet, client["client"], devices.clients, devices.seed, server_round, 1, client["device"]
    )
