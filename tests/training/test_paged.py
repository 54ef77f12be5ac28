"""Stepping in the backward pass, and paging: the weights of the plain step bit by bit, in the memory that was traced."""

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import a_training_config
from torch import Tensor, nn
from zoo_helpers import NARROW, ONE_A_FAMILY, blueprint_of, examples_for

from piecework.client_app.paged import PagedTrainer
from piecework.models.cascade import Blueprint, isolate_rng
from piecework.models.step import Segment
from piecework.planning.page_cost import paged_cost
from piecework.training.attacks import Attack
from piecework.training.loop import LocalTrainer, PieceModel, load_for_device
from piecework.training.memory_cap import MemoryCap, pause_counting
from piecework.training.paged import PagedCascade
from piecework.training.pages import PageFiles
from piecework.training.sgd import SGD, TrainingConfig

BATCH, STEPS = 6, 3
MODES = ("batch", "local", "group", "frozen")
LINF = Attack("linf", 0.1, 0.05, 2)
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # a model, and what its config has that the demo's has not
    "attacked": ("convnet", {"attack": LINF}),
    "attacked in l2": ("vgg11", {"attack": replace(LINF, norm="l2")}),
    "adam": ("convnet", {"optimiser": "adam", "momentum": 0.0}),
    "adamw": ("vit", {"optimiser": "adamw"}),
    "momentum in bfloat16": ("preresnet20", {"optimiser_state": "bfloat16"}),
    "momentum in 8 bits": ("convnet", {"optimiser_state": "8-bit"}),
    "averages in 8 bits": ("lenet5", {"optimiser": "adam", "optimiser_state": "8-bit"}),
    "in bfloat16": ("preresnet20", {"precision": "bfloat16"}),
    "without momentum": ("mlp", {"momentum": 0.0}),
    "norms computed again": ("resnet18", {"cheap": True}),
}


@dataclass
class Trained:
    """What a few steps come to: losses, states of the global generator after each, weights, bytes, and pages moved."""

    losses: list[float] = field(default_factory=list)
    drawn: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    peak: int = 0
    moved: list[tuple[int, ...]] = field(default_factory=list)


class Watched(LocalTrainer):
    """Notes what each step comes to, and does not hold its batch, which an attack replaces."""

    trained: Trained

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        batch = [z, y]
        del z, y
        loss = super()._step(batch.pop(0), batch.pop(), rng)
        self.trained.losses.append(float(loss))
        self.trained.drawn.append(torch.get_rng_state())
        return loss


class CountedFiles(PageFiles):
    """Also counts the accesses that write."""

    writes = 0

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        super().write(name, tensors)
        self.writes += 1

    @property
    def counts(self) -> tuple[int, ...]:
        return *self.moved, self.writes


class WatchedPages(Watched, PagedTrainer):
    """Also notes what the pages moved in each step."""

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        pages = self.cascade.pages
        assert isinstance(pages, CountedFiles)
        before, batch = pages.counts, [z, y]
        del z, y
        loss = super()._step(batch.pop(0), batch.pop(), rng)
        self.trained.moved.append(tuple(new - old for old, new in zip(before, pages.counts, strict=True)))
        return loss


def train(blueprint: Blueprint, config: TrainingConfig, folder: Path) -> Trained:
    """Train a model, always from the same weights, on a few batches. The files of a paged step are in the folder."""
    atoms, trained, cap = tuple(range(len(blueprint.atoms))), Trained(), MemoryCap(10**12, enforced=True)

    with isolate_rng(7):
        first = {unit: blueprint.build_unit(unit).state_dict() for unit in blueprint.units()}

    def fill(unit: str, module: nn.Module) -> None:
        with pause_counting():
            module.load_state_dict(first[unit])

    load = load_for_device(blueprint, fill)

    examples = examples_for(blueprint, 0, BATCH * STEPS)
    if config.pages:
        pages = CountedFiles(folder)
        cascade = PagedCascade(blueprint, atoms, "head", load, config, pages)
        trainer: Watched = WatchedPages(cascade, config)
    else:
        trainer = Watched(lambda: [PieceModel(blueprint, atoms, "head", load)], config)
    trainer.trained = trained
    trainer.epoch(examples, np.random.default_rng(3), cap, "train")
    if config.pages:
        cascade.streamed.release()
        units = {unit: cascade.load_unit(unit) for unit in blueprint.units()}
    else:
        units = trainer.finish()[0].units()
    trained.state = {f"{unit}.{name}": v for unit, m in units.items() for name, v in m.state_dict().items()}
    trained.peak = cap.peak_bytes
    return trained


