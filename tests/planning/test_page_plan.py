"""The planner of paged steps beside all choices there are, and a run whose small boards page."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import a_training_config
from settings_helpers import settings_with
from torch import nn
from zoo_helpers import blueprint_of

from piecework.models.cascade import isolate_rng
from piecework.models.step import Segment, Step, with_step
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import CostModel
from piecework.planning.fit import AUTO, cheapest, seconds_of, slices, smallest
from piecework.planning.less_memory import in_less_memory
from piecework.planning.page_plan import BOARD, Layers, Speed, fewest_seconds, peak_of, seconds_on_top
from piecework.planning.part import Part, whole_model
from piecework.training.paged import PagedCascade
from piecework.training.pages import PageFiles
from piecework.training.settings.cases import require_accepted
from piecework.training.settings.shared import WAYS

ALL = (AUTO, *WAYS)


def all_pages(atoms: int) -> Iterator[tuple[Segment, ...]]:
    """All choices of segments; the last one, which has the head, may have no atom."""
    for cuts in product((False, True), repeat=atoms):
        ends = [0, *(position for position, cut in enumerate(cuts, start=1) if cut), atoms]
        found = tuple(pairwise(dict.fromkeys(ends[:-1] if cuts[-1] else ends)))
        yield (*found, (atoms, atoms)) if cuts[-1] else found


def made_up(seed: int, atoms: int) -> Layers:
    """Layers of up to 100 bytes and FLOPs in everything."""
    draw = random.Random(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(draw.randint(1, 100) for _ in range(count))

    return Layers(
        some(atoms + 1),
        some(atoms + 1),
        some(atoms + 1),
        tuple(map(float, some(atoms + 1))),
        some(atoms),
        some(atoms),
        5,
        some(atoms + 1),
    )


def extra_seconds(
    layers: Layers, pages: tuple[Segment, ...], speed: Speed, *, spilled: bool, ahead: bool = False
) -> float:
    """What pages add to a step in which every unit is read and written once: all segments but the last run twice.

    What is read ahead saves the shorter of the two times, of reading a segment and of computing the one before: once in the
    forward pass, and thrice in the backward pass, where the optimiser's state is read too.
    """
    twice = [*range(pages[-1][0])]
    outputs = [layers.outputs[last - 1] for _, last in pages[:-1]] if spilled else []
    moved = sum(layers.weights[atom] for atom in twice) + 2 * sum(outputs)
    accesses = len(twice) + 2 * len(outputs)
    saved = 0.0
    units = [[*range(*segment)] for segment in pages]
    units[-1].append(len(layers.kept))
    for before, after in pairwise(units if ahead else []):
        forward, back = (sum(layers.flops[unit] for unit in each) / speed.flops for each in (before, after))
        state = sum(layers.states[unit] for unit in after) if after is units[-1] else 0
        read = (sum(layers.weights[unit] for unit in after) + state) / speed.disk + len(after) * speed.latency
        read_back = sum(layers.weights[unit] + layers.states[unit] for unit in before) / speed.disk
        saved += min(forward, read) + min(3 * back, read_back + len(before) * speed.latency)
    return (
        sum(layers.flops[atom] for atom in twice) / speed.flops + moved / speed.disk + accesses * speed.latency - saved
    )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_pages_have_the_fewest_seconds_of_all(seed: int, spilled: bool, ahead: bool) -> None:
    """For every limit at which some choice just fits, and the byte below it."""
    layers, speed, form = made_up(seed, 6), Speed(3.0, 2.0, 1.0), {"spilled": spilled, "ahead": ahead}
    everything = [
        (peak_of(layers, pages, **form), extra_seconds(layers, pages, speed, **form))
        for pages in all_pages(6)
        if len(pages) > ahead
    ]
    assert len(everything) == 2**6 - ahead
    for limit in sorted({peak - below for peak, _ in everything for below in (0, 1)}):
        fitting = [seconds for peak, seconds in everything if peak <= limit]
        found = fewest_seconds(layers, limit, speed, **form)
        assert (found is None) == (not fitting)
        if found is not None:
            assert peak_of(layers, found, **form) <= limit
            assert extra_seconds(layers, found, speed, **form) == pytest.approx(min(fitting))
            assert seconds_on_top(layers, found, speed, **form) == pytest.approx(min(fitting))


def test_pages_by_hand() -> None:
    """Two atoms with weights of 10 and 30 bytes, of which 4 and 6 are kept with outputs of 2, and a head of 5 bytes.

    Whole: 45 of weights, and 4 + 6 kept, are 55. Cut behind the first atom, 2 wait while 30 + 5 + 6 are there: 43. Cut behind
    the second, 40 + 10 are there: 50. Cut behind both, 30 + 6 and 2: 38. In files those 2 are the input, which is there too.
    """
    none = (0, 0, 0)
    layers = Layers((10, 30, 5), none, none, (1.0, 1.0, 1.0), (4, 6), (2, 2), 0, none)
    pages = [((0, 2),), ((0, 1), (1, 2)), ((0, 2), (2, 2)), ((0, 1), (1, 2), (2, 2))]
    assert [peak_of(layers, each, spilled=False) for each in pages] == [55, 43, 50, 38]
    assert [peak_of(layers, each, spilled=True) for each in pages] == [55, 43, 50, 38]
    for limit, expected in ((55, 0), (54, 1), (43, 1), (42, 3), (38, 3)):
        assert fewest_seconds(layers, limit, Speed(1.0, 1.0), spilled=False) == pages[expected]
    assert fewest_seconds(layers, 37, Speed(1.0, 1.0), spilled=False) is None


def costs_of(name: str, **changes: float) -> tuple[CostModel, Part]:
    blueprint = blueprint_of(name, input_shape=(1, 16, 16), batch_norm="running", width=0.5)
    costs = CostModel(a_training_config(8, **changes), None, blueprint, ways=ALL)
    return costs, replace(whole_model(blueprint), pageable=True)


@pytest.mark.parametrize("name", ["cnn3", "lenet5"])
def test_the_planner_beside_all_pages(name: str) -> None:
    """Each traced: none that fits with 5 % of room takes fewer seconds, and none takes fewer bytes than the smallest.

    The profile says some bytes too many of a few segments, by which the planner spares the traces of all others.
    """
    costs, part = costs_of(name)
    everything = [
        with_step(part, Step(pages=pages, spilled=spilled, ahead=ahead))
        for pages in all_pages(len(part.atoms))
        for spilled in (False, True)
        for ahead in (False, True)
    ]
    full, least = costs.bytes(part), min(map(costs.bytes, everything))
    assert least < full
    for budget in (full - 1, (full + least) // 2, (full + 3 * least) // 4, least):
        fitting = [each for each in everything if costs.bytes(each) <= max(least, budget / 1.05)]
        found = cheapest(costs, part, budget, ("page",))
        assert found is not None
        assert costs.bytes(found) <= budget
        if budget > least:
            assert seconds_of(costs, found, BOARD) <= min(seconds_of(costs, each, BOARD) for each in fitting)
    assert costs.bytes(smallest(costs, part, ("page",))) == least
    assert cheapest(costs, part, least - 1, ("page",)) is None


@pytest.mark.slow
def test_the_fastest_of_all_ways_fits_and_is_not_slower_than_any_alone() -> None:
    costs, part = costs_of("lenet5")
    full, least = costs.bytes(part), costs.bytes(smallest(costs, part, ALL))
    steps = [
        with_step(part, Step(pages=pages, micro_batch=size))
        for pages in all_pages(2)
        for size in (0, *(each.micro_batch for each in slices(costs, part)))
    ]
    assert least <= 1.05 * min(map(costs.bytes, (*steps, *slices(costs, part))))
    for budget in range(least, full, (full - least) // 5):
        found = cheapest(costs, part, budget, ALL)
        assert found is not None
        assert costs.bytes(found) <= budget
        for way in set(WAYS) - (
            {"micro-batch"} if not found.micro_batch else set()
        ):  # the others are exact, and go first
            if (alone := cheapest(costs, part, budget, (way,))) is not None:
                assert seconds_of(costs, found, BOARD) <= seconds_of(costs, alone, BOARD)


@pytest.mark.slow
def test_advice_is_for_the_poorest_device_that_can_with_its_own_speed() -> None:
    """What pages are the fastest depends on the disk, and on the processor that reads while it computes."""
    costs, part = costs_of("lenet5")
    full, least = costs.bytes(part), costs.bytes(smallest(costs, part, ALL))
    middle, slow = (least + full) // 2, Speed(flops=1e8, disk=5e9)
    steps = {speed: costs.fit_part(part, middle, speed).step for speed in (BOARD, slow)}
    assert steps[BOARD] != steps[slow]
    for speed, other in ((BOARD, slow), (slow, BOARD)):
        found = in_less_memory(costs, part, [(full, other), (middle, speed), (least - 1, other)])
        assert found is not None
        assert (found.part.step, found.least, found.plain) == (steps[speed], least, full)
    nobody = in_less_memory(costs, part, [(least - 1, BOARD)])
    assert nobody is not None
    assert nobody.bytes == least


def test_clipping_rules_out_steps_that_never_have_all_gradients() -> None:
    costs, part = costs_of("lenet5", clip_norm=5.0)
    step = costs.fit_part(part, 0)
    assert not step.in_backward
    assert not step.pages
    assert step.step


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training__clip_norm": 5.0},
            r"memory\.fit = 'page,recompute': training\.clip-norm = 5 needs the norm of all",
        ),
        (
            {"strategy": "heterofl"},
            r"clients of heterofl do not train .* which alone can page; .* use one of .*fedavg, ",
        ),
        ({"strategy": "fedprox", "fedprox__mu": 0.1}, r"clients of fedprox .* \(they do with fedprox\.mu = 0\.0\)"),
    ],
)
def test_a_way_that_a_run_cannot_go_is_refused_if_it_is_named(changes: dict[str, Any], said: str) -> None:
    values = {"strategy": "fedavg"} | changes
    with pytest.raises(ValueError, match=said):
        require_accepted(settings_with(memory__fit="page,recompute", **values), (), values["strategy"])
    require_accepted(settings_with(memory__fit="auto", **values), (), values["strategy"])
    require_accepted(settings_with(memory__fit="recompute", **values), (), values["strategy"])


OWN = """
from torch import nn

