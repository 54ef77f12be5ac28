"""Ways to fit a training step into less memory: the ladder of `memory.fit`, from the plain step to one that is paged.

A step moves parameters in its backward pass, which costs nothing; computes norms and activations again, which costs a few
percent; computes segments of atoms again, which costs their forward pass; or pages through the model, which costs most of a
forward pass and the time of a disk. All of these are the plain step, bit for bit. Micro-batches are it to rounding, but dropout
draws other masks in them, and with batch norms they are another step. `cheapest` finds the step with the fewest predicted
seconds that fits, and `smallest` the one with the fewest bytes. Both verify with traced costs.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import Protocol

from piecework.device_profiles.memory import StepCost
from piecework.device_profiles.trace_cache import recall
from piecework.models.layer_statistics import layer_statistics
from piecework.models.static_norms import mixes_examples
from piecework.models.step import Segment, Step, with_step
from piecework.planning.page_plan import (
    BOARD,
    Layers,
    Speed,
    fewest_seconds,
    finest,
    layers_of,
    peak_of,
    seconds_on_top,
)
from piecework.planning.part import Part
from piecework.planning.recompute_plan import fewest_flops, leanest
from piecework.planning.step_cost import ActivationProfile, activation_profile
from piecework.training.sgd import TrainingConfig

AUTO = "auto"  # among ways: the fastest step of all, not the first way that fits
_PROFILES: dict[Hashable, ActivationProfile] = {}
SLACK, FINER = 1.1, 1.04  # limits for pages begin so far above the memory, and fall by this factor at most
ATTEMPTS = 8  # traces of one search; the profile has been off by a few buffers at most


class Costs(Protocol):
    """Traced costs of parts for one training config."""

    @property
    def training_config(self) -> TrainingConfig:
        """The training config of all steps."""

    def trace(self, part: Part) -> StepCost:
        """Return peak bytes and FLOPs of one training step of a part."""


def cheapest(costs: Costs, part: Part, allowed: int, ways: Sequence[str], speed: Speed = BOARD) -> Part | None:
    """Return the part with a step that takes at most `allowed` bytes, or None if no step fits.

    The plain step is first. Then each of the `ways` alone is tried, in their order, and then the fastest of all that they allow
    together; with AUTO among them, this one at once. Steps that compute the plain one, at least to rounding, go before others.
    """
    if _bytes(costs, part) <= allowed:
        return part
    if AUTO not in ways:
        for way in ways:
            if (found := _fastest(costs, part, allowed, (way,), speed)) is not None:
                return found
    return _fastest(costs, part, allowed, ways, speed) if len(ways) > 1 else None


def smallest(costs: Costs, part: Part, ways: Sequence[str]) -> Part:
    """Return the part with the step that takes the fewest bytes of all that `ways` allow, and of those moves the fewest."""
    found = _leanest_bases(part, ways)
    if "micro-batch" in ways:
        found += [each for base in found for each in _last_slice(costs, replace(base, in_backward=False))]
    if "recompute" in ways:
        found += [replace(each, recompute=_leanest(costs, each)) for each in found]
    if "page" in ways:
        paged = [replace(base, spilled=True) for base in _bases(part, ways, paged=True)]
        paged += [each for base in paged for each in _last_slice(costs, base)] if "micro-batch" in ways else []
        found += [replace(each, pages=pages) for each in paged for pages in _leanest_pages(costs, each)]

    def size(each: Part) -> tuple[int, float, int]:
        cost = costs.trace(each)
        return cost.peak_bytes, cost.bytes_read + cost.bytes_written, cost.flops

    return min(found, key=size)


def _last_slice(costs: Costs, part: Part) -> list[Part]:
    """Return the part with the smallest micro-batches, or nothing if its batch cannot be cut."""
    return list(slices(costs, part))[-1:]


def slices(costs: Costs, part: Part) -> Iterator[Part]:
    """Yield the part with micro-batches of half the batch, a quarter and so on.

    The last have one example, or three if batch norms use the statistics of what is computed together: a batch that is cut into
    parts of at most three has no part of one example.
    """
    size, least = costs.training_config.batch_size, 3 if mixes_examples(part.blueprint) else 1
    while size > least:
        size = max(size // 2, least)
        yield replace(part, micro_batch=size)


def seconds_of(costs: Costs, part: Part, speed: Speed) -> float:
    """Return the predicted seconds of a step: computing, and moving files, less those of doing both at once."""
    cost = costs.trace(part)
    seconds = cost.flops / speed.flops + speed.moving(cost.bytes_read, cost.bytes_written, cost.accesses, cost.writes)
    return seconds - speed.hidden(cost.overlaps)


def _fastest(costs: Costs, part: Part, allowed: int, ways: Sequence[str], speed: Speed) -> Part | None:
    """Return the part with the fastest step that fits, of those that compute the same if there are any.

    The searches are in the order of the fewest seconds that they can find, so that most are spared.
    """
    plain = seconds_of(costs, part, speed)
    best, most = None, inf
    for same in (True, False):
        for least, search in _searches(costs, part, allowed, ways, speed, same=same):
            if most <= plain + least:
                break
            if (found := search(most - plain)) is None:
                continue
            found = _simplify(costs, found, allowed)
            if (seconds := seconds_of(costs, found, speed)) < most:
                best, most = found, seconds
        if best is not None:
            return best
    return None


def _simplify(costs: Costs, part: Part, allowed: int) -> Part:
    """Return the part without cheap recomputation, whose time no FLOPs show, if it fits without it."""
    simpler = replace(part, cheap=False)
    return simpler if part.cheap and _bytes(costs, simpler) <= allowed else part


# The least seconds above the plain step's that a search can find, and the search, which may spare itself what takes more
Search = tuple[float, Callable[[float], Part | None]]


def _searches(
    costs: Costs, part: Part, allowed: int, ways: Sequence[str], speed: Speed, *, same: bool
) -> Iterator[Search]:
    """Yield the searches for steps that compute the same, or for the others."""
    lean = _leanest_bases(part, ways)
    sliced = [each for base in lean for each in slices(costs, replace(base, in_backward=False))]
    same_slices = "micro-batch" in ways and same != mixes_examples(part.blueprint)
    if same:
        yield 0.0, lambda _: next((each for each in _bases(part, ways) if _bytes(costs, each) <= allowed), None)
        if "recompute" in ways:
            yield 0.0, lambda _: _recompute(costs, lean, allowed)
    if same_slices:
        yield 0.0, lambda _: next((each for each in sliced if _bytes(costs, each) <= allowed), None)
        if "recompute" in ways:
            yield 0.0, lambda _: _recompute(costs, sliced, allowed)
    if "page" in ways:
        moved = _moved_once(costs, part)
        # what is read may be read while the step computes
        least = max(0.0, speed.moving(moved, 0) - costs.trace(part).flops / speed.flops) + speed.moving(0, moved)
        forms = [
            replace(base, spilled=spilled, ahead=ahead)
            for spilled, base, ahead in product((False, True), _bases(part, ways, paged=True), (False, True))
        ]
        if same:
            yield least, partial(_page, costs, forms, allowed, speed)
        if same_slices:
            yield least, partial(_page_slices, costs, forms, allowed, speed)


def _moved_once(costs: Costs, part: Part) -> float:
    """Return the bytes of weights and optimiser's state, which every paged step reads and writes at least once."""
    return part.state_bytes + costs.training_config.bytes_kept * part.parameters