def pages_of(blueprint: Blueprint, size: int = 1, *, alone: bool = False) -> tuple[Segment, ...]:
    """Segments of `size` atoms; the head is with the last ones, or alone."""
    atoms = len(blueprint.atoms)
    found = tuple((first, min(first + size, atoms)) for first in range(0, atoms, size))
    return (*found, (atoms, atoms)) if alone else found


def ways(blueprint: Blueprint) -> dict[str, dict[str, Any]]:
    return {
        "in the backward pass": {"in_backward": True},
        "pairs": {"pages": pages_of(blueprint, 2)},
        "single atoms, read ahead": {"pages": pages_of(blueprint), "ahead": True},
        "single atoms and the head alone, in files": {"pages": pages_of(blueprint, alone=True), "spilled": True},
    }


def differences(one: Trained, other: Trained) -> list[str]:
    """What two trainings differ in, if it is only a bit."""
    assert one.state.keys() == other.state.keys()
    found = [name for name, value in one.state.items() if not torch.equal(value, other.state[name])]
    found += [] if one.losses == other.losses else [f"losses {one.losses} and {other.losses}"]
    return found + [
        f"random numbers of step {i}" for i in range(STEPS) if not torch.equal(one.drawn[i], other.drawn[i])
    ]


def require_same(blueprint: Blueprint, config: TrainingConfig, folder: Path) -> None:
    """All ways come to the plain steps. The last two take the bytes, and move the pages, that are traced for them."""
    plain = train(blueprint, config, folder)
    assert len(set(plain.losses)) == STEPS
    for way, fit in ways(blueprint).items():
        fitted = replace(config, **fit)
        found = train(blueprint, fitted, folder / way)
        assert (way, differences(plain, found)) == (way, [])
        if fitted.ahead or fitted.spilled:
            require_traced(blueprint, fitted, found)


