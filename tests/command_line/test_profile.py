"""`piecework profile`: what it writes is read by fleets, what it cannot measure it refuses."""

import json
import os
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands import profile_device as profiles
from piecework.commands.profile_device import Profile, steady_speed, toml_text
from piecework.device_profiles.disk import PROBE_FILE_BYTES, DiskSpeed, measure_disk
from piecework.device_profiles.fleet import device_state, load_fleet
from piecework.device_profiles.fleet_file import FleetError
from piecework.device_profiles.profile import convolution_speeds


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "DISK_BYTES", PROBE_FILE_BYTES)


def a_profile(**changes: object) -> Profile:
    values = {
        "name": "pi",
        "available": 900_000_000,
        "reserve": 100_000_000,
        "first_flops": 8e9,
        "sustained_flops": 4.5678e9,
        "seconds": 10.0,
        "threads": 1,
        "disk": DiskSpeed(write=2e7, read=4e7, latency=3.14159e-4, write_latency=2.71828e-3),
        "disk_bytes": 64_000_000,
        "cpus": 4,
    }
    return Profile(**values | changes)  # type: ignore[arg-type]


def test_what_is_written_is_a_device_of_a_fleet_and_a_pool(tmp_path: Path) -> None:
    text = toml_text(a_profile())
    (tmp_path / "boards.toml").write_text(text + toml_text(a_profile(name="other")))
    (tmp_path / "pooled.toml").write_text('name = "mine"\nassignment = "round-robin"\npool = "boards.toml"\n')
    (tmp_path / "copied.toml").write_text('name = "mine"\nassignment = "blocks"\n' + text)
    for file in ("pooled.toml", "copied.toml"):
        fleet = load_fleet(str(tmp_path / file))
        device = fleet.devices[0]
        assert (device.name, device.memory_bytes, device.flops_per_second) == ("pi", 800_000_000, 4.57e9)
        assert (device.disk_bandwidth, device.disk_write_bandwidth, device.disk_latency) == (4e7, 2e7, 3.14e-4)
        assert (device.disk_write_latency, device.cpus) == (2.72e-3, 4)
        assert device.bandwidth is None
        assert load_fleet(fleet.to_json()) == fleet  # as it travels to the nodes
        assert device_state(fleet, 0, 2, 1, 1, 10**9, "pi").budget_bytes == 800_000_000
    for line in ("torch ", "flwr ", " cores", "of memory in all", "57% of it", "64 MB written"):
        assert line in text


def test_cores_of_a_container(tmp_path: Path) -> None:
    assert [device.cpus for device in load_fleet("containers").devices] == [0.5, 0.75, 1.0]
    assert load_fleet("demo").devices[0].cpus is None
    assert "cpus" not in load_fleet("demo").to_json()  # settings of older runs stay as they were
    path = tmp_path / "fleet.toml"
    path.write_text('name = "x"\nassignment = "blocks"\n' + toml_text(a_profile(cpus=0)))
    with pytest.raises(FleetError, match="device 1 cpus = 0: input should be greater than 0"):
        load_fleet(str(path))


def test_a_device_that_gets_warm() -> None:
    speeds = [(0.1 * i, 100.0 if i < 20 else 40.0) for i in range(100)]
    assert steady_speed(speeds, 10.0) == (100.0, 40.0)
    # one outlier decides nothing, and a device with a repetition every few seconds has its last one
    assert steady_speed([(0.0, 10.0), (0.3, 90.0), (0.6, 10.0), (6.0, 5.0)], 10.0) == (10.0, 5.0)
    assert steady_speed([(0.0, 10.0), (3.0, 8.0)], 10.0) == (10.0, 8.0)
    assert a_profile(sustained_flops=7.1e9).slows_down
    assert not a_profile(sustained_flops=7.3e9).slows_down


def test_the_convolution_is_repeated_for_as_long_as_asked() -> None:
    torch.set_num_threads(1)
    speeds = convolution_speeds(0.3)
    begins = [began for began, _ in speeds]
    assert begins == sorted(begins)
    assert begins[0] < 0.1
    assert begins[-1] < 0.3
    assert all(1e7 < speed < 1e13 for _, speed in speeds)
    assert len(convolution_speeds(0.0)) == 1


def test_the_disk(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 2_000_000, 8)
    assert min(found.write, found.read, found.latency, found.write_latency) > 0
    assert max(found.latency, found.write_latency) < 1
    without = measure_disk(tmp_path, 1)
    assert (without.latency, without.write_latency) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_file_once(tmp_path: Path) -> None:
    file = tmp_path / "board.toml"
    command = ["profile", "--seconds", "1", "--name", "shed", "--folder", str(tmp_path), "--out", str(file)]
    done = CliRunner().invoke(app, [*command, "--json", "--set", "memory.reserve=1000000"])
    assert done.exit_code == 0, done.stderr
    assert "in the first second" in done.stderr
    (row,) = tomllib.loads(file.read_text())["device"]
    told = json.loads(done.stdout)
    assert row.items() <= told.items()
    assert told["first-flops"] > 0
    assert (row["name"], row["cpus"]) == ("shed", len(os.sched_getaffinity(0)))
    assert "less a reserve of 1 MB" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["board.toml"]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "is there already" in again.stderr


def test_without_a_file_it_goes_to_stdout(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["profile", "--seconds", "1", "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    (row,) = tomllib.loads(done.stdout)["device"]
    assert row["memory"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--folder", "nowhere"], "--folder nowhere: no such folder"),
        (["--seconds", "0.5"], "--seconds 0.5: must be at least 1"),
        (["--seconds", "nan"], "--seconds nan: must be at least 1"),
        (["--name", " "], "--name ' ': a device needs a name"),
        (["--set", "memory.reserve=1000000000000000"], "nothing is left to train with"),
        (["--set", "training.torch-threads=0"], "setting training.torch-threads = 0"),
        (["--out", "nowhere/board.toml"], "--out nowhere/board.toml: there is no folder"),
    ],
)
def test_what_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["profile", *options])
    assert done.exit_code == 2
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    done = CliRunner().invoke(app, ["profile", "--folder", str(tmp_path)])
    assert done.exit_code == 2
    assert f"--folder {tmp_path}: [Errno 5] Input/output error; give a folder that can be written" in done.stderr
    assert list(tmp_path.iterdir()) == []
