"""Which clients a round of ProFL is drawn from, what they train, and what plans and records say of it."""

from pathlib import Path
from typing import Any

import pytest
from helpers import FEW, clients_of, fleet_json, run_local, tiny_settings

from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.server_app.records import RunDir

# Steps 1, 2 and 3 need 854,416, 807,184 and 499,976 bytes, the output layer alone 253,976 (in step 3 255,008). Of the four
# clients, `rich` has memory for all steps, `some` for step 3, `poor` for the output layer alone, and `least` for nothing.
GROWING: dict[str, Any] = {
    "clients": 4,
    "clients_per_round": 0,
    "dataset": FEW,
    "strategy": "profl",
    "architecture__batch_norm": "running",
    "training__local_iterations": 2,
    "profl__shrinking": False,
    "profl__stage_rounds": 1,
    "num_rounds": 3,
    "fleet": fleet_json(rich=1_545_852, some=721_397, poor=309_170, least=206_113),
}
BLOCKS = ([0, 1, 5, 6], [2, 3, 6], [4])


def trained(run_dir: RunDir) -> list[dict[int, list[list[int]]]]:
    """What each client trained, by round; clients that were not asked are left out."""
    return [
        {client["client"]: client["pieces"] for client in clients_of(run_dir, record["round"])}
        for record in run_dir.rounds()
    ]


def test_only_who_affords_the_block_or_no_block_is_asked(tmp_path: Path) -> None:
    """Client 1 has memory for step 3 only: it gets no task before. Client 2 trains the output layer in all steps."""
    run_dir = run_local(tmp_path, **GROWING)
    first, second, third = BLOCKS
    assert trained(run_dir) == [{0: [first], 2: [[]]}, {0: [second], 2: [[]]}, {0: [third], 1: [third], 2: [[]]}]
    for record in run_dir.rounds():
        assert all(client["status"] == "ok" for client in record["clients"])
        assert all(0 < client["measured_peak"] <= client["predicted_peak"] for client in record["clients"])
    assert all(client["measured_peak"] == client["predicted_peak"] for client in clients_of(run_dir, 1))
    assert [(r["block_clients"], r["output_layer_clients"]) for r in run_dir.rounds()] == [(1, 1), (1, 1), (2, 1)]


def test_all_clients_may_be_asked(tmp_path: Path) -> None:
    """Who has no memory for the step trains the output layer, and client 3 refuses."""
    run_dir = run_local(tmp_path, **GROWING | {"profl__cohort": "all"})
    first, second, third = BLOCKS
    assert trained(run_dir) == [
        {0: [first], 1: [[]], 2: [[]], 3: []},
        {0: [second], 1: [[]], 2: [[]], 3: []},
        {0: [third], 1: [third], 2: [[]], 3: []},
    ]
    assert [record["clients"][3]["status"] for record in run_dir.rounds()] == ["memory"] * 3
    assert [(r["block_clients"], r["output_layer_clients"]) for r in run_dir.rounds()] == [(1, 2), (1, 2), (2, 1)]


def test_statistics_and_maps_ask_who_has_memory_for_them(tmp_path: Path) -> None:
    """Statistics need 206,216 bytes, the maps of blocks 3 and 2 498,432 and 432,816. They count no one who trains a block."""
    shrinking = {"profl__shrinking": True, "profl__distil_rounds": 1, "num_rounds": 5}
    rounds = run_local(tmp_path, **GROWING | shrinking).rounds()
    assert [record["stage"] for record in rounds] == [
        *("statistics", "shrinking, step 3", "map, block 3", "shrinking, step 2", "map, block 2")
    ]
    asked = [[client["client"] for client in record["clients"]] for record in rounds]
    assert asked == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 2], [0, 1]]
    counts = [(record["block_clients"], record["output_layer_clients"]) for record in rounds]
    assert counts == [(None, None), (2, 1), (None, None), (1, 1), (None, None)]


def test_a_round_has_as_many_clients_as_are_wanted_if_enough_are_eligible(tmp_path: Path) -> None:
    """Two of the eligible clients 0 and 2 are drawn in step 1, although half of all clients are not eligible."""
    run_dir = run_local(tmp_path, **GROWING | {"clients_per_round": 2, "num_rounds": 1})
    assert list(trained(run_dir)[0]) == [0, 2]


@pytest.mark.parametrize(
    ("cohort", "participation", "first", "excluded"),
    [
        ("eligible", [0.5, 0.5, 0.75], [0.25, 0.25], [[1, 3], [1, 3], [3]]),
        ("all", [0.75, 0.75, 0.75], [0.5, 0.25], [[3], [3], [3]]),
    ],
)
def test_plans_count_both_groups(
    cohort: str, participation: list[float], first: list[float], excluded: list[list[int]]
) -> None:
    settings = tiny_settings(**GROWING | {"dataset": "digits", "profl__cohort": cohort})
    stages = make_plan(settings, ask(settings))["fleet"]["stages"]
    assert [stage["participation"] for stage in stages] == participation
    assert [stage["excluded_clients"] for stage in stages] == excluded
    assert [row["fraction"] for row in stages[0]["trains"]] == first
    assert {row["what"] for row in stages[0]["trains"]} == {"conv1+conv2 + output module", "the output layer"}