def require_traced(blueprint: Blueprint, config: TrainingConfig, found: Trained) -> None:
    cost = paged_cost(blueprint, tuple(range(len(blueprint.atoms))), "head", config)
    assert found.peak == cost.peak_bytes
    assert found.moved[1:] == [(cost.bytes_read, cost.bytes_written, cost.accesses, cost.writes)] * (STEPS - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_every_family(name: str, tmp_path: Path) -> None:
    require_same(blueprint_of(name, **NARROW[name] | {"batch_norm": "running"}), a_training_config(BATCH), tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_batch_norm(mode: str, tmp_path: Path) -> None:
    require_same(blueprint_of("convnet", width=0.25, batch_norm=mode), a_training_config(BATCH), tmp_path)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("size", "attack"), [(1, replace(LINF, norm="l2")), (4, None)])
def test_micro_batches(size: int, attack: Attack | None, ahead: bool, tmp_path: Path) -> None:
    """Inside a segment, they come to the plain step to rounding; batch norms would have the statistics of fewer examples."""
    blueprint = blueprint_of("convnet", width=0.25, batch_norm="group")
    config = a_training_config(BATCH, lr=0.01, attack=attack)
    fitted = replace(config, pages=pages_of(blueprint, 2), micro_batch=size, spilled=size == 1, ahead=ahead)
    plain, found = train(blueprint, config, tmp_path), train(blueprint, fitted, tmp_path)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, value in plain.state.items():
        assert float((value - found.state[name]).norm()) <= 1e-5 * float(value.norm()) + 1e-7, name
    require_traced(blueprint, fitted, found)


@pytest.mark.parametrize("micro_batch", [0, 5, 40])
def test_fewer_examples_than_a_batch(micro_batch: int, tmp_path: Path) -> None:
    """A client with 18 examples takes one step on all of them, within the bytes of a batch; micro-batches of 40 cut nothing."""
    blueprint = blueprint_of("convnet", width=0.25, batch_norm="group")
    config = a_training_config(64, lr=0.01)
    fitted = replace(config, pages=pages_of(blueprint, 2), micro_batch=micro_batch, spilled=True)
    plain, found = train(blueprint, config, tmp_path), train(blueprint, fitted, tmp_path)
    assert len(found.losses) == 1
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, value in plain.state.items():
        exact = torch.equal(value, found.state[name])
        assert exact or (micro_batch == 5 and torch.allclose(value, found.state[name], rtol=1e-5, atol=1e-6)), name
    assert found.peak <= paged_cost(blueprint, tuple(range(len(blueprint.atoms))), "head", fitted).peak_bytes


@pytest.mark.parametrize("case", CASES)
def test_every_config(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    blueprint = blueprint_of(name, **NARROW[name] | {"batch_norm": "running"})
    require_same(blueprint, a_training_config(BATCH, **changes), tmp_path)


def test_two_steps_by_hand(tmp_path: Path) -> None:
    """Two atoms and a head of one neuron each: z = 2 x, h = 3 z, and the logit l = h - 6, which is 0 for x = 1.

    With class 1 the loss's slope is 1/2 - 1 in l, so -1/2 h = -3 and -1/2 in the head's two parameters, -1/2 z = -1 and -1/2 in
    those of the second atom, and -3/2 x and -3/2 in those of the first. Weight decay adds a tenth of the parameter to each, and
    the rate is a tenth.
    """
    blueprint = blueprint_of("mlp", num_classes=1, input_shape=(1,), hidden=1, layers=2)
    begin = {"atoms.0": (2.0, 0.0), "atoms.1": (3.0, 0.0), "head": (1.0, -6.0)}

    def fill(unit: str, module: nn.Module) -> None:
        for parameter, value in zip(module.parameters(), begin[unit], strict=True):
            nn.init.constant_(parameter, value)

    config = a_training_config(1, momentum=0.5, weight_decay=0.1, pages=((0, 1), (1, 2), (2, 2)), spilled=True)
    pages = PageFiles(tmp_path)
    cascade = PagedCascade(blueprint, (0, 1), "head", load_for_device(blueprint, fill), config, pages)

    def step(x: float) -> list[list[float]]:
        cascade.step(torch.tensor([[x]]), torch.tensor([1]))
        return [[p.item() for p in cascade.load_unit(unit).parameters()] for unit in begin]

    after = [[2.13, 0.15], [3.07, 0.05], [1.29, -5.89]]
    before = pages.moved
    assert step(1.0) == [pytest.approx(each) for each in after]
    # weights come from the store; of the pages, only what went into the second atom is read, 4 bytes
    assert [new - old for old, new in zip(before, pages.moved, strict=True)] == [4 + 24, 4 + 24 + 24, 1 + 3 + 1 + 9]
    # A second step with x = -1, where the first neuron gives 0: the second atom's bias and the head alone have gradients.
    slope = 1 / (1 + math.exp(-(1.29 * 0.05 - 5.89))) - 1
    gradients = [[0.0, 0.0], [0.0, slope * 1.29], [slope * 0.05, slope]]
    momentum = [[-1.3, -1.5], [-0.7, -0.5], [-2.9, -1.1]]
    moved = [
        [p - 0.1 * (0.5 * m + g + 0.1 * p) for p, g, m in zip(*rows, strict=True)]
        for rows in zip(after, gradients, momentum, strict=True)
    ]
    before = pages.moved
    assert step(-1.0) == [pytest.approx(each) for each in moved]
    # Of 8 bytes in each unit: read forward 3 times and back 2 times, momentum 3 times; the last 24 bytes are the test's own.
    found = [new - old for old, new in zip(before, pages.moved, strict=True)]
    assert found == [24 + 16 + 24 + 4 + 24, 24 + 24 + 4, 3 + 2 + 6 + 1 + 3 + 3 + 6 + 1]


def test_an_optimiser_that_moves_in_the_backward_pass_is_freed_with_its_parameters() -> None:
    """Hooks are unseen by Python's garbage collector: if they held the optimiser, a client would lose a model a task."""
    layer = nn.Linear(2, 2)
    optimiser = SGD([*layer.parameters()], a_training_config(in_backward=True))
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is None  # it has moved
    seen = [weakref.ref(each) for each in (optimiser, optimiser.buffers[0], layer.weight)]
    gc.disable()
    try:
        del optimiser
        assert [each() is None for each in seen] == [True, True, False]
        layer(torch.ones(1, 2)).sum().backward()  # nothing moves any more
        assert layer.weight.grad is not None
        del layer
        assert seen[2]() is None
    finally:
        gc.enable()


def test_what_a_paged_step_refuses(tmp_path: Path) -> None:
    blueprint = blueprint_of("mlp", num_classes=2, input_shape=(2,), hidden=2)
    load = load_for_device(blueprint, lambda unit, module: None)
    with pytest.raises(ValueError, match=r"clip_norm = 5: a paged step never has all gradients at once"):
        config = a_training_config(clip_norm=5.0, pages=pages_of(blueprint))
        PagedCascade(blueprint, (0, 1, 2), "head", load, config, PageFiles(tmp_path))
    with pytest.raises(ValueError, match=r"pages are \(\(0, 1\), \(2, 3\)\): expected segments of all 3 atoms"):
        PagedCascade(blueprint, (0, 1, 2), "head", load, a_training_config(pages=((0, 1), (2, 3))), PageFiles(tmp_path))
    for changes in ({"clip_norm": 5.0}, {"micro_batch": 2}):
        with pytest.raises(ValueError, match="clipping needs the norm of all gradients, and micro-batches add them up"):
            SGD([nn.Parameter(torch.ones(1))], a_training_config(in_backward=True, **changes))
