"""Fleets: who has which device, what a round takes, shipped fleets and JSON."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fleet_helpers import A, B, device
from helpers import budgets

from piecework.device_profiles.fleet import Fleet, device_classes, device_of, device_state, load_fleet
from piecework.device_profiles.fleet_file import FleetError, shipped_fleets
from piecework.device_profiles.profile import DeviceProfile, DeviceState
from piecework.planning.page_plan import speed_of


def fleet(*devices: dict[str, Any], assignment: str = "blocks", **keys: Any) -> Fleet:
    table = {"name": "test", "assignment": assignment, "device": list(devices)}
    return load_fleet(json.dumps(table | {key.replace("_", "-"): value for key, value in keys.items()}))


ABCD = [device(name, memory_ratio=0.5) for name in "abcd"]


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