def _bases(part: Part, ways: Sequence[str], *, paged: bool = False) -> Iterator[Part]:
    """Yield the part with the ways that change no FLOPs: none, each, and both.

    A paged step moves in its backward pass anyway.
    """
    moves = "step-in-backward" in ways and not paged
    for cheap in (False, True) if "recompute-cheap" in ways else (False,):
        for in_backward in (False, True) if moves else (False,):
            yield with_step(part, Step(cheap=cheap, in_backward=in_backward))


def _leanest_bases(part: Part, ways: Sequence[str]) -> list[Part]:
    """Return the bases that may have the fewest bytes with other ways: the leanest, and it without cheap recomputation.

    With cheap recomputation, the profile says too little of what a segment keeps when it runs again. So the segments that are
    the leanest by it may take more than those chosen without: 0.57 of ResNet-18's plain step instead of 0.55.
    """
    lean = list(_bases(part, ways))[-1]
    return [lean, replace(lean, cheap=False)] if lean.cheap else [lean]


def _bytes(costs: Costs, part: Part) -> int:
    return costs.trace(part).peak_bytes


def _recompute(costs: Costs, forms: Sequence[Part], allowed: int) -> Part | None:
    """Return the form with the segments whose second forward pass takes the fewest FLOPs, or None if no segments fit.

    The segments are optimal for the profile. If the traced step takes more than the profile says, the limit is lowered by that.
    """
    if not forms:
        return None
    flops = _forward_flops(forms[0])

    def plan(form: Part, limit: float) -> Part | None:
        return _with_recomputed(form, fewest_flops(_profile(costs, form), flops, limit))

    found = [_tighten(costs, allowed, partial(plan, form)) for form in forms]
    return min(filter(None, found), key=lambda each: costs.trace(each).flops, default=None)


def _with_recomputed(part: Part, segments: tuple[Segment, ...] | None) -> Part | None:
    return None if segments is None else replace(part, recompute=segments)


