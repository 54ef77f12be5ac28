"""Simulated time on other storage, from the records of a run on one."""

from pathlib import Path

import pytest
from claims_helpers import template
from helpers import SPEEDS, TRIO, run_local

from benchmarks.claims.storage import STORAGE, Devices, client_seconds, seconds_of_rounds
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.profile import DeviceState

CLIENT = {"bytes_down": 2_000_000, "bytes_up": 1_000_000, "flops": 4e9, "simulated_seconds": 3 + 2 + 0.914}
STATE = DeviceState("board", 10**9, flops_per_second=2e9, bandwidth=1e6, disk_bandwidth=1e8)


def test_seconds_of_a_client_by_hand() -> None:
    """Three seconds of network, two of computing; 91.4 MB of a disk that moves 100 MB a second."""
    assert client_seconds(CLIENT, STATE, 1e8) == pytest.approx(5.914)
    assert client_seconds(CLIENT, STATE, STORAGE["sd"]) == pytest.approx(5 + 2)
    assert client_seconds(CLIENT, STATE, STORAGE["emmc"]) == pytest.approx(5 + 0.325267, rel=1e-6)
    assert client_seconds(CLIENT, STATE, STORAGE["nvme"]) == pytest.approx(5 + 0.067107, rel=1e-6)


def test_a_disk_with_a_latency_is_refused() -> None:
    slow = DeviceState("board", 10**9, 2e9, 1e6, 1e8, disk_latency=3e-4)
    with pytest.raises(
        ValueError, match=r"device 'board' has a disk-latency of 0\.0003 s, and records do not say how many"
    ):
        client_seconds(CLIENT, slow, 1e8)


def fleet(disk_bandwidth: float) -> str:
    """Devices that lose some of their speed in each round, of which one is slow at computing and the other at its disk."""
    fast, slow = SPEEDS | {"flops": 1e11}, SPEEDS | {"flops": 1e8}
    devices = [
        "".join(f"{key} = {value}\n" for key, value in (each | {"disk-bandwidth": disk_bandwidth}).items())
        for each in (fast, slow)
    ]
    tables = "".join(
        f'[[device]]\nname = "{name}"\nmemory-ratio = 2.2\n{each}' for name, each in zip("ab", devices, strict=True)
    )
    return f'name = "two"\nassignment = "round-robin"\n{tables}[degradation]\nflops = [0.1, 0.9]\n'


def test_a_run_on_another_disk_takes_as_long_as_is_computed(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(fleet(1e5))
    (tmp_path / "sd.toml").write_text(fleet(STORAGE["sd"]))
    runs = {
        name: run_local(tmp_path / name, **TRIO, strategy="fedepth", fleet=str(tmp_path / f"{name}.toml"))
        for name in ("slow", "sd")
    }
    (found,) = seconds_of_rounds(runs["slow"].rounds(), Devices(load_fleet(str(tmp_path / "slow.toml")), 3, 1))
    (measured,) = runs["sd"].rounds()
    assert found["sd"] == pytest.approx(measured["simulated_seconds"], abs=1e-4)  # messages differ by a few bytes
    assert found["sd"] < 0.9 * runs["slow"].rounds()[0]["simulated_seconds"]
    assert found["sd"] > found["emmc"] > found["nvme"] > 0


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    (record,) = template().rounds()
    clients = [
        client | CLIENT | {"simulated_seconds": seconds}
        for client, seconds in zip(record["clients"], (4, 9, 5), strict=True)
    ]
    devices = Devices(load_fleet(str(template().settings()["fleet"])), 3, 1)  # 1e9 FLOP/s, 1e6 and 1e7 B/s
    (found,) = seconds_of_rounds([record | {"clients": clients}], devices)
    assert found["sd"] == pytest.approx(3 + 4 + 2 * 1e7 / 45.7e6)
