"""The time that a device takes for its work in a round. Plans and records use the same formula."""

from collections.abc import Sequence
from itertools import pairwise, starmap, takewhile
from math import ceil
from statistics import fmean
from typing import NamedTuple

from piecework.device_profiles.clock import simulated_seconds, task_seconds
from piecework.device_profiles.profile import DeviceState
from piecework.models.layer_statistics import layer_statistics
from piecework.planning.costs import CostModel
from piecework.planning.cut import Cut
from piecework.planning.page_cost import Moved, moved_by_task
from piecework.planning.page_plan import speed_of
from piecework.planning.part import Part
from piecework.training.settings import Settings


def local_work(settings: Settings, examples: int) -> tuple[int, int]:
    """Return the number of batches per round of a client with that many examples, and the number of examples in them.

    An epoch's last batch has what is left of the examples, also among `training.local-iterations`, unless it is dropped.
    """
    size, iterations = settings.training.batch_size, settings.training.local_iterations
    of_epoch = without_single(settings, examples)
    batches = ceil(of_epoch / size)
    if iterations and batches:
        epochs, more = divmod(iterations, batches)
        return iterations, epochs * of_epoch + min(more * size, of_epoch)
    return batches * settings.training.local_epochs, of_epoch * settings.training.local_epochs


def without_single(settings: Settings, examples: int) -> int:
    """Return the number of examples of an epoch: a last batch of one, of which batch norms have no statistics, is dropped."""
    return examples - (examples > 1 and examples % settings.training.batch_size == 1)


def batches_of(settings: Settings, seen: int) -> int:
    """Return the number of batches, over all epochs, in which a client processed `seen` examples."""
    if settings.training.local_iterations:
        return settings.training.local_iterations if seen else 0
    return ceil(seen / (settings.training.local_epochs * settings.training.batch_size)) * settings.training.local_epochs


def round_flops(settings: Settings, cost_model: CostModel, parts: Sequence[Part], examples: int) -> float:
    """Return the FLOPs of a round of a client that trains parts on all of its examples: its steps, and features between.

    Where batches draw their net, it is the mean over draws.
    """
    seen = [local_work(settings, examples)[1]] * len(parts)
    steps = work_flops(cost_model, parts, seen, expected_share(cost_model, parts))
    return steps + made_between(settings, parts, examples).flops


def expected_share(cost_model: CostModel, parts: Sequence[Part]) -> float:
    """Return the fraction of the FLOPs of parts' steps that a client executes, in the mean over the nets that batches draw."""
    drawn = sum(fmean(cost_model.trace(step).flops for step in (part, *part.nested)) for part in parts)
    dense = sum(cost_model.trace(part).flops for part in parts)
    return drawn / dense if dense else 1.0


def work_flops(cost_model: CostModel, parts: Sequence[Part], seen: Sequence[int], executed: float = 1.0) -> float:
    """Return the FLOPs of the steps of parts, each on that many examples (`seen`), times the fraction `executed` of them."""
    size = cost_model.training_config.batch_size
    return executed * sum(cost_model.trace(part).flops * n / size for part, n in zip(parts, seen, strict=True))


def work_seconds(
    cut: Cut,
    cost_model: CostModel,
    parts: Sequence[Part],
    seen: Sequence[int],
    examples: int,
    state: DeviceState,
    message_bytes: tuple[int, int],
    executed: float = 1.0,
) -> float:
    """Return the simulated seconds of a device that trains parts one after another, each on that many examples (`seen`).

    Between two parts it makes features of all of its `examples`. `message_bytes` are those received and sent. Each part is read
    from disk once, or moved by paged steps, which may compute while they read, and its inputs are read with every batch. With a
    cut that swaps, there is one part, which may be larger than the device's memory, unless `memory.fit` fits its step.
    """
    if cut.swaps and not any(part.step for part in parts):
        (part,), (n,) = parts, seen
        return swapped_seconds(cut.settings, cost_model, part, n, state, message_bytes)
    batches = [batches_of(cut.settings, n) for n in seen]
    inputs = sum(stored_bytes(cut.settings, part) * n for part, n in zip(parts, seen, strict=True))
    total = Moved(inputs, 0, sum(batches), 0)
    for part, n in zip(parts, batches, strict=True):
        total = Moved(*(one + other for one, other in zip(total, moved_by_part(cost_model, part, n), strict=True)))
    flops = work_flops(cost_model, parts, seen, executed)
    saved = sum(saved_by_part(cost_model, p, n, m, state) for p, n, m in zip(parts, seen, batches, strict=True))
    seconds = simulated_seconds(state, flops, *message_bytes, total.read, total.accesses, total.written, total.writes)
    return seconds - saved + seconds_between(cut.settings, parts, examples, state)


