"""What the container benchmarks conclude from; the containers themselves are theirs."""

from dataclasses import replace

import pytest
from helpers import a_training_config

from benchmarks.boards import anonymous_bytes, role_of
from benchmarks.container_piece import figure
from benchmarks.containers import (
    Trial,
    budget_under,
    maxima,
    part_name,
    parts_to_try,
    piece_name,
    pieces_to_try,
    row,
    same_weights,
    summary,
)
from piecework.models.partition import atom_names
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import CostModel
from piecework.planning.part import Part

NAMES = ["stem", "block1", "block2", "block3"]
FITTED = Trial(
    512_000_000, "resnet18", "stem", 130_000_000, 176_000_000, True, "trained", 444_000_000, 9_000_000, 130_000_000, 1.0
)


def cost(piece: tuple[int, ...]) -> int:
    return sum((30, 80, 50, 20)[atom] for atom in piece)


def test_what_is_tried() -> None:
    assert pieces_to_try(4, cost, 100, NAMES) == {
        (0,): True,
        (0, 1): False,
        (1,): True,
        (1, 2): False,
        (2, 3): True,
        (0, 1, 2, 3): False,
    }
    # what is too large alone is excluded, and a piece goes on behind it
    assert pieces_to_try(4, cost, 70, NAMES) == {
        (1,): False,
        (0,): True,
        (0, 2): False,
        (2, 3): True,
        (0, 1, 2, 3): False,
    }
    assert pieces_to_try(4, cost, 180, NAMES) == {(0, 1, 2, 3): True}
    assert not any(pieces_to_try(4, cost, 10, NAMES).values())


def test_the_whole_model_is_also_tried_with_the_step_that_fits() -> None:
    blueprint = build_blueprint("convnet", num_classes=10, input_shape=(1, 16, 16))
    costs = CostModel(a_training_config(16), None, blueprint, ways=("recompute", "micro-batch"))
    whole, names = Part(blueprint, tuple(range(len(blueprint.atoms)))), atom_names(blueprint)
    full = costs.bytes(whole)
    found = parts_to_try(costs, blueprint, full - 1)
    assert found[whole] is False
    (fitted,) = [part for part in found if part.step]
    assert (fitted.atoms, found[fitted]) == (whole.atoms, True)
    assert costs.bytes(fitted) < full
    assert part_name(fitted, names) == f"the whole model, {fitted.step}"
    assert parts_to_try(costs, blueprint, full) == {whole: True}
    assert [part.atoms for part in parts_to_try(costs, blueprint, full - 1, whole=True)] == [whole.atoms] * 2
    paged = CostModel(a_training_config(16), None, blueprint, ways=("page",))
    assert any(part.pages for part in parts_to_try(paged, blueprint, full - 1, whole=True))
    assert [fits for part, fits in parts_to_try(costs, blueprint, 1).items() if part.step] == [False]
    # without memory.fit, the plain step is the only one
    plain = parts_to_try(CostModel(a_training_config(16), None, blueprint), blueprint, full - 1)
    assert [part for part in plain if part.atoms == whole.atoms] == [whole]


def test_limits() -> None:
    assert budget_under("512MB", 200, 100_000_000) == 412_000_000
    assert budget_under("0.3x", 200, 100_000_000) == 60


def test_a_piece_has_a_name() -> None:
    assert [piece_name(piece, NAMES) for piece in [(1,), (1, 2), (0, 2, 3), (0, 1, 2, 3)]] == [
        "block1",
        "block1 to block2",
        "stem and block2 to block3",
        "the whole model",
    ]


def test_planner_and_trial() -> None:
    killed = replace(FITTED, predicted=240_000_000, fits=False, outcome="killed")
    in_slack = replace(FITTED, predicted=190_000_000, fits=False, largest=503_000_000, counted=190_000_000)
    wrong = replace(in_slack, predicted=201_000_000)
    slack = 24_000_000
    assert [trial.agrees for trial in (FITTED, killed, in_slack, wrong)] == [True, True, False, False]
    assert [trial.in_slack(slack) for trial in (FITTED, killed, in_slack, wrong)] == [False, False, True, False]
    assert row(in_slack, slack)[4:8] == ("190 MB", "14 MB", "too large", "trained, in the slack")
    first, minimum, above = summary([FITTED, killed, in_slack], 312_000_000, slack)
    assert first == "2 of 3 agree, 1 trained in the slack (at most 14 MB over the budget)"
    assert minimum.endswith("killed: 64 MB")
    assert "at most 2 MB above floor + predicted" in above


def test_weights_of_whole_models() -> None:
    whole = replace(FITTED, piece="the whole model", weights=7)
    other = replace(whole, piece="the whole model, micro-batches of 8", weights=8)
    assert same_weights([FITTED, whole, replace(other, outcome="killed"), replace(other, weights=7)]) == [
        "resnet18: where the whole model trained (2 times), different weights in the end: 1"
    ]
    assert same_weights([whole, other])[0].endswith(": 2")


def test_figures_of_a_container() -> None:
    lines = ['{"anonymous": 10}', '{"anonymous": 30, "kernel": 2}', '{"done": 5}', '{"anonym']
    assert maxima(lines) == {"anonymous": 30, "kernel": 2, "done": 5}


def test_figures_of_the_kernel() -> None:
    assert figure("anon 12\nfile 5\nslab 3\n", "anon", "slab") == 15
    with pytest.raises(ValueError, match="has no sock"):
        figure("anon 12\n", "anon", "sock")
    assert anonymous_bytes("0-1 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nAnonymous:    7 kB\n") == 7168
    with pytest.raises(ValueError, match="Anonymous"):
        anonymous_bytes("")


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["python", "/opt/bin/flower-supernode", "--insecure"], "supernode"),
        (["/opt/bin/flwr-clientapp", "--token", "x"], "task"),
        (["python", "-m", "something", "flower-superexec"], None),
        ([], None),
    ],
)
def test_roles(command: list[str], role: str | None) -> None:
    assert role_of(command) == role
