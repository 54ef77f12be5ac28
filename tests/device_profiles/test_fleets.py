"""Fleets: who has which device, what a round takes, errors in files."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import budgets

from piecework.device_profiles.fleet import Fleet, device_classes, device_of, device_state, load_fleet
from piecework.device_profiles.fleet_file import FleetError, shipped_fleets
from piecework.device_profiles.profile import DeviceProfile, DeviceState
from piecework.planning.page_plan import speed_of

SPEEDS = {"flops": 1e9, "bandwidth": 1e6, "disk-bandwidth": 1e7}


def device(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, **SPEEDS} | {key.replace("_", "-"): value for key, value in keys.items()}


def fleet(*devices: dict[str, Any], assignment: str = "blocks", **keys: Any) -> Fleet:
    table = {"name": "test", "assignment": assignment, "device": list(devices)}
    return load_fleet(json.dumps(table | {key.replace("_", "-"): value for key, value in keys.items()}))


ABCD = [device(name, memory_ratio=0.5) for name in "abcd"]
A, B = device("a", memory="64MB"), device("b", memory="128MB", weight=3.0)


def names(given: Fleet, clients: int, seed: int = 0) -> str:
    return "".join(device_of(given, client, clients, seed).name for client in range(clients))


# ---- who has which device


def test_blocks_are_consecutive_and_equal() -> None:
    assert names(fleet(*ABCD), 100) == "a" * 25 + "b" * 25 + "c" * 25 + "d" * 25


def test_blocks_where_clients_do_not_divide() -> None:
    # floor(4i/7) for i = 0..6: 0 0 1 1 2 2 3
    assert names(fleet(*ABCD), 7) == "aabbccd"
    assert names(fleet(*ABCD), 2) == "ac"


def test_round_robin() -> None:
    assert names(fleet(*ABCD, assignment="round-robin"), 7) == "abcdabc"


def test_list_gives_each_client_its_device() -> None:
    listed = fleet(A, B, assignment="list", clients=["b", "a", "b"])
    assert names(listed, 3) == "bab"
    with pytest.raises(FleetError, match="lists 3 clients, the run has 4"):
        device_of(listed, 0, 4, 0)


def test_memories_gives_each_client_its_own() -> None:
    given = fleet(device("board"), assignment="memories", memories=["755MB", 100, "2kB"])
    assert budgets(given, 3, 0, 0) == [755_000_000, 100, 2000]
    assert names(given, 3) == "board" * 3
    with pytest.raises(FleetError, match="lists 3 clients, the run has 2"):
        device_of(given, 0, 2, 0)


def test_fleets_that_list_clients_say_how_many() -> None:
    assert fleet(A, B, assignment="list", clients=["b", "a", "b"]).prescribed_clients == 3
    assert fleet(device("board"), assignment="memories", memories=[1, 2]).prescribed_clients == 2
    assert fleet(A, B).prescribed_clients is None


def test_random_follows_the_weights_and_the_seed() -> None:
    given = fleet(A, B, assignment="random")
    counts = Counter(names(given, 4000))
    assert counts["b"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert names(given, 50) == names(given, 50)
    assert names(given, 50) != names(given, 50, seed=1)
    # A client keeps its device when others join.
    assert names(given, 60)[:50] == names(given, 50)


def test_uniform_draws_bytes_within_the_range() -> None:
    given = fleet(device("board"), assignment="uniform", memory_range=["64MB", "256MB"])
    drawn = budgets(given, 500, 0, reference_bytes=0)
    assert all(64_000_000 <= amount <= 256_000_000 for amount in drawn)
    assert len(set(drawn)) == 500
    assert sum(drawn) / 500 == pytest.approx(160e6, rel=0.05)
    assert drawn != budgets(given, 500, 1, reference_bytes=0)
    one = fleet(device("board"), assignment="uniform", memory_range=[5, 5])
    assert budgets(one, 2, 0, 0) == [5, 5]


def test_draws_stay_what_they_are() -> None:
    """Server and devices may run different numpy versions: the streams behind the draws are pinned here."""
    assert names(fleet(*ABCD, assignment="random"), 12, seed=7) == "bbcddbbacccb"
    drawn = fleet(
        device("a"),
        assignment="uniform",
        memory_range=["64MB", "256MB"],
        degradation={"memory": [0, 0.2], "flops": [0, 0.5]},
    )
    assert device_of(drawn, 3, 10, 7).memory_bytes == 186_384_881
    state = device_state(drawn, 3, 10, 7, 5, 0)
    assert state.budget_bytes == 175_810_687
    assert state.flops_per_second == pytest.approx(1e9 * 6014880397.017554 / 8e9, rel=1e-12)


@pytest.mark.parametrize("client", [-1, 4])
def test_no_such_client(client: int) -> None:
    with pytest.raises(FleetError, match=f"no client {client}; 4 clients are numbered from 0"):
        device_of(fleet(*ABCD), client, 4, 0)


# ---- what a device has in a round


def test_budgets_of_ratios_and_bytes() -> None:
    mixed = fleet(device("a", memory_ratio=0.34), device("b", memory=1000), device("c", memory_ratio=2.0))
    assert budgets(mixed, 3, 0, 1001) == [340, 1000, 2002]
    assert device_classes(mixed) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"0\.34 of a reference step's memory.*0 bytes"):
        budgets(mixed, 3, 0, 0)


def test_state_without_degradation_is_the_profile() -> None:
    given = fleet(A, B)
    for number in range(3):
        assert device_state(given, 1, 2, 0, number, 0) == DeviceState("b", 128_000_000, 1e9, 1e6, 1e7)


def test_degradation_is_bounded_and_a_function_of_its_arguments() -> None:
    given = fleet(device("a", memory=10**9), degradation={"memory": [0.1, 0.3], "flops": [0.0, 0.5]})
    states = {(s, r, c): device_state(given, c, 20, s, r, 0) for s in range(2) for r in range(10) for c in range(20)}
    memory = [state.budget_bytes / 1e9 for state in states.values()]
    speed = [state.flops_per_second / 1e9 for state in states.values()]
    assert 0.7 <= min(memory) < 0.72 and 0.88 < max(memory) <= 0.9
    assert 0.5 <= min(speed) < 0.53 and 0.97 < max(speed) <= 1.0
    assert len(set(memory)) == len(set(speed)) == 400
    # In another order, from the JSON, as a client does.
    again = load_fleet(given.to_json())
    for (s, r, c), state in reversed(states.items()):
        assert device_state(again, c, 20, s, r, 0) == state
    assert budgets(given, 20, 0, 0) == [10**9] * 20


def test_memory_floor() -> None:
    loss = {"memory": [0.8, 1.0]}
    given = fleet(device("a", memory=1000), degradation=loss | {"memory-floor": 100})
    without = fleet(device("a", memory=1000), degradation=loss)
    drawn = [device_state(without, 0, 1, 0, number, 0).budget_bytes for number in range(200)]
    assert min(drawn) < 20 and max(drawn) > 180
    floored = [device_state(given, 0, 1, 0, number, 0).budget_bytes for number in range(200)]
    assert floored == [max(amount, 100) for amount in drawn]
    # The floor is what other programs leave: a device that never had as much does not gain by it.
    small = fleet(device("a", memory_ratio=0.5), degradation=loss | {"memory-floor": "1kB"})
    assert device_state(small, 0, 1, 0, 0, 100).budget_bytes == 50


def test_flops_left_is_one_of_the_list() -> None:
    left = [1.0, 0.735, 0.459, 0.524, 0.167, 0.231]
    given = fleet(A, degradation={"flops-left": left})
    drawn = Counter(device_state(given, 0, 1, 0, number, 0).flops_per_second / 1e9 for number in range(3000))
    assert sorted(drawn) == pytest.approx(sorted(left))
    assert all(count == pytest.approx(500, abs=90) for count in drawn.values())  # 4 standard deviations of 20


def test_all_of_the_speed_may_be_lost_but_not_quite() -> None:
    given = fleet(A, degradation={"flops": [0.0, 1.0]})
    drawn = [device_state(given, 0, 1, 0, number, 0).flops_per_second / 1e9 for number in range(1000)]
    assert 0 < min(drawn) < 0.01 and max(drawn) > 0.99
    assert sum(drawn) / 1000 == pytest.approx(0.5, abs=0.04)
    nothing = fleet(A, degradation={"flops": [math.nextafter(1, 0), 1.0]})
    assert all(device_state(nothing, 0, 1, 0, number, 0).flops_per_second > 0 for number in range(10))


def test_bandwidth_and_latency_are_optional() -> None:
    bare = {"name": "a", "memory": 1, "flops": 1e9, "disk-bandwidth": 1e7}
    given = fleet(bare)
    assert given.devices[0] == DeviceProfile("a", 1, None, 1e9, None, 1e7, 0.0)
    assert device_state(given, 0, 1, 0, 0, 0) == DeviceState("a", 1, 1e9, math.inf, 1e7, 0.0)
    assert load_fleet(given.to_json()) == given
    late = fleet(bare | {"disk-latency": 0.17})
    assert device_state(late, 0, 1, 0, 0, 0).disk_latency == 0.17
    slow = fleet(bare | {"disk-write-bandwidth": 2e6})
    assert load_fleet(slow.to_json()) == slow
    states = [device_state(each, 0, 1, 0, 0, 0) for each in (given, slow)]
    assert [each.write_bandwidth for each in states] == [1e7, 2e6]
    assert [speed_of(each).moving(2e7, 1e7) for each in states] == pytest.approx([2 + 1, 2 + 5])
    assert load_fleet(late.to_json()) == late
    waiting = fleet(bare | {"disk-latency": 0.25, "disk-write-latency": 1.5})
    assert load_fleet(waiting.to_json()) == waiting
    assert "disk-write-latency" not in late.to_json()  # settings of older runs stay as they were
    states = [device_state(each, 0, 1, 0, 0, 0) for each in (late, waiting)]
    assert [each.write_latency for each in states] == [0.17, 1.5]
    assert [speed_of(each).moving(0, 0, 6, 2) for each in states] == pytest.approx([6 * 0.17, 4 * 0.25 + 2 * 1.5])


def test_memory_and_speed_are_drawn_apart() -> None:
    both = fleet(A, degradation={"memory": [0.1, 0.3], "flops": [0.1, 0.5]})
    one = fleet(A, degradation={"memory": [0.1, 0.3]})
    assert device_state(both, 0, 1, 0, 4, 0).budget_bytes == device_state(one, 0, 1, 0, 4, 0).budget_bytes


# ---- shipped fleets and JSON


@pytest.mark.parametrize("name", shipped_fleets())
def test_shipped_fleets_load_and_travel(name: str) -> None:
    given = load_fleet(name)
    assert given.name == name and "assumed" in given.description.lower()
    line = given.to_json()
    assert "\n" not in line and load_fleet(line) == given
    assert load_fleet(line).to_json() == line
    json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    # The server has the file, a client the JSON.
    clients = given.prescribed_clients or 12
    for client in range(12):
        ours, theirs = (device_state(f, client, clients, 5, 3, 10**9) for f in (given, load_fleet(line)))
        assert ours == theirs
        assert ours.flops_per_second > 0 and ours.budget_bytes >= 0


def test_shipped_ratios() -> None:
    def ratios(name: str) -> list[float | None]:
        return [device.memory_ratio for device in load_fleet(name).devices]

    assert ratios("fedepth-fair") == [1 / 6, 1 / 3, 1 / 2, 1]
    assert ratios("fedepth-lack") == [1 / 8, 1 / 6, 1 / 2, 1]
    assert ratios("fedepth-surplus") == [1 / 6, 1 / 3, 1 / 2, 2]
    assert ratios("fedepth-fair-traced") == [0.341, 0.49, 0.65, 1]
    assert ratios("reference-step") == [1] and device_classes(load_fleet("reference-step")) == ["full"]
    assert all(ratio is not None and ratio < 1 for ratio in ratios("demo"))
    assert load_fleet("demo").assignment == "round-robin"
    assert {load_fleet(name).assignment for name in shipped_fleets() if name.startswith("fedepth")} == {"blocks"}


@pytest.mark.parametrize(
    "given",
    [
        fleet(A, B, assignment="list", clients=["b", "a"]),
        fleet(A, B, assignment="random", degradation={"memory": [0.0, 0.5]}),
        fleet(device("ä 'quoted' \"board\"", memory=1), description="two\nlines"),
        fleet(device("a"), assignment="memories", memories=["755MB", 100]),
        fleet(device("a"), assignment="uniform", memory_range=["1MB", "2MB"]),
        fleet(device("a", memory=1, keep=0.2), device("b", memory=1, keep=1.0)),
        fleet(A, degradation={"memory": [0.8, 1.0], "memory-floor": "60MB", "flops-left": [1.0, 0.1]}),
    ],
)
def test_json_round_trip(given: Fleet) -> None:
    assert load_fleet(given.to_json()) == given and "\n" not in given.to_json()


def test_load_from_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nassignment = "blocks"\n[[device]]\nname = "pi"\nmemory = "1.5 GiB"\n'
        "flops = 1000\nbandwidth = 10\ndisk-bandwidth = 20\n"
    )
    profile = DeviceProfile("pi", 3 * 2**29, None, 1000.0, 10.0, 20.0)
    assert load_fleet(str(path)) == Fleet("mine", "", "blocks", (profile,), (1.0,))


def test_json_says_no_more_than_it_must() -> None:
    """It is part of a run's settings: what a fleet does not use may not change them from version to version."""
    assert fleet(A).to_json() == (
        '{"name":"test","description":"","assignment":"blocks","memory-range":null,"clients":null,'
        '"device":[{"name":"a","memory":64000000,"memory-ratio":null,"flops":1000000000.0,"bandwidth":1000000.0,'
        '"disk-bandwidth":10000000.0,"weight":1.0}],"degradation":{"memory":[0.0,0.0],"flops":[0.0,0.0]}}'
    )


# ---- errors


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
    with pytest.raises(FleetError, match=r"broken\.toml: .*No such file"):
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
