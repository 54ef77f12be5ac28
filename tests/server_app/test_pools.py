"""Pools of devices and the papers' fleets."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import budgets
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands import base
from piecework.commands.devices import fleet_rows
from piecework.device_profiles.fleet import Fleet, device_of, device_state, load_fleet
from piecework.device_profiles.fleet_file import FleetError, shipped_fleets, shipped_pools
from piecework.device_profiles.profile import DeviceProfile

POOL = """
description = "mine"
[[device]]
name = "weak"
memory = "1GB"
flops = 1e9
disk-bandwidth = 1e7
source = "assumed"
[[device]]
name = "strong"
memory = "2GB"
flops = 2e9
bandwidth = 1e6
disk-bandwidth = 1e8
disk-latency = 0.1
"""


def pooled(folder: Path, lines: str = "", pool: str = POOL, assignment: str = "random") -> str:
    """A fleet file that takes its devices from the pool beside it."""
    (folder / "pool.toml").write_text(pool)
    path = folder / "mine.toml"
    path.write_text(f'name = "mine"\nassignment = "{assignment}"\npool = "pool.toml"\n{lines}\n')
    return str(path)


def test_a_pool_beside_the_fleet(tmp_path: Path) -> None:
    given = load_fleet(pooled(tmp_path))
    weak = DeviceProfile("weak", 10**9, None, 1e9, None, 1e7)
    strong = DeviceProfile("strong", 2 * 10**9, None, 2e9, 1e6, 1e8, 0.1)
    assert given == Fleet("mine", "", "random", (weak, strong), (1.0, 1.0))
    # What travels is the devices: the pool may not be there on the other side.
    line = given.to_json()
    (tmp_path / "pool.toml").unlink()
    assert load_fleet(line) == given and "pool" not in line
    assert load_fleet(pooled(tmp_path, assignment="blocks")).devices == given.devices


@pytest.mark.parametrize(("skew", "weak"), [(0.0, 0.5), (-1.0, 0.8), (1.0, 0.2), (-0.5, 2 / 3)])
def test_skew_weighs_by_flops_times_memory(tmp_path: Path, skew: float, weak: float) -> None:
    # The strong one has four times as much: 4^-1 : 1 = 0.2 : 0.8
    given = load_fleet(pooled(tmp_path, f"skew = {skew}"))
    assert given.weights[0] / sum(given.weights) == pytest.approx(weak)
    counts = Counter(device_of(given, client, 2000, 0).name for client in range(2000))
    assert counts["weak"] / 2000 == pytest.approx(weak, abs=0.045)  # 4 standard deviations


def test_a_shipped_pool_in_json() -> None:
    given = load_fleet('{"name": "x", "assignment": "blocks", "pool": "fedprophet-cifar10"}')
    assert given.devices == load_fleet("fedprophet-cifar10-balanced").devices


def test_shipped_pools() -> None:
    assert shipped_pools() == ["boards", "fedprophet-caltech", "fedprophet-cifar10", "tight"]
    boards = load_fleet("boards")
    assert all(device.bandwidth for device in boards.devices)
    assert [device.name for device in boards.devices[:2]] == ["raspberry-pi-4", "raspberry-pi-5"]
    assert boards.devices[0].flops_per_second == 4 * 1.5e9 * 8
    assert boards.devices[1].flops_per_second == 4 * 2.4e9 * 16


def test_fedprophets_tables() -> None:
    """Tables 5 and 6: TFLOPS, GB, GB/s, in the order printed."""
    printed = {
        "cifar10": "3.1 4 16, 1.3 4 1.5, 0.2 2 2, 0.1 2 1.5, 2.7 1 16, 2.1 4 1.5, 0.5 4 1.5, 1.1 1 16, 2.3 1 16, 3.7 2 16",
        "caltech": "21.8 8 16, 16.2 16 16, 19.7 16 16, 5.3 16 1.5, 19.0 8 16, 33.0 16 16, 2.1 8 1.5, 3.1 4 16, 1.3 4 1.5, "
        "8.6 4 16",
    }
    for data, rows in printed.items():
        devices = load_fleet(f"fedprophet-{data}-balanced").devices
        found = [(d.flops_per_second / 1e12, d.memory_bytes, d.disk_bandwidth / 1e9) for d in devices]
        wanted = [tuple(map(float, row.split())) for row in rows.split(", ")]
        assert found == [pytest.approx((flops, 1e9 * memory, disk)) for flops, memory, disk in wanted]
        assert {(d.bandwidth, d.disk_latency) for d in devices} == {(None, 0.17)}


@pytest.mark.parametrize(
    # Memory of the whole model's training step and of the smallest allowed module; with the authors' rules, the shares
    # of clients and rounds that hold the whole model, that are on the floor, and the mean of min(memory / whole, 1).
    ("name", "whole", "floor", "holds", "floored", "mean"),
    [
        ("fedprophet-cifar10-balanced-authors", 302e6, 60e6, 0.322, 0.17, 0.63),
        ("fedprophet-cifar10-unbalanced-authors", 302e6, 60e6, 0.237, 0.17, 0.61),
        ("fedprophet-caltech-balanced-authors", 1130e6, 224e6, 0.344, 0.16, 0.64),
        ("fedprophet-caltech-unbalanced-authors", 1130e6, 224e6, 0.087, 0.25, 0.45),
    ],
)
def test_fedprophets_budgets(name: str, whole: float, floor: float, holds: float, floored: float, mean: float) -> None:
    given, clients = load_fleet(name), 4000
    drawn = [device_state(given, client, clients, 7, 1, 0).budget_bytes for client in range(clients)]
    # 4 standard deviations of a share (at most 0.5 / sqrt(4000)) and of a mean; the figures are themselves drawn.
    error = 4 * 0.5 / math.sqrt(clients) + 0.005
    assert min(drawn) == floor
    assert sum(amount > whole for amount in drawn) / clients == pytest.approx(holds, abs=error)
    assert sum(amount == floor for amount in drawn) / clients == pytest.approx(floored, abs=error)
    assert sum(min(amount / whole, 1) for amount in drawn) / clients == pytest.approx(mean, abs=error)
    # The paper's rule, without a floor, from the same draws.
    paper = load_fleet(name.removesuffix("-authors"))
    states = [device_state(paper, client, clients, 7, 1, 0) for client in range(500)]
    assert [max(state.budget_bytes, int(floor)) for state in states] == drawn[:500]
    profiles = [device_of(paper, client, clients, 7) for client in range(500)]
    left = [s.flops_per_second / p.flops_per_second for s, p in zip(states, profiles, strict=True)]
    assert sum(left) / 500 == pytest.approx(0.5, abs=0.055)  # 4 standard deviations of 0.29 / sqrt(500)


def test_profls_devices() -> None:
    given = load_fleet("profl")
    generator = random.Random(42)
    assert list(given.memories) == [generator.randint(100, 900) * 10**6 for _ in range(100)]
    assert given.prescribed_clients == 100
    drawn = budgets(given, 100, 3, 0)
    # Its participation rates: ResNet-18 whole, DepthFL's and its own first step, then the later ones.
    thresholds = {840: 8, 478: 47, 506: 43, 220: 81, 112: 99, 100: 100}
    assert {mb: sum(memory >= mb * 10**6 for memory in drawn) for mb in thresholds} == thresholds


def test_prisms_clients() -> None:
    assert {load_fleet("prism-homogeneous").devices[0].memory_ratio} == {0.61}
    mixed = load_fleet("prism-heterogeneous")
    counts = Counter(device_of(mixed, client, 2000, 0).name for client in range(2000))
    assert counts["keep-0.4"] / 2000 == pytest.approx(0.4, abs=0.045)
    # Full model 31.46 M values a batch (Table 1); sub-models, with ranks rounded up, 19.1 and 9.58.
    assert [int(31.46 * ratio * 10) for ratio in (0.61, 0.31)] == [191, 97]
    assert {d.name: d.memory_ratio for d in mixed.devices} == {"keep-0.4": 0.61, "keep-0.2": 0.31}


@pytest.mark.parametrize(
    ("lines", "pool", "assignment", "message"),
    [
        ('skew = "low"', POOL, "random", "mine.toml: skew = 'low': input should be a valid number"),
        ("skew = -11", POOL, "random", "mine.toml: skew = -11: input should be greater than or equal to -10"),
        ("skew = -1", POOL, "blocks", 'mine.toml: skew = -1.0 belongs to a pool with assignment = "random"'),
        ('[[device]]\nname = "a"\nflops = 1\ndisk-bandwidth = 1', POOL, "random", "give exactly one of pool"),
        ("", POOL, "uniform", 'mine.toml: memory-range belongs to assignment = "uniform", which needs it'),
        ("memories = [1, 2]", POOL, "memories", 'assignment = "memories" takes one device, not 2'),
        ("", "", "random", "pool.toml: device is missing"),
        ("", POOL + "weight = 2", "random", "pool.toml: device 2 weight: unknown key; allowed are name, memory, flops"),
        ("", POOL + 'memory = "1Gb"', "random", "pool.toml: Cannot overwrite a value"),
        ("", POOL.replace('"2GB"', '"2Gb"'), "random", "pool.toml: device 2 memory = '2Gb': not an amount of memory"),
        ("", POOL.replace('memory = "2GB"\n', ""), "random", "pool.toml: device 2 memory is missing"),
        ("", POOL.replace("0.1", "-0.1"), "random", "pool.toml: device 2 disk-latency = -0.1: input should be greater"),
        (
            "",
            POOL.replace("weak", "strong"),
            "random",
            "pool.toml: device names = ['strong', 'strong']: each must be unique",
        ),
        ("", 'name = "x"\n' + POOL, "random", "pool.toml: name: unknown key; allowed are description, device"),
    ],
)
def test_errors_in_a_pool_or_of_its_fleet(tmp_path: Path, lines: str, pool: str, assignment: str, message: str) -> None:
    with pytest.raises(FleetError) as error:
        load_fleet(pooled(tmp_path, lines, pool, assignment))
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'mine.toml'}: ")
    # What is wrong in the pool also says which key led there.
    inside = message.startswith("pool.toml: ")
    assert (f"mine.toml: pool = 'pool.toml': {tmp_path / 'pool.toml'}: " in str(error.value)) == inside


def test_pools_that_are_not_there(tmp_path: Path) -> None:
    path = pooled(tmp_path)
    (tmp_path / "pool.toml").unlink()
    with pytest.raises(FleetError) as error:
        load_fleet(path)
    missing = tmp_path / "pool.toml"
    assert str(error.value) == f"{path}: pool = 'pool.toml': no such file as {missing}"
    Path(path).write_text('name = "x"\nassignment = "random"\npool = "fedprofet"\n')
    with pytest.raises(
        FleetError,
        match=r"mine\.toml: pool = 'fedprofet': there are boards, fedprophet-caltech, .*or the path of a .toml",
    ):
        load_fleet(path)


# ---- piecework devices


def listed(*arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["devices", *arguments, "--json"])
    assert done.exit_code == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_devices_lists_fleets_and_pools() -> None:
    rows = listed()
    of = Counter(row["fleet"] for row in rows)
    assert set(of) == {*shipped_fleets(), *(f"pool:{name}" for name in shipped_pools())}
    assert of["pool:fedprophet-caltech"] == of["fedprophet-caltech-balanced"] == 10
    assert {tuple(row) for row in rows} == {tuple(row) for row in listed("demo")}  # the same keys everywhere


def test_devices_of_a_pool() -> None:
    rows = listed("fedprophet-cifar10")
    fleet = listed("fedprophet-cifar10-balanced")
    assert rows == [row | {"fleet": "pool:fedprophet-cifar10", "assignment": "-"} for row in fleet]
    # Both a fleet and a pool
    assert {row["fleet"] for row in listed("boards")} == {"boards"}
    assert {row["fleet"] for row in listed("pool:boards")} == {"pool:boards"}


def test_the_tables_of_devices_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device on a line of its own with its whole name, each fleet and pool once and whole."""
    monkeypatch.setattr(base.out, "width", 80)
    rows, lines = fleet_rows(""), CliRunner().invoke(app, ["devices"]).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    devices = [row["name"] for row in rows]
    assert [line.split()[0] for line in lines if line.rstrip().endswith("B/s")] == devices
    heads = dict.fromkeys((row["fleet"], row["assignment"]) for row in rows)
    expected = [fleet if how == "-" else f"{fleet} (assignment: {how})" for fleet, how in heads]
    assert [line.rstrip() for line in lines if line.startswith("pool:") or "(assignment: " in line] == expected
    assert next(line.split()[0] for line in lines if "0.53 x step" in line) == "board-a"
    assert lines[-1].startswith("x step: times the memory of a reference step")


def test_devices_of_a_file(tmp_path: Path) -> None:
    assert [row["name"] for row in listed(pooled(tmp_path))] == ["weak", "strong"]


@pytest.mark.parametrize("name", ["bords", "pool:demo"])
def test_devices_of_an_unknown_name(name: str) -> None:
    with pytest.raises(FleetError) as error:
        fleet_rows(name)
    message = str(error.value)
    assert message.startswith(f"unknown fleet or pool '{name}'; there are the fleets boards, containers, demo, ")
    assert "the pools boards, fedprophet-caltech, fedprophet-cifar10, tight, or the path of a .toml file" in message
