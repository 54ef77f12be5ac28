"""The ways in which a client can evaluate a model within its memory, each with its traced bytes.

A client evaluates batches like those of training. If it has no memory for a batch, it computes fewer examples at once, which
changes no result, except where batch norms use the statistics of the examples that are computed together: there a batch is cut
only if `memory.fit` allows micro-batches, and then into parts of at most three.
"""

from collections.abc import Callable, Iterable, Iterator

from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.models.static_norms import mixes_examples
from piecework.planning.partition_policy import PartitionPolicy
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.settings import Settings

# `EvaluationStep.examples`, and the largest number that this can be -> bytes and `held` of each way, preferred first
Ways = Callable[[int, int], Iterable[tuple[int, str]]]


def evaluation_steps(
    policy: PartitionPolicy, blueprint: Blueprint, atoms: Piece, head: str, allowed: int, examples: int
) -> list[EvaluationStep]:
    """Return the step in which a client with `examples` evaluates atoms and a head, with one atom in memory at a time.

    This is the first that takes at most `allowed` bytes, else the smallest.
    """

    def ways(_: int, size: int) -> Iterator[tuple[int, str]]:
        costs = (
            policy.cost_model.streamed(blueprint, a, head if a == atoms[-1] else None, evaluated=True, size=size)
            for a in atoms
        )
        yield max(costs), ""

    return chosen(policy, blueprint, ways, allowed, examples)


def chosen(
    policy: PartitionPolicy, blueprint: Blueprint, ways: Ways, allowed: int, examples: int, batch: int = 0
) -> list[EvaluationStep]:
    """Return the first step that takes at most `allowed` bytes, else the smallest. `batch` is by default that of training.

    Where budgets are not enforced, or there are no examples, this is a whole batch, and nothing is traced.
    """
    batch = batch or policy.cost_model.training_config.batch_size
    if policy.swaps or policy.cost_model.memory_model is not None or not examples:
        return [EvaluationStep(0)]
    step = EvaluationStep(0)
    for at_once, size in sizes(batch, examples, least_at_once(policy.settings, blueprint, batch)):
        for needed, held in ways(at_once, size):
            step = EvaluationStep(needed, at_once, held)
            if needed <= allowed:
                return [step]
    return [step]


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
