"""Errors in fleets: each names the place, the value and what is allowed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fleet_helpers import A, B, device

from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.fleet_file import FleetError
from piecework.device_profiles.profile import DeviceProfile


def one(**keys: Any) -> dict[str, Any]:
    return {"device": [device("a", **{"memory": 1} | keys)]}


UNIFORM: dict[str, Any] = {"assignment": "uniform", "memory-range": [1, 2]}
LIST_ONLY = 'clients belongs to assignment = "list", which needs it'
UNIFORM_ONLY = 'memory-range belongs to assignment = "uniform", which needs it'
ORDER = "the first must not be above the second"
NOT_BYTES = "not an amount of memory; write a number and one of B, kB, MB, GB, KiB, MiB, GiB, as in"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"assignment": "x"},
            "assignment = 'x': input should be 'blocks', 'round-robin', 'random', 'list', 'memories' or 'uniform'",
        ),
        (
            {"speed": 1},
            "speed: unknown key; allowed are name, description, assignment, memory-range, clients, memories",
        ),
        ({"memory_range": ["1MB", "2MB"]}, "memory_range: unknown key; allowed are "),
        ({"name": 3}, "name = 3: input should be a valid string"),
        ({"device": []}, "device = []: list should have at least 1 item"),
        (
            {"device": [A, B | {"flopz": 2}]},
            "device 2 flopz: unknown key; allowed are name, memory, memory-ratio, flops",
        ),
        ({"device": [{"name": "a", "memory": 1, "flops": 1}]}, "device 1 disk-bandwidth is missing"),
        ({"device": [A, B | {"flops": -1}]}, "device 2 flops = -1: input should be greater than 0"),
        ({"device": [A, A]}, "device names = ['a', 'a']: each must be unique"),
        (one(flops="2e9"), "device 1 flops = '2e9': input should be a valid number"),
        (one(flops=math.inf), "device 1 flops = inf: input should be a finite number"),
        (one(weight=0), "device 1 weight = 0: input should be greater than 0"),
        (one(weight=1e308), "device 1 weight = 1e+308: a weight must be from 1e-100 to 1e+100"),
        (one(keep=1e-320), "device 1 keep = 1e-320: a fraction must be from 1e-06 to 1"),
        (one(memory_ratio=0), "device 1 memory-ratio = 0: input should be greater than 0"),
        (one(memory=0), "device 1 memory = 0: input should be greater than 0"),
        (one(memory="64Mb"), f"device 1 memory = '64Mb': {NOT_BYTES}"),
        (one(memory=True), f"device 1 memory = True: {NOT_BYTES}"),
        (one(memory=1.5), f"device 1 memory = 1.5: {NOT_BYTES}"),
        (one(memory_ratio=1), "device 1: exactly one of memory and memory-ratio is to be set, not 2"),
        (one(memory=None), "device 1: exactly one of memory and memory-ratio is to be set, not 0"),
        ({"memory-range": [1, 2]}, UNIFORM_ONLY),
        ({"assignment": "uniform"}, UNIFORM_ONLY),
        (UNIFORM | {"memory-range": [2, 1]}, f"memory-range = [2, 1]: {ORDER}"),
        (UNIFORM | {"memory-range": [1]}, "memory-range 2 is missing"),
        (UNIFORM, "device 1: memory comes from memory-range; neither of memory and memory-ratio is to be set, not 1"),
        (UNIFORM | {"device": [device("a"), device("b")]}, 'assignment = "uniform" takes one device, not 2'),
        ({"clients": ["a"]}, LIST_ONLY),
        ({"assignment": "list"}, LIST_ONLY),
        ({"assignment": "list", "clients": ["a", "z"]}, "clients names ['z']; the devices are ['a']"),
        ({"degradation": {"memory": [0.5, 0.2]}}, f"degradation memory = [0.5, 0.2]: {ORDER}"),
        ({"degradation": {"memory": [0, 1.5]}}, "degradation memory 2 = 1.5: input should be less than or equal to 1"),
        ({"degradation": {"flops": [1, 1]}}, "degradation flops = [1, 1]: the first must be below 1"),
        ({"degradation": {"memory-floor": -1}}, "degradation memory-floor = -1: input should be greater than or equal"),
        ({"degradation": {"memory-floor": "6Mb"}}, f"degradation memory-floor = '6Mb': {NOT_BYTES}"),
        ({"degradation": {"flops-left": []}}, "degradation flops-left = []: tuple should have at least 1 item"),
        ({"degradation": {"flops-left": [0.5, 0]}}, "degradation flops-left 2 = 0: input should be greater than 0"),
        (
            {"degradation": {"flops-left": [1e-320]}},
            "degradation flops-left 1 = 1e-320: a fraction must be from 1e-06 to 1",
        ),
        ({"degradation": {"flops-left": [1.1]}}, "degradation flops-left 1 = 1.1: input should be less than or equal"),
        (
            {"degradation": {"flops-left": [1], "flops": [0, 0.5]}},
            "degradation flops and flops-left both describe lost speed; give one of them",
        ),
        ({"memories": [1]}, 'memories belongs to assignment = "memories", which needs it'),
        ({"assignment": "memories"}, 'memories belongs to assignment = "memories", which needs it'),
        (
            {"assignment": "memories", "memories": [1]},
            "device 1: memory comes from memories; neither of memory and memory-ratio is to be set, not 1",
        ),
        ({"assignment": "memories", "memories": [1, 0]}, "memories 2 = 0: input should be greater than 0"),
        ({"device": None}, "give exactly one of pool and [[device]] tables"),
        ({"pool": "boards"}, "give exactly one of pool and [[device]] tables"),
        ({"skew": -1}, 'skew = -1.0 belongs to a pool with assignment = "random"'),
        (
            {"pool": "x", "device": None},
            "pool = 'x': there are boards, fedprophet-caltech, fedprophet-cifar10, tight, or the",
        ),
        ({"device": [device("a\nb")]}, "device 1 name = 'a\\nb': a name has no control characters"),
        (one(disk_latency=-1), "device 1 disk-latency = -1: input should be greater than or equal to 0"),
        (one(disk_write_latency=-1), "device 1 disk-write-latency = -1: input should be greater than or equal to 0"),
        (one(bandwidth=0), "device 1 bandwidth = 0: input should be greater than 0"),
        ({"degradation": {"flops": [-1, 0]}}, "degradation flops 1 = -1: input should be greater than or equal to 0"),
        ({"degradation": 3}, "degradation = 3: expected a table"),
        ({"device": 3}, "device = 3: expected a table for each device, headed [[device]]"),
        ({"device": {"name": "a"}}, "device = {'name': 'a'}: expected a table for each device, headed [[device]]"),
        ({"device": [A, 3]}, "device 2 = 3: expected a table"),
        ({"clients": "a"}, "clients = 'a': expected a list"),
        ({"degradation": {"disk": [0, 0]}}, "degradation disk: unknown key; allowed are memory, memory-floor, flops"),
    ],
)
def test_errors_name_the_place_the_value_and_what_is_allowed(table: dict[str, Any], message: str) -> None:
    whole = {"name": "test", "assignment": "blocks", "device": [A]} | table
    with pytest.raises(FleetError) as error:
        load_fleet(json.dumps(whole))
    assert f"fleet JSON: {message}" in str(error.value)


def test_all_wrong_keys_are_reported_at_once() -> None:
    with pytest.raises(FleetError) as error:
        load_fleet('{"device": []}')
    assert len(str(error.value).splitlines()) == 3  # name, assignment, device


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"degradation": {"flops-left": [0.0]}}, "degradation flops-left 1 = 0.0: input should be greater than 0"),
        ({"assignment": "memories", "memories": [0]}, "memories 1 = 0: input should be greater than 0"),
        ({"degradation": 3}, "degradation = 3: expected a table"),
    ],
)
def test_one_mistake_is_reported_once(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError) as error:
        load_fleet(json.dumps({"name": "test", "assignment": "blocks", "device": [A]} | keys))
    assert str(error.value) == f"fleet JSON: {message}"


def test_unknown_name_lists_the_shipped_fleets() -> None:
    with pytest.raises(
        FleetError, match=r"unknown fleet 'dmeo'; there are boards, containers, demo, .*unlimited, or the path"
    ):
        load_fleet("dmeo")
    with pytest.raises(FleetError, match="unknown fleet"):
        load_fleet("../fleets/demo")


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    with pytest.raises(FleetError, match=r"no file .*broken\.toml \(looked for from .*\); there are boards"):
        load_fleet(str(path))
    path.write_text('name = "x"\nassignment = \n')
    with pytest.raises(FleetError, match=r"broken\.toml: .*line 2"):
        load_fleet(str(path))
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(FleetError, match=r"broken\.toml: .*utf-8"):
        load_fleet(str(path))
    with pytest.raises(FleetError, match=r"fleet JSON: .*line 1 column"):
        load_fleet('{"name": ')


def test_profile_takes_one_memory_figure() -> None:
    for memory, ratio in ((None, None), (1, 0.5)):
        with pytest.raises(ValueError, match="device 'a': give exactly one of memory_bytes and memory_ratio"):
            DeviceProfile("a", memory, ratio, 1.0, 1.0, 1.0)


def test_a_pool_of_devices_that_no_skew_can_weigh(tmp_path: Path) -> None:
    rows = [
        f'[[device]]\nname = "{n}"\nmemory = {m}\nflops = {f}\ndisk-bandwidth = 1e7\nbandwidth = 1e6\n'
        for n, m, f in (("a", 1, 1e-6), ("b", 10**15, 1e24))
    ]
    (tmp_path / "pool.toml").write_text("".join(rows))
    fleet = json.dumps({"name": "t", "assignment": "random", "pool": str(tmp_path / "pool.toml"), "skew": -10})
    with pytest.raises(FleetError, match=r"skew = -10.0 gives some devices weights outside 1e-100 to 1e100"):
        load_fleet(fleet)
