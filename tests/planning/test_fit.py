"""Ways to fit a step: optimal segments, the order of preference, and whole models on small devices."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import TRIO, a_training_config, fleet_json, model_of, run_local, same
from zoo_helpers import blueprint_of

from piecework.models.step import Segment
from piecework.planning.costs import CostModel
from piecework.planning.fit import cheapest, slices, smallest
from piecework.planning.part import Part, whole_model
from piecework.planning.recompute_plan import fewest_flops
from piecework.planning.step_cost import ActivationProfile
from piecework.report.display import step_rows
from piecework.report.run_page import write_report
from piecework.training.settings import Settings

BOTH = ("recompute", "micro-batch")


def segmentations(first: int, atoms: int) -> Iterator[tuple[Segment, ...]]:
    """All choices of segments of the atoms from `first` on; every atom is in one segment or in none."""
    if first == atoms:
        yield ()
        return
    yield from segmentations(first + 1, atoms)
    for last in range(first + 1, atoms + 1):
        yield from (((first, last), *rest) for rest in segmentations(last, atoms))


def costs_of(name: str, batch_norm: str = "running") -> tuple[CostModel, Part]:
    blueprint = blueprint_of(name, input_shape=(1, 16, 16), batch_norm=batch_norm)
    return CostModel(a_training_config(16), None, blueprint), whole_model(blueprint)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet", "lenet5", "cnn3"])
def test_segments_are_optimal(name: str) -> None:
    """Beside all choices there are, each traced: none that fits takes fewer FLOPs."""
    costs, part = costs_of(name)
    everything = [replace(part, recompute=chosen) for chosen in segmentations(0, len(part.atoms))]
    full, least = costs.bytes(part), min(map(costs.bytes, everything))
    assert least < full
    for budget in (full - 1, (full + least) // 2, (full + 3 * least) // 4, least):
        best = min(costs.trace(each).flops for each in everything if costs.bytes(each) <= budget)
        found = cheapest(costs, part, budget, ("recompute",))
        assert found is not None
        assert costs.bytes(found) <= budget
        assert costs.trace(found).flops == best
    assert costs.bytes(smallest(costs, part, ("recompute",))) == least
    assert cheapest(costs, part, least - 1, ("recompute",)) is None


def test_fewest_flops_by_hand() -> None:
    """Three atoms keep 4, 3 and 2 bytes with outputs of 1; peaks are 10, 12 and 14 bytes, and the head's is 14.

    At 13 bytes one must be spared: recomputing the first atom spares 3 of 4 bytes, the second 2, and the third 1.
    """
    profile = ActivationProfile((4, 3, 2), (1, 1, 1), (10, 12, 14, 14))
    assert fewest_flops(profile, [5, 3, 1], 14) == ()
    assert fewest_flops(profile, [5, 3, 1], 13) == ((1, 2),)
    assert fewest_flops(profile, [2, 3, 1], 13) == ((0, 1),)
    assert fewest_flops(profile, [5, 3, 1], 10) == (
        (0, 1),
        (1, 2),
    )  # as one segment their activations are live together
    assert fewest_flops(profile, [5, 3, 1], 7) is None


def test_the_preferred_way_is_tried_first() -> None:
    costs, part = costs_of("convnet")
    budget = int(0.8 * costs.bytes(part))
    recomputed, sliced = (cheapest(costs, part, budget, ways) for ways in (BOTH, BOTH[::-1]))
    assert recomputed is not None
    assert sliced is not None
    assert (recomputed.micro_batch, bool(recomputed.recompute)) == (0, True)
    assert (sliced.micro_batch, sliced.recompute) == (8, ())
    assert cheapest(costs, part, costs.bytes(part), BOTH) == part
    assert cheapest(costs, part, budget, ()) is None


@pytest.mark.slow
def test_norms_and_activations_again_alone_and_with_segments() -> None:
    """The fastest step has the fewest segments beside norms and activations, which count no FLOPs."""
    costs, part = costs_of("convnet")
    cheap = replace(part, cheap=True)
    assert costs.trace(cheap).flops == costs.trace(part).flops
    assert cheapest(costs, part, costs.bytes(cheap), ("recompute-cheap", *BOTH)) == cheap
    assert smallest(costs, part, ("recompute-cheap",)) == cheap
    everything = [replace(cheap, recompute=chosen) for chosen in segmentations(0, len(part.atoms))]
    budget = (costs.bytes(cheap) + min(map(costs.bytes, everything))) // 2
    alone = cheapest(costs, part, budget, ("recompute",))
    found = cheapest(costs, part, budget, ("auto", "recompute-cheap", "recompute"))
    assert alone is not None
    assert found is not None
    assert found.step.startswith("recomputes norms and activations, recomputes ")
    best = min(costs.trace(each).flops for each in everything if costs.bytes(each) <= budget)
    assert best == costs.trace(found).flops < costs.trace(alone).flops


@pytest.mark.slow
def test_ways_together_take_no_more_than_some_of_them() -> None:
    """The fewest bytes here need segments alone: those chosen with norms and activations computed again take more."""
    blueprint = blueprint_of("vgg16", width=0.125, batch_norm="running")
    costs, part = CostModel(a_training_config(8), None, blueprint), whole_model(blueprint)
    some = ("step-in-backward", "recompute")
    together = smallest(costs, part, (*some, "recompute-cheap"))
    assert together == smallest(costs, part, some)
    budget = costs.bytes(together)
    assert cheapest(costs, part, budget, ("auto", *some, "recompute-cheap")) == together


def test_both_ways_fit_where_neither_does_alone() -> None:
    costs, part = costs_of("convnet")
    alone = min(costs.bytes(smallest(costs, part, (way,))) for way in BOTH)
    found = cheapest(costs, part, alone - 1, BOTH)
    assert found is not None
    assert found.micro_batch
    assert found.recompute
    assert costs.bytes(found) < alone


def test_no_micro_batch_of_one_example_for_a_batch_norm() -> None:
    """A batch of two cannot be cut, whatever memory there is."""
    small = CostModel(a_training_config(2), None, (part := costs_of("convnet")[1]).blueprint)
    assert cheapest(small, part, 1000, BOTH) is None
    assert [part.micro_batch for part in slices(*costs_of("convnet"))] == [8, 4, 3]
    assert [part.micro_batch for part in slices(*costs_of("lenet5"))] == [8, 4, 2, 1]


POOR = TRIO | {"strategy": "fedavg", "fleet": fleet_json(poor=0.9), "num_rounds": 2}


@pytest.mark.slow
def test_small_devices_train_the_whole_model_exactly(tmp_path: Path) -> None:
    """Nine tenths of the memory: nobody could train. Recomputing, all do, and the model is that of large devices."""
    rich = run_local(tmp_path / "rich", **POOR | {"fleet": "unlimited"})
    poor = run_local(tmp_path / "poor", **POOR | {"memory__fit": "recompute"})
    assert same(model_of(rich), model_of(poor))
    cheap = run_local(tmp_path / "cheap", **POOR | {"memory__fit": "recompute-cheap"})
    assert same(model_of(rich), model_of(cheap))
    for client in cheap.rounds()[0]["clients"]:
        assert (client["status"], client["step"]) == ("ok", "recomputes norms and activations")
        assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
    for record, other in zip(poor.rounds(), rich.rounds(), strict=True):
        for client, plain in zip(record["clients"], other["clients"], strict=True):
            assert client["status"] == "ok"
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
            assert client["step"].startswith("recomputes ")
            assert client["flops"] == pytest.approx(client["step_flops"] * plain["flops"])
            assert client["step_flops"] > 1
            assert (plain["step"], plain["step_flops"]) == ("", 1)
    assert step_rows(rich.rounds()) == []
    ((device, step, factor, tasks),) = step_rows(poor.rounds())
    assert (device, step, tasks) == ("poor", client["step"], "6")
    assert factor == f"{client['step_flops']:.2f} x"
    assert step in write_report(poor).read_text(encoding="utf-8")


def test_micro_batches_on_small_devices(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **POOR | {"memory__fit": "micro-batch"})
    assert "batch norms take the statistics of a micro-batch" in (run_dir.coverage() or {})["says"]
    for client in run_dir.rounds()[-1]["clients"]:
        assert (client["status"], client["step"]) == ("ok", "micro-batches of 8")
        assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]


def test_who_cannot_train_in_any_way_says_what_the_least_is(tmp_path: Path) -> None:
    run = run_local(
        tmp_path, **POOR | {"fleet": fleet_json(poor=0.01, rich=1.0), "memory__fit": "recompute,micro-batch"}
    )
    costs = {client["device"]: client for client in run.rounds()[0]["clients"]}
    assert costs["rich"]["status"] == "ok"
    assert costs["poor"]["status"] == "memory"
    assert costs["poor"]["allowed"] < costs["poor"]["needed"] < costs["rich"]["measured_peak"]
    said = r"training the whole model \(micro-batches of 3, recomputes \d atoms?\) needs [\d,]+ bytes"
    assert re.match(said, costs["poor"]["reason"])


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"memory\.fit = 'micro-batch,swap': 'swap' is none of auto, step-in-backward, .*page$"
    ):
        Settings.from_run_config({"memory.fit": "micro-batch,swap", "strategy": "fedavg"})