def moved_by_part(cost_model: CostModel, part: Part, batches: int) -> Moved:
    """Return what training a part for so many batches reads and writes beside inputs: paged steps, or the part once."""
    if part.pages:
        return moved_by_task(cost_model.trace(part), batches, part.state_bytes)
    return Moved(part.copies * part.state_bytes, 0, 0, 0)


def saved_by_part(cost_model: CostModel, part: Part, seen: int, batches: int, state: DeviceState) -> float:
    """Return the seconds that steps save which read ahead while they compute for so many batches, of `seen` examples in all.

    The first batch reads nothing ahead: its weights come from the client's store.
    """
    if not part.ahead or not batches:
        return 0.0
    size = seen / batches / cost_model.training_config.batch_size
    return (batches - 1) * speed_of(state).hidden(each.times(size) for each in cost_model.trace(part).overlaps)


class Between(NamedTuple):
    """What making the features between parts takes in a round: FLOPs, bytes that are read and written, and batches."""

    flops: int
    read: int
    written: int
    batches: int


def made_between(settings: Settings, parts: Sequence[Part], examples: int) -> Between:
    """Return what a client with so many examples does between parts of one model that it trains one behind the other.

    A trained part runs forward once more, on all of the client's examples, or as many as train if batch norms always use a
    batch's statistics, and what it returns goes to a file. Without `memory.feature-cache` all parts before run again in each
    further epoch.
    """
    size, (steps, _) = settings.training.batch_size, local_work(settings, examples)
    of_epoch = without_single(settings, examples)
    run = of_epoch if settings.batch_statistics else examples
    epochs = 1 if settings.memory.feature_cache else ceil(steps / ceil(of_epoch / size))
    total = Between(0, 0, 0, 0)
    for place, (part, following) in enumerate(pairwise(parts)):
        behind = sum(takewhile(bool, starmap(reads_features, pairwise(parts[place:]))))
        if not behind:
            continue
        times = 1 + (epochs - 1) * behind
        flops = sum(layer_statistics(part.blueprint, f"atoms.{atom}").flops for atom in part.atoms)
        each = flops * run, stored_bytes(settings, part) * run, stored_bytes(settings, following) * run
        total = Between(*(so_far + times * more for so_far, more in zip(total, (*each, ceil(run / size)), strict=True)))
    return total


def reads_features(part: Part, following: Part) -> bool:
    """Return whether a part trains on the features behind the one that was trained before it."""
    return bool(part.atoms and following.atoms) and part.atoms[-1] < following.atoms[0] and not following.learns


def seconds_between(settings: Settings, parts: Sequence[Part], examples: int, state: DeviceState) -> float:
    """Return the simulated seconds in which a device makes the features between parts (`made_between`)."""
    made = made_between(settings, parts, examples)
    return simulated_seconds(state, made.flops, 0, 0, made.read, 2 * made.batches, made.written, made.batches)


def stored_bytes(settings: Settings, part: Part) -> int:
    """Return the bytes of one example of a part's input, as it is read: features may be stored in bfloat16."""
    rounded = settings.memory.features == "bfloat16" and not part.at_input
    return part.input_bytes // 2 if rounded else part.input_bytes


def swapped_seconds(
    settings: Settings, cost_model: CostModel, part: Part, seen: int, state: DeviceState, message_bytes: tuple[int, int]
) -> float:
    """Return the simulated seconds of a device that swaps to its disk if the part does not fit, by FedProphet's model."""
    steps = batches_of(settings, seen)
    return task_seconds(state, [cost_model.batch(part, seen / steps)], *message_bytes, times=steps)
