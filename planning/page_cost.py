"""The cost of a paged step, traced as that of any other: peak bytes, FLOPs, and what it reads and writes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from piecework.device_profiles.memory import FlopCount, Overlap, StepCost, trace
from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.now import tracing
from piecework.planning.step_cost import fake_batch, fake_load, has_own_layers
from piecework.training.attacks import Gradient, micro_batches
from piecework.training.loop import PieceModel
from piecework.training.paged import STATE, PagedCascade
from piecework.training.pages import Pages, Reading, Wanted, count_bytes
from piecework.training.sgd import TrainingConfig


class Moved(NamedTuple):
    """Bytes that are read and written, in so many accesses, of which `writes` write."""

    read: int
    written: int
    accesses: int
    writes: int


class TracedPages(Pages):
    """Pages that also count the accesses that write, and the bytes of the optimiser's state that are read.

    They note what is computed while others are read.
    """

    def __init__(self, flops: FlopCount) -> None:
        super().__init__()
        self.flops, self.overlaps = flops, list[Overlap]()
        self.writes = self.state_read = 0

    @property
    def counts(self) -> Moved:
        """All that was moved until now."""
        return Moved(*self.moved, self.writes)

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep the values of tensors, which must be dense, under a name."""
        super().write(name, tensors)
        self.writes += 1

    def read(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Give tensors of the same shapes and formats the values that were written under a name."""
        before = self.bytes_read
        super().read(name, tensors)
        self.state_read += self.bytes_read - before if name.endswith(STATE) else 0

    def _begin(self, wanted: Wanted) -> Reading:
        moved = sum(count_bytes(tensors) for _, tensors in wanted)
        return _Traced(self, self.flops.total, moved, len(wanted))


class _Traced:
    """A reading, which ends when it is waited for."""

    def __init__(self, pages: TracedPages, computed: int, moved: int, accesses: int) -> None:
        self._pages, self._computed, self._moved, self._accesses = pages, computed, moved, accesses

    def wait(self) -> None:
        """Note what was computed since the reading began."""
        self._pages.overlaps.append(Overlap(self._pages.flops.total - self._computed, self._moved, self._accesses))

    def join(self) -> None:
        """Do nothing."""


def moved_by_task(cost: StepCost, steps: int, weights: int) -> Moved:
    """Return what a task of so many paged steps on whole batches reads and writes.

    The first step finds no state of the optimiser. After the last one, the `weights` bytes of the pages of all units are read
    once more, for the answer.
    """
    read = steps * cost.bytes_read - (cost.state_read if steps else 0) + weights
    return Moved(read, steps * cost.bytes_written, steps * cost.accesses, steps * cost.writes)


def paged_cost(
    blueprint: Blueprint,
    atoms: Sequence[int],
    head: str,
    training_config: TrainingConfig,
    piece_class: type[PieceModel] = PieceModel,
) -> StepCost:
    """Return the cost of a step whose config has `pages`."""
    tracing(blueprint.name)
    attack, flops, attack_flops, traced = training_config.attack, FlopCount(), FlopCount(), [0]
    pages, moved_by_attack, overlaps_in_attack = TracedPages(flops), Moved(0, 0, 0, 0), 0

    def first_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        # All micro-batches after the second are like the second, which finds gradients of the first.
        parts = list(islice(micro_batches(training_config.micro_batch)(*tensors), 2))
        traced[0] = sum(len(part[0]) for part in parts)
        yield from parts

    def work() -> None:
        nonlocal pages, moved_by_attack, overlaps_in_attack
        pages, attack_flops.total = TracedPages(flops), 0
        one_step = replace(training_config, attack=replace(attack, steps=1)) if attack else training_config
        cascade = PagedCascade(blueprint, atoms, head, fake_load(blueprint), one_step, pages, piece_class)
        cascade.young = False  # counting batches needs their number, which a trace does not know
        cascade.parts = first_parts
        size = training_config.batch_size
        x, y = fake_batch(blueprint, atoms[0], size), torch.zeros(size, dtype=torch.int64)
        if attack is not None:
            x = cascade.attack(x, y, 0, partial(_count, flops=attack_flops))
            moved_by_attack, overlaps_in_attack = pages.counts, len(pages.overlaps)
        cascade.step(x, y)

    cost = trace(work, flops=flops, own_layers=has_own_layers(blueprint, training_config, piece_class))
    further = attack.steps - 1 if attack is not None else 0
    whole = training_config.batch_size / traced[0]
    total = (cost.flops + further * attack_flops.total) * training_config.batch_size // traced[0]
    moved, overlaps = pages.counts, [each.times(whole) for each in pages.overlaps[overlaps_in_attack:]]
    if attack is not None:
        first = [f"atoms.{atom}" for atom in atoms[: training_config.pages[0][1]]]
        first += [head] if len(training_config.pages) == 1 else []
        weights = sum(layer_statistics(blueprint, unit).state_bytes for unit in first)
        once = moved_by_attack
        once = once._replace(read=once.read - weights, accesses=once.accesses - len(first))
        more = _further_moved(training_config, attack.steps, traced[0], once)
        moved = Moved(*(one + other for one, other in zip(moved, more, strict=True)))
        done, gradients = _gradients(training_config, attack.steps, traced[0])
        overlaps += [each.times(gradients / done, gradients / done) for each in pages.overlaps[:overlaps_in_attack]]
    found = moved.read, moved.written, moved.accesses, pages.state_read, moved.writes
    return StepCost(cost.peak_bytes, total, *found, tuple(overlaps))


def _gradients(training_config: TrainingConfig, steps: int, traced: int) -> tuple[int, int]:
    """Return how many gradients an attack takes of the `traced` examples in one step, and of a batch in all its steps."""
    size, micro_batch = training_config.batch_size, training_config.micro_batch or training_config.batch_size
    return -(-traced // micro_batch), steps * -(-size // micro_batch)


def _further_moved(training_config: TrainingConfig, steps: int, traced: int, once: Moved) -> Moved:
    """Return what an attack of a batch reads, writes and accesses beside one step on the `traced` examples, which it follows.

    That step moved `once`, without reading the first segment, which any later gradient finds in memory.
    """
    size, written = training_config.batch_size, once.written
    done, gradients = _gradients(training_config, steps, traced)
    further = gradients - done
    features = written * steps * size // traced - written  # they are of all examples, and weights of each gradient
    read = (once.read - written) // done * further + features
    return Moved(read, features, once.accesses // done * further, once.writes // done * further)


def _count(gradient: Gradient, flops: FlopCount) -> Gradient:
    """Return a gradient function that adds its FLOPs to `flops`."""

    def count(x: Tensor, y: Tensor) -> Tensor:
        with flops:
            return gradient(x, y)

    return count
