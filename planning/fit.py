"""Ways to fit a training step into less memory: the ladder of `memory.fit`, from the plain step to one that is paged.

A step moves parameters in its backward pass, which costs nothing; computes norms and activations again, which costs a few
percent; computes segments of atoms again, which costs their forward pass; or pages through the model, which costs most of a
forward pass and the time of a disk. All of these are the plain step, bit for bit. Micro-batches are it to rounding, but dropout
draws other masks in them, and with batch norms they are another step. `cheapest` finds the step with the fewest predicted
seconds that fits, and `smallest` the one with the fewest bytes. Both verify with traced costs.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
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
SLACK, FINER = 1.1, 1.04  # limits for pages begin so far above the memory, and fall by this factor
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
    """Return the part with the step that takes the fewest bytes of all that `ways` allow."""
    found = list(_bases(part, ways))
    lean = found[-1]  # of what comes on top of them, the leanest base has the fewest bytes
    if "micro-batch" in ways:
        found += _last_slice(costs, replace(lean, in_backward=False))
    if "recompute" in ways:
        found += [replace(each, recompute=_leanest(costs, each)) for each in (lean, *found[-1:])]
    if "page" in ways:
        paged = [replace(list(_bases(part, ways, paged=True))[-1], spilled=True)]
        paged += _last_slice(costs, paged[0]) if "micro-batch" in ways else []
        found += [replace(each, pages=pages) for each in paged for pages in _leanest_pages(costs, each)]
    return min(found, key=lambda each: _bytes(costs, each))


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
    best: Part | None = None
    for same in (True, False):
        for least, search in _searches(costs, part, allowed, ways, speed, same=same):
            if best is not None and seconds_of(costs, best, speed) <= plain + least:
                break
            if (found := search()) is not None:
                found = _simplify(costs, found, allowed)
            if found is not None and (best is None or seconds_of(costs, found, speed) < seconds_of(costs, best, speed)):
                best = found
        if best is not None:
            return best
    return None


def _simplify(costs: Costs, part: Part, allowed: int) -> Part:
    """Return the part without cheap recomputation, whose time no FLOPs show, if it fits without it."""
    simpler = replace(part, cheap=False)
    return simpler if part.cheap and _bytes(costs, simpler) <= allowed else part


Search = tuple[float, Callable[[], Part | None]]  # the least seconds above the plain step's, and the search


def _searches(
    costs: Costs, part: Part, allowed: int, ways: Sequence[str], speed: Speed, *, same: bool
) -> Iterator[Search]:
    """Yield the searches for steps that compute the same, or for the others."""
    lean = list(_bases(part, ways))[-1]
    sliced = replace(lean, in_backward=False)
    same_slices = "micro-batch" in ways and same != mixes_examples(part.blueprint)
    if same:
        yield 0.0, lambda: next((each for each in _bases(part, ways) if _bytes(costs, each) <= allowed), None)
        if "recompute" in ways:
            yield 0.0, lambda: _recompute(costs, lean, allowed)
    if same_slices:
        yield 0.0, lambda: next((each for each in slices(costs, sliced) if _bytes(costs, each) <= allowed), None)
        if "recompute" in ways:
            both = (_recompute(costs, each, allowed) for each in slices(costs, sliced))
            yield 0.0, lambda: min(filter(None, both), key=lambda each: costs.trace(each).flops, default=None)
    if "page" in ways:
        kept = costs.training_config.bytes_kept * part.parameters
        least = speed.moving(0, part.state_bytes + kept)  # what is read may be read while the step computes
        for spilled, base in product((False, True), _bases(part, ways, paged=True)):
            form = replace(base, spilled=spilled)
            if same:
                yield least, lambda form=form: _page(costs, form, allowed, speed)  # type: ignore[misc]
            if same_slices:
                yield least, lambda form=form: _page_slices(costs, form, allowed, speed)  # type: ignore[misc]


def _page_slices(costs: Costs, part: Part, allowed: int, speed: Speed) -> Part | None:
    return next(filter(None, (_page(costs, each, allowed, speed) for each in slices(costs, part))), None)


def _bases(part: Part, ways: Sequence[str], *, paged: bool = False) -> Iterator[Part]:
    """Yield the part with the ways that change no FLOPs: none, each, and both.

    A paged step moves in its backward pass anyway.
    """
    moves = "step-in-backward" in ways and not paged
    for cheap in (False, True) if "recompute-cheap" in ways else (False,):
        for in_backward in (False, True) if moves else (False,):
            yield with_step(part, Step(cheap=cheap, in_backward=in_backward))


def _bytes(costs: Costs, part: Part) -> int:
    return costs.trace(part).peak_bytes


def _recompute(costs: Costs, part: Part, allowed: int) -> Part | None:
    """Return the part with the segments whose second forward pass takes the fewest FLOPs, or None if no segments fit.

    The segments are optimal for the profile. If the traced step takes more than the profile says, the limit is lowered by that.
    """
    profile, flops = _profile(costs, part), _forward_flops(part)
    return _tighten(costs, allowed, lambda limit: _with_recomputed(part, fewest_flops(profile, flops, limit)))


def _with_recomputed(part: Part, segments: tuple[Segment, ...] | None) -> Part | None:
    return None if segments is None else replace(part, recompute=segments)


def _page(costs: Costs, part: Part, allowed: int, speed: Speed) -> Part | None:
    """Return the part with the fastest pages that fit, or None. It reads ahead if that is faster."""
    found = _fastest_pages(costs, part, allowed, speed)
    if found is None:
        ends = (replace(part, pages=finest(len(part.atoms), alone=alone)) for alone in (False, True))
        return next((found for found in ends if _bytes(costs, found) <= allowed), None)
    ahead = _fastest_pages(costs, replace(part, ahead=True), allowed, speed, found.pages)
    return found if ahead is None else min(found, ahead, key=lambda each: seconds_of(costs, each, speed))


def _fastest_pages(
    costs: Costs, part: Part, allowed: int, speed: Speed, beside: tuple[Segment, ...] = ()
) -> Part | None:
    """Return the part with the fastest pages for the profile, whose traced step fits, or None.

    A lower limit has slower pages: the first that fit are the fastest. The profile may be off by some layers' workspace. If the
    step reads ahead, pages that are not predicted faster than `beside` for one that does not are not tried.
    """
    layers, limit, tried = _layers(costs, part), SLACK * allowed, set[tuple[Segment, ...]]()
    most = seconds_on_top(layers, beside, speed, spilled=part.spilled) if beside else inf
    form = {"spilled": part.spilled, "ahead": part.ahead}
    while (pages := fewest_seconds(layers, limit, speed, **form)) is not None:
        if seconds_on_top(layers, pages, speed, **form) >= most:
            return None
        if pages not in tried and _bytes(costs, found := replace(part, pages=pages)) <= allowed:
            return found
        tried.add(pages)
        limit /= FINER
    return None


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
    size, moves = part.micro_batch or config.batch_size, with_step(part, Step(cheap=part.cheap, in_backward=True))
    profile = _profile(costs, replace(moves, micro_batch=part.micro_batch))
    return layers_of(part, profile, size, config.bytes_kept)


def _profile(costs: Costs, part: Part) -> ActivationProfile:
    """Return the profile of the plain step, or of a base, for a micro-batch as the batch."""
    size = part.micro_batch or costs.training_config.batch_size
    base = Step(cheap=part.cheap, in_backward=part.in_backward)
    training_config = with_step(replace(costs.training_config, batch_size=size, attack=None), base)
    key = training_config, part.signature()
    if key not in _PROFILES:
        _PROFILES[key] = recall(activation_profile, part, training_config)
    return _PROFILES[key]
