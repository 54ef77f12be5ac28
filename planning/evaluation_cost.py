"""The ways in which a client can evaluate a model within its memory, each with its traced bytes.

A client evaluates batches like those of training. If it has no memory for a batch, it computes fewer examples at once, which
changes no result, except where batch norms use the statistics of the examples that are computed together: there a batch is cut
only if `memory.fit` allows micro-batches, and then into parts of at most three.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.models.static_norms import mixes_examples
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.settings import Settings

if TYPE_CHECKING:
    from piecework.planning.cut import Cut

# `EvaluationStep.examples`, the largest number that this can be, and `EvaluationStep.held` -> bytes
Needed = Callable[[int, int, str], int]


def evaluation_steps(
    cut: "Cut", blueprint: Blueprint, atoms: Piece, head: str, allowed: int, examples: int
) -> list[EvaluationStep]:
    """Return the step in which a client with `examples` evaluates atoms and a head, with one atom in memory at a time.

    This is the first that takes at most `allowed` bytes, else the smallest.
    """

    def count_bytes(_: int, size: int, __: str) -> int:
        last, streamed = atoms[-1], cut.cost_model.trace_inference
        return max(streamed(blueprint, a, head if a == last else None, evaluated=True, size=size) for a in atoms)

    return choose_step(cut, blueprint, count_bytes, allowed, examples)


def choose_step(
    cut: "Cut",
    blueprint: Blueprint,
    needed: Needed,
    allowed: int,
    examples: int,
    *,
    batch: int = 0,
    ways: Sequence[str] = ("",),
) -> list[EvaluationStep]:
    """Return the first step that takes at most `allowed` bytes, else the smallest. `batch` is by default that of training.

    `ways` are those to hold the model, preferred first and smallest last. Where budgets are not enforced, or there are no
    examples, the step is a whole batch, and nothing is traced.
    """
    batch = batch or cut.cost_model.training_config.batch_size
    if cut.swaps or cut.cost_model.memory_model is not None or not examples:
        return [EvaluationStep(0)]
    cuts = list(sizes(batch, examples, least_at_once(cut.settings, blueprint, batch)))
    for at_once, size in cuts if allowed else []:
        for held in ways:
            if (found := needed(at_once, size, held)) <= allowed:
                return [EvaluationStep(found, at_once, held)]
    return [EvaluationStep(needed(*cuts[-1], ways[-1]), cuts[-1][0], ways[-1])]


def sizes(batch: int, examples: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield how many examples are computed at once, 0 for a whole batch, and the largest number that this can be.

    First are whole batches: as large as those of training, then as large as a client with so few `examples` has. Then come
    half of these, a quarter and so on, down to `least`.
    """
    yield 0, batch
    size = min(batch, examples)
    if size < batch:
        yield 0, size
    while size > least:
        size = max(size // 2, least)
        yield size, size


def least_at_once(settings: Settings, blueprint: Blueprint, batch: int) -> int:
    """Return the fewest examples that may be computed at once, of a batch of `batch`."""
    if not (settings.batch_statistics and mixes_examples(blueprint)):
        return 1
    return min(3, batch) if "micro-batch" in settings.memory.ways else batch
