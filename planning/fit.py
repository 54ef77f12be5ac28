"""Ways to fit a training step into less memory without changing what it computes: micro-batches and recomputed segments.

Micro-batches cost no FLOPs. Recomputation costs the forward pass of its segments once more. `cheapest` finds the step with the
fewest FLOPs that fits, and `smallest` the one with the fewest bytes. Both verify with traced costs.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from piecework.device_profiles.memory import StepCost
from piecework.device_profiles.trace_cache import recall
from piecework.models.layer_statistics import layer_statistics
from piecework.models.static_norms import mixes_examples
from piecework.models.step import Segment
from piecework.planning.part import Part
from piecework.planning.step_cost import ActivationProfile, activation_profile
from piecework.training.settings.shared import WAYS
from piecework.training.sgd import TrainingConfig

_PROFILES: dict[Hashable, ActivationProfile] = {}
ATTEMPTS = 8  # traces of one search; the profile has been off by a few buffers at most


class Costs(Protocol):
    """Traced costs of parts for one training config."""

    @property
    def training_config(self) -> TrainingConfig:
        """The training config of all steps."""

    def trace(self, part: Part) -> StepCost:
        """Return peak bytes and FLOPs of one training step of a part."""


def cheapest(costs: Costs, part: Part, allowed: int, ways: Sequence[str]) -> Part | None:
    """Return the part with a step that takes at most `allowed` bytes, or None if no step fits.

    The plain step is first. Then each of the `ways` alone is tried, in their order, and then both together. A step has the
    largest micro-batch that fits, and the fewest FLOPs.
    """
    if _bytes(costs, part) <= allowed:
        return part
    for way in ways:
        found = _slice_batch(costs, part, allowed) if way == "micro-batch" else _recompute(costs, part, allowed)
        if found is not None:
            return found
    if len(ways) < len(WAYS):
        return None
    both = (_recompute(costs, sliced, allowed) for sliced in slices(costs, part))
    return min(filter(None, both), key=lambda found: costs.trace(found).flops, default=None)


def smallest(costs: Costs, part: Part, ways: Sequence[str]) -> Part:
    """Return the part with the step that takes the fewest bytes of all that `ways` allow."""
    found = [part]
    if "micro-batch" in ways:
        found += list(slices(costs, part))[-1:]
    if "recompute" in ways:
        found += [replace(each, recompute=_leanest(costs, each)) for each in found]
    return min(found, key=lambda each: _bytes(costs, each))


def slices(costs: Costs, part: Part) -> Iterator[Part]:
    """Yield the part with micro-batches of half the batch, a quarter and so on.

    The last have one example, or three if batch norms use the statistics of what is computed together: a batch that is cut into
    parts of at most three has no part of one example.
    """
    size, least = costs.training_config.batch_size, 3 if mixes_examples(part.blueprint) else 1
    while size > least:
        size = max(size // 2, least)
        yield replace(part, micro_batch=size)


def _bytes(costs: Costs, part: Part) -> int:
    return costs.trace(part).peak_bytes


def _slice_batch(costs: Costs, part: Part, allowed: int) -> Part | None:
    return next((found for found in slices(costs, part) if _bytes(costs, found) <= allowed), None)


def _recompute(costs: Costs, part: Part, allowed: int) -> Part | None:
    """Return the part with the segments whose second forward pass takes the fewest FLOPs, or None if no segments fit.

    The segments are optimal for the profile. If the traced step takes more than the profile says, the limit is lowered by that.
    """
    profile, flops = _profile(costs, part)
    limit: float = allowed
    for _ in range(ATTEMPTS):
        segments = fewest_flops(profile, flops, limit)
        if segments is None:
            return None
        found = replace(part, recompute=segments)
        excess = _bytes(costs, found) - allowed
        if excess <= 0:
            return found
        limit -= excess
    return None


def _leanest(costs: Costs, part: Part) -> tuple[Segment, ...]:
    """Return the segments with the lowest peak by the profile."""
    profile, flops = _profile(costs, part)
    low, high = 0.0, float(max(profile.peaks))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fewest_flops(profile, flops, middle) is not None else (middle, high)
    return fewest_flops(profile, flops, high) or ()


def _profile(costs: Costs, part: Part) -> tuple[ActivationProfile, list[int]]:
    size = part.micro_batch or costs.training_config.batch_size
    training_config = replace(costs.training_config, batch_size=size, attack=None)
    flops = [layer_statistics(part.blueprint, f"atoms.{atom}").flops for atom in part.atoms]
    key = training_config, part.signature()
    if key not in _PROFILES:
        _PROFILES[key] = recall(activation_profile, part, training_config)
    return _PROFILES[key], flops


@dataclass(frozen=True)
class _Prefix:
    """A choice for the first atoms: the bytes that it keeps of them, its extra FLOPs, and its segments."""

    kept: int
    flops: int
    segments: tuple[Segment, ...]


def fewest_flops(profile: ActivationProfile, flops: Sequence[int], limit: float) -> tuple[Segment, ...] | None:
    """Return the segments to recompute with the fewest FLOPs for a peak of at most `limit` bytes; None if none have it.

    `flops` are those of each atom's forward pass. This is dynamic programming over atoms: of all choices for the first atoms
    only those remain that keep fewer bytes than every choice with fewer FLOPs.
    """
    atoms = len(flops)
    before = [0]  # bytes that the plain step keeps of the atoms before each one
    for kept in profile.kept:
        before.append(before[-1] + kept)

    def fits(prefix: _Prefix, first: int, last: int) -> bool:
        spared = before[first] - prefix.kept
        return all(profile.peaks[atom] - spared <= limit for atom in range(first, last))

    prefixes: list[list[_Prefix]] = [[] for _ in range(atoms + 1)]
    prefixes[0] = [_Prefix(0, 0, ())]
    for first in range(atoms):
        for prefix in _best(prefixes[first]):
            if fits(prefix, first, first + 1):
                prefixes[first + 1].append(replace(prefix, kept=prefix.kept + profile.kept[first]))
            for last in range(first + 1, atoms + 1):
                if not fits(prefix, first, last):
                    break
                again = prefix.flops + sum(flops[first:last])
                segments = (*prefix.segments, (first, last))
                prefixes[last].append(_Prefix(prefix.kept + profile.outputs[last - 1], again, segments))
    ends = [prefix for prefix in _best(prefixes[atoms]) if fits(prefix, atoms, atoms + 1)]
    return min(ends, key=lambda prefix: prefix.flops).segments if ends else None


def _best(prefixes: Sequence[_Prefix]) -> list[_Prefix]:
    """Return the choices that no other one beats in both bytes and FLOPs."""
    found: list[_Prefix] = []
    for prefix in sorted(prefixes, key=lambda each: (each.flops, each.kept)):
        if not found or prefix.kept < found[-1].kept:
            found.append(prefix)
    return found
