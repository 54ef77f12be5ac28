"""What reading ahead takes and saves: by hand, in traces, in plans and on the clock of devices."""

from dataclasses import replace

import pytest
from helpers import a_training_config, tiny_settings
from zoo_helpers import blueprint_of

from piecework.device_profiles.memory import Overlap
from piecework.device_profiles.profile import DeviceState
from piecework.models.step import Step, with_step
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.fit import cheapest, seconds_of, smallest
from piecework.planning.page_cost import paged_cost
from piecework.planning.page_plan import Layers, Speed, fewest_seconds, peak_of, seconds_on_top
from piecework.planning.part import whole_model
from piecework.planning.timing import work_seconds
from piecework.strategies import find_method
from piecework.training.attacks import Attack

PAGES = ((0, 1), (1, 2), (2, 2))


def test_pages_that_are_read_ahead_by_hand() -> None:
    """Two atoms and a head: 10, 30 and 5 bytes of weights, 1, 3 and 2 of the optimiser's state, 4 and 6 kept, outputs of 2.

    Cut behind the first atom, the second segment takes 30 + 5, 6 kept and 3 + 2 of state, 2 wait, and 10 + 1 come: 59. Behind
    the second, 40 with 10 kept and 4 of state are 54, to which nothing comes. Behind both, the second segment takes 30 + 6 + 3,
    2 wait, and 10 + 1 come: 52.

    Without reading ahead, cutting behind the first atom adds its 20 FLOPs and 10 bytes: 30 s, at one each a second. Reading
    35 + 5 while it computes for 20, and 10 + 1 while the second segment computes for 3 * 30, saves 20 + 11.
    """
    layers = Layers((10, 30, 5), (0, 0, 0), (0, 0, 0), (20.0, 20.0, 10.0), (4, 6), (2, 2), 0, (1, 3, 2))
    pages, speed = [((0, 1), (1, 2)), ((0, 2), (2, 2)), PAGES], Speed(1.0, 1.0)
    assert [peak_of(layers, each, spilled=False, ahead=True) for each in pages] == [59, 54, 52]
    assert seconds_on_top(layers, pages[0], speed, spilled=False) == 30
    assert seconds_on_top(layers, pages[0], speed, spilled=False, ahead=True) == 30 - 20 - 11
    for limit, expected in ((59, pages[0]), (53, PAGES), (51, None)):
        assert fewest_seconds(layers, limit, speed, spilled=False, ahead=True) == expected


def test_what_a_trace_finds_by_hand() -> None:
    """Two atoms and a head of one neuron each, whose weight and bias are 8 bytes, as is their momentum, in a file for each.

    A forward pass is 2 FLOPs, and a backward pass 2 for the weight and 2 for the input, which the first atom does not need.
    While the first atom runs, the second is read; while this one does, the head and its momentum; while the head moves, which
    takes 2 + 4, the second atom with its momentum; and while that one does, the first one.
    """
    blueprint = blueprint_of("mlp", num_classes=1, input_shape=(1,), hidden=1, layers=2)
    config = a_training_config(1, pages=PAGES)
    plain, cost = (paged_cost(blueprint, (0, 1), "head", replace(config, ahead=ahead)) for ahead in (False, True))
    atom = Overlap(6, 16, 3)
    assert cost.overlaps == (Overlap(2, 8, 1), Overlap(2, 16, 3), atom, atom)
    assert not plain.overlaps
    assert replace(cost, overlaps=(), peak_bytes=0) == replace(plain, peak_bytes=0)
    assert Speed(1.0, 4.0, 0.5).hidden(cost.overlaps) == 2 + 2 + 2 * (4 + 1.5)
    assert Speed(1e9, 4.0, 0.5).hidden(cost.overlaps) == pytest.approx(0, abs=1e-7)

    # Each of an attack's three gradients passes forward, where what moves is not read, and back, at 2 + 2 FLOPs a segment.
    attacked = paged_cost(blueprint, (0, 1), "head", replace(config, ahead=True, attack=Attack("l2", 1.0, 1.0, 3)))
    assert attacked.overlaps[:4] == cost.overlaps
    read = [Overlap(3 * flops, 3 * 8, 3) for flops in (2, 2, 4, 4)]
    assert attacked.overlaps[4:] == tuple(read)


@pytest.mark.parametrize("name", ["cnn3", "lenet5"])
def test_a_device_reads_ahead_where_memory_has_room_and_reading_takes_time(name: str) -> None:
    blueprint = blueprint_of(name, input_shape=(1, 16, 16), batch_norm="running", width=0.5)
    costs, part = CostModel(a_training_config(8), None, blueprint), replace(whole_model(blueprint), pageable=True)
    atoms = tuple((atom, atom + 1) for atom in range(len(part.atoms)))
    alone, ahead = (with_step(part, Step(pages=atoms, ahead=ahead)) for ahead in (False, True))
    assert costs.bytes(alone) < costs.bytes(ahead) < costs.bytes(part)
    slow, fast = Speed(4e9, 1e6), Speed(4e9, 1e15)
    least = smallest(costs, part, ("page",))
    tight, roomy = (cheapest(costs, part, costs.bytes(each), ("page",), slow) for each in (least, ahead))
    assert tight is not None
    assert not tight.ahead
    assert roomy is not None
    assert roomy.ahead
    assert roomy.step.endswith("reads ahead")
    assert costs.bytes(roomy) <= costs.bytes(ahead)
    hidden = slow.hidden(costs.trace(roomy).overlaps)
    assert hidden > 0
    assert seconds_of(costs, roomy, slow) == seconds_of(costs, replace(roomy, ahead=False), slow) - hidden
    assert seconds_of(costs, roomy, fast) == pytest.approx(seconds_of(costs, replace(roomy, ahead=False), fast))


def test_the_clock_of_a_device_that_reads_ahead() -> None:
    """100 examples are four batches of 25 in the mean, which compute for 25/32 of the time of a whole one. Three read ahead."""
    settings = tiny_settings(training__batch_size=32, training__local_epochs=1, strategy="fedavg")
    blueprint = blueprint_of("cnn3", input_shape=(1, 16, 16), width=0.5)
    cut = find_method("fedavg").make_cut(blueprint, cost_model_for(settings, blueprint), settings)
    atoms = tuple((atom, atom + 1) for atom in range(len(blueprint.atoms)))
    parts = [replace(cut.stages[0].parts[0], pages=atoms, ahead=ahead) for ahead in (False, True)]
    state = DeviceState("board", 10**9, 1e9, 1e6, 1e7, disk_latency=0.001)
    seconds = [work_seconds(cut, cut.cost_model, [part], [100], 100, state, (300, 200)) for part in parts]
    saved = 3 * sum(
        min(flops * 25 / 32 / 1e9, read / 1e7 + accesses * 0.001)
        for flops, read, accesses in cut.cost_model.trace(parts[1]).overlaps
    )
    assert seconds[0] - seconds[1] == pytest.approx(saved)
    assert saved > 0