def _page(costs: Costs, forms: Sequence[Part], allowed: int, speed: Speed, most: float) -> Part | None:
    """Return the fastest paged step of some forms that fits, or None if none does in less than `most` seconds on top.

    The pages of each form with the fewest predicted seconds wait for their trace, those with the fewest seconds first: the
    first that fit are the fastest. Pages that do not fit are followed by the form's next slower ones.
    """
    moved = _moved_once(costs, forms[0])
    most -= speed.moving(moved, moved)
    waiting: list[tuple[float, int, Part]] = []

    def wait(number: int, limit: float) -> None:
        form = forms[number]
        layers, how = _layers(costs, form), {"spilled": form.spilled, "ahead": form.ahead}
        if (pages := fewest_seconds(layers, limit, speed, **how)) is not None:
            heappush(waiting, (seconds_on_top(layers, pages, speed, **how), number, replace(form, pages=pages)))

    for number, form in enumerate(forms):
        wait(number, SLACK * (allowed - max(0, _offset(costs, form))))
    while waiting:
        seconds, number, found = heappop(waiting)
        if seconds >= most:
            return None
        if (traced := _bytes(costs, found)) <= allowed:
            return found
        predicted = _predicted(costs, found)
        wait(number, _next_limit(predicted, traced, allowed))
    last = (replace(form, pages=each) for form in forms if not form.ahead for each in _leanest_pages(costs, form))
    return next((found for found in last if _bytes(costs, found) <= allowed), None)


def _page_slices(costs: Costs, forms: Sequence[Part], allowed: int, speed: Speed, most: float) -> Part | None:
    cut = ([replace(form, micro_batch=each.micro_batch) for form in forms] for each in slices(costs, forms[0]))
    return next(filter(None, (_page(costs, each, allowed, speed, most) for each in cut)), None)


def _predicted(costs: Costs, part: Part) -> int:
    return peak_of(_layers(costs, part), part.pages, spilled=part.spilled, ahead=part.ahead)


def _offset(costs: Costs, form: Part) -> int:
    """Return how many bytes more than predicted the finest pages of a form take."""
    fine = replace(form, pages=finest(len(form.atoms)))
    return _bytes(costs, fine) - _predicted(costs, fine)


def _next_limit(predicted: int, traced: int, allowed: int) -> float:
    """Return the limit of a search for pages after some that do not fit, below what was predicted for them.

    Predictions are off by some layers' workspace, often by the same. If that was too much, it may be more for others.
    """
    as_before = float(allowed - (traced - predicted))
    return as_before if traced > predicted else max(as_before, predicted / FINER)


def _tighten(costs: Costs, allowed: int, plan: Callable[[float], Part | None]) -> Part | None:
    """Return a part of `plan(limit)` whose traced step takes at most `allowed` bytes, with lower and lower limits; or None."""
    limit: float = allowed
    for _ in range(ATTEMPTS):
        found = plan(limit)
        if found is None:
            return None
        excess = _bytes(costs, found) - allowed
        if excess <= 0:
            return found
        limit -= excess
    return None


def _leanest(costs: Costs, part: Part) -> tuple[Segment, ...]:
    return leanest(_profile(costs, part), _forward_flops(part))


def _leanest_pages(costs: Costs, part: Part) -> list[tuple[Segment, ...]]:
    """Return the pages with the lowest peak by the profile, and the finest: one of them has the lowest, or nearly so."""
    layers, fine = _layers(costs, part), finest(len(part.atoms))
    low, high = 0.0, float(peak_of(layers, fine, spilled=part.spilled))
    while high - low > 1:
        middle = (low + high) // 2
        fits = fewest_seconds(layers, middle, BOARD, spilled=part.spilled) is not None
        low, high = (low, middle) if fits else (middle, high)
    return [
        fewest_seconds(layers, high, BOARD, spilled=part.spilled) or fine,
        fine,
        finest(len(part.atoms), alone=False),
    ]


def _forward_flops(part: Part) -> list[int]:
    return [layer_statistics(part.blueprint, f"atoms.{atom}").flops for atom in part.atoms]


def _layers(costs: Costs, part: Part) -> Layers:
    config = costs.training_config
    moves = with_step(part, Step(cheap=part.cheap, in_backward=True))
    profile = _profile(costs, replace(moves, micro_batch=part.micro_batch))
    return layers_of(part, profile, config.batch_size, config.bytes_kept, part.micro_batch)


def _profile(costs: Costs, part: Part) -> ActivationProfile:
    """Return the profile of the plain step, or of a base, for a micro-batch as the batch."""
    size = part.micro_batch or costs.training_config.batch_size
    base = Step(cheap=part.cheap, in_backward=part.in_backward)
    training_config = with_step(replace(costs.training_config, batch_size=size, attack=None), base)
    key = training_config, part.signature()
    if key not in _PROFILES:
        _PROFILES[key] = recall(activation_profile, part, training_config)
    return _PROFILES[key]
