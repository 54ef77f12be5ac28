"""The segments of atoms that a step runs again in its backward pass: those with the fewest FLOPs that a device can hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piecework.models.step import Segment
from piecework.planning.step_cost import ActivationProfile


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


def leanest(profile: ActivationProfile, flops: Sequence[int]) -> tuple[Segment, ...]:
    """Return the segments with the lowest peak by the profile."""
    low, high = 0.0, float(max(profile.peaks))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fewest_flops(profile, flops, middle) is not None else (middle, high)
    return fewest_flops(profile, flops, high) or ()
