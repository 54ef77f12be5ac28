"""Batches and seconds of a client's work: what a plan says before it and a record after it."""

import numpy as np
import pytest
import torch
from helpers import a_blueprint, random_examples, tiny_settings
from torch import Tensor

from piecework.device_profiles.clock import task_seconds
from piecework.device_profiles.profile import DeviceState
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.costs import cost_model_for
from piecework.planning.timing import (
    batches_of,
    local_work,
    made_between,
    round_flops,
    seconds_between,
    swapped_seconds,
    work_flops,
    work_seconds,
)
from piecework.strategies import find_method
from piecework.training.loop import LocalTrainer
from piecework.training.memory_cap import MemoryCap
from piecework.training.setup import training_config_for


@pytest.mark.parametrize(
    ("examples", "changes", "batches", "seen"),
    [
        (40, {"training__local_epochs": 3}, 6, 120),  # 32 and 8, three times: not 120 examples in 4 batches
        (64, {"training__local_epochs": 1}, 2, 64),
        (64, {"training__local_iterations": 5}, 5, 160),
        (40, {"training__local_iterations": 5}, 5, 112),  # 32 and 8, twice, and 32
        (10, {"training__local_iterations": 5}, 5, 50),
        (33, {"training__local_epochs": 3}, 3, 96),  # the last batch would have one example
        (33, {"training__local_iterations": 5}, 5, 160),
    ],
)
def test_batches_of_full_and_partial_epochs(examples: int, changes: dict[str, int], batches: int, seen: int) -> None:
    settings = tiny_settings(training__batch_size=32, **changes)
    assert local_work(settings, examples) == (batches, seen)
    assert batches_of(settings, seen) == batches
    assert batches_of(settings, 0) == 0


class Counter(LocalTrainer):
    """Draws batches as any trainer does, and computes nothing."""

    def _begin(self) -> None:
        pass

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        return torch.zeros(())


@pytest.mark.parametrize("changes", [{"training__local_epochs": 2}, {"training__local_iterations": 7}])
@pytest.mark.parametrize("examples", [2, 8, 9, 15, 16, 17, 25, 57])
def test_plans_count_the_examples_that_are_drawn(examples: int, changes: dict[str, int]) -> None:
    """Otherwise a plan's FLOPs and seconds are not those of the run: 7 batches of 8 out of 9 examples are not 56 examples."""
    settings = tiny_settings(training__batch_size=8, **changes)
    trainer = Counter(list, training_config_for(settings, 1.0))
    data, rng = random_examples(examples, (1, 8, 8)), np.random.default_rng(0)
    for _ in trainer.epochs():
        trainer.epoch(data, rng, MemoryCap(0, enforced=False), "train")
    assert local_work(settings, examples) == (trainer.batches, trainer.seen)


def test_seconds_by_hand() -> None:
    """Two pieces on 40 and on 20 examples, of which half the FLOPs are executed, with features of 40 between them."""
    settings = tiny_settings(training__batch_size=32, training__local_epochs=1)
    blueprint = a_blueprint()
    cut = find_method("fedepth").make_cut(blueprint, cost_model_for(settings, blueprint), settings)
    parts = [cut.part(cut.item(atoms)) for atoms in ((0, 1, 2), (3, 4))]
    state = DeviceState("board", 10**9, 1e9, 1e6, 1e7, disk_latency=0.25)
    flops, flops2 = (cut.cost_model.trace(part).flops for part in parts)
    held, held2 = (part.state_bytes for part in parts)
    entering, entering2 = (part.input_bytes for part in parts)
    assert entering == 4 * 64
    computed = 0.5 * (flops * 40 / 32 + flops2 * 20 / 32)
    assert work_flops(cut.cost_model, parts, [40, 20], 0.5) == computed
    disk = held + entering * 40 + held2 + entering2 * 20
    expected = computed / 1e9 + (300 + 200) / 1e6 + disk / 1e7 + (2 + 1) * 0.25
    between = seconds_between(settings, parts, 40, state)
    assert between > 0
    found = work_seconds(cut, cut.cost_model, parts, [40, 20], 40, state, (300, 200), 0.5)
    assert found == pytest.approx(expected + between, rel=1e-12)


def test_features_between_pieces_by_hand() -> None:
    """Three pieces on 40 examples: the first two run once more, and again in a second epoch if features are not kept."""
    settings = tiny_settings(training__batch_size=32, training__local_epochs=2)
    blueprint = a_blueprint()
    cut = find_method("fedepth").make_cut(blueprint, cost_model_for(settings, blueprint), settings)
    parts = [cut.part(cut.item(atoms)) for atoms in ((0, 1), (2,), (3, 4))]
    one, two = (sum(layer_statistics(blueprint, f"atoms.{a}").flops for a in part.atoms) for part in parts[:2])
    entering, behind_one, behind_two = (part.input_bytes for part in parts)
    made = made_between(settings, parts, 40)
    assert made == (40 * (one + two), 40 * (entering + behind_one), 40 * (behind_one + behind_two), 4)
    state = DeviceState("board", 10**9, 1e9, 1e6, 1e7, disk_latency=0.25, disk_write_bandwidth=5e6)
    expected = made.flops / 1e9 + made.read / 1e7 + made.written / 5e6 + 8 * 0.25
    assert seconds_between(settings, parts, 40, state) == pytest.approx(expected, rel=1e-12)
    rounded = made_between(settings.with_values({"memory.features": "bfloat16"}), parts, 40)
    assert rounded.written == made.written // 2
    again = made_between(settings.with_values({"memory.feature-cache": False}), parts, 40)
    assert again.flops == 40 * (3 * one + 2 * two)
    whole = [cut.part(cut.whole)]
    assert not any(made_between(settings, whole, 40))
    assert not any(made_between(settings, [*parts[:1], *whole], 40)), "the whole model reads no features"
    steps = work_flops(cut.cost_model, parts, [80] * 3)
    assert round_flops(settings, cut.cost_model, parts, 40) == steps + made.flops


def test_swapping_takes_what_the_clock_of_batches_says() -> None:
    """64 examples are two batches, each of which goes to the disk and back: the device has next to no memory."""
    settings = tiny_settings(training__batch_size=32, training__local_epochs=1, strategy="fedavg")
    blueprint = a_blueprint()
    cut = find_method("fedavg").make_cut(blueprint, cost_model_for(settings, blueprint), settings)
    state, (part,) = DeviceState("board", 100_000, 1e9, 1e6, 1e7), cut.stages[0].parts
    batch = cut.cost_model.batch(part, 32)
    assert batch.training_bytes > state.budget_bytes
    found = swapped_seconds(settings, cut.cost_model, part, 64, state, (300, 200))
    assert found == pytest.approx(task_seconds(state, [batch, batch], 300, 200))
    fits = work_seconds(cut, cut.cost_model, [part], [64], 64, state, (300, 200))
    assert found > fits + 2 * 4 * 4 * batch.parameters / 1e7  # parameters alone go both ways twice, for each batch