def make(classes, shape):
    layers = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, classes)
    net = nn.Sequential(*layers)
    net[0].requires_grad_(False)
    return net
"""


def test_own_modules_with_batch_norms_and_a_frozen_beginning_page(tmp_path: Path) -> None:
    """Their norms count batches in tensors whose values a trace does not know, and no gradient passes their first atom."""
    (tmp_path / "own.py").write_text(OWN, "utf-8")
    blueprint = build_blueprint(
        f"{tmp_path / 'own.py'}:make", num_classes=10, input_shape=(1, 8, 8), batch_norm="running"
    )
    costs = CostModel(a_training_config(8), None, blueprint)
    part = replace(whole_model(blueprint), pageable=True)
    found = smallest(costs, part, ("page",))
    assert found.pages
    assert costs.bytes(found) < costs.bytes(part)

    def load(unit: str) -> nn.Module:
        with isolate_rng(0):
            return blueprint.build_unit(unit)

    config = with_step(costs.training_config, found)
    cascade = PagedCascade(blueprint, part.atoms, part.head, load, config, PageFiles(tmp_path / "pages"))
    before = cascade.load_unit("atoms.0").state_dict()
    cascade.step(torch.ones(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64))
    after = cascade.load_unit("atoms.0").state_dict()
    assert all(
        torch.equal(after[name], before[name]) for name in before if "running" not in name and "tracked" not in name
    )
