"""The segments of a paged step: those with the fewest predicted seconds that a device can hold.

What a segment takes is predicted from the profile of the plain step, which was traced; the paged step that is found is traced
too (planning/fit.py), so that a wrong prediction costs a try, and never a budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from piecework.device_profiles.profile import DeviceState
from piecework.models.layer_statistics import layer_statistics
from piecework.models.step import Segment
from piecework.planning.part import Part
from piecework.planning.step_cost import ActivationProfile


class Speed(NamedTuple):
    """How fast a device computes (FLOP/s), reads files (bytes/s), begins to (seconds an access), and the same for writing.

    Without `write` and `write_latency`, it writes as fast as it reads.
    """

    flops: float
    disk: float
    latency: float = 0.0
    write: float = 0.0
    write_latency: float | None = None

    def moving(self, read: float, written: float, accesses: float = 0, writes: float = 0) -> float:
        """Return the seconds in which bytes are read and written in so many accesses, of which `writes` write."""
        more = 0.0 if self.write_latency is None else self.write_latency - self.latency  # of an access that writes
        return read / self.disk + written / (self.write or self.disk) + accesses * self.latency + writes * more


BOARD = Speed(4e9, 4e7)  # a small board with an SD card or eMMC, where no device is named


def speed_of(device: DeviceState) -> Speed:
    """Return how fast a device is in a round."""
    return Speed(
        device.flops_per_second,
        device.disk_bandwidth,
        device.disk_latency,
        device.write_bandwidth,
        device.disk_write_latency,
    )


@dataclass(frozen=True)
class Layers:
    """What paging a part depends on, by the position of the atom, and last for the head.

    `weights` are bytes of parameters and buffers, `state` those of the optimiser's state of the largest parameter, `working`
    those of a gradient's pass through an atom beside weights and what is kept, and `flops` a forward pass's of the batch.
    `kept` and `outputs` are of atoms alone, and `batch` are the bytes of the examples and their labels.
    """

    weights: tuple[int, ...]
    state: tuple[int, ...]
    working: tuple[int, ...]
    flops: tuple[float, ...]
    kept: tuple[int, ...]
    outputs: tuple[int, ...]
    batch: int


def layers_of(part: Part, profile: ActivationProfile, batch_size: int, kept: float) -> Layers:
    """Return what paging a part depends on. The profile is that of a step that frees gradients in its backward pass.

    The optimiser keeps `kept` bytes of each parameter.
    """
    units = [*(f"atoms.{atom}" for atom in part.atoms), part.head]
    found = [layer_statistics(part.blueprint, unit) for unit in units]
    largest = [max((layer.parameters for layer in each.layers), default=0) for each in found]
    resident = sum(each.state_bytes for each in found) + round(kept * sum(each.parameters for each in found))
    batch = part.input_bytes * batch_size + 8 * batch_size
    working = [
        max(0, peak - resident - batch - sum(profile.kept[: position + 1]))
        for position, peak in enumerate(profile.peaks)
    ]
    return Layers(
        tuple(each.state_bytes for each in found),
        tuple(round(kept * count) for count in largest),
        tuple(working),
        tuple(float(each.flops * batch_size) for each in found),
        profile.kept,
        profile.outputs,
        batch,
    )


@dataclass(frozen=True)
class _Prefix:
    """Segments of the first atoms, the bytes of their outputs that stay in memory, and the seconds that they cost."""

    held: int
    seconds: float
    segments: tuple[Segment, ...]


def fewest_seconds(layers: Layers, limit: float, speed: Speed, *, spilled: bool) -> tuple[Segment, ...] | None:
    """Return the segments of the paged step with the fewest seconds whose peak is at most `limit` bytes; None if none has.

    This is dynamic programming over atoms: of all segments of the first atoms only those remain that no others beat in bytes
    and in seconds. Every step reads and writes weights and the optimiser's state once; what is counted here comes on top of it.
    """
    atoms = len(layers.kept)
    ends: list[list[_Prefix]] = [[] for _ in range(atoms + 1)]
    ends[0] = [_Prefix(0, 0.0, ())]
    found: list[_Prefix] = []
    for first in range(atoms + 1):
        for prefix in _best(ends[first]):
            if _peak(layers, first, atoms, prefix.held, spilled=spilled, last=True) <= limit:
                found.append(replace(prefix, segments=(*prefix.segments, (first, atoms))))
            for end in range(first + 1, atoms + 1):
                if _peak(layers, first, end, prefix.held, spilled=spilled, last=False) > limit:
                    break
                ends[end].append(_extend(layers, prefix, (first, end), speed, spilled=spilled))
    return min(found, key=lambda each: (each.seconds, len(each.segments))).segments if found else None


def finest(atoms: int, *, alone: bool = True) -> tuple[Segment, ...]:
    """Return the pages with one atom in each segment, and the head `alone`, or with the last atom."""
    return (*((atom, atom + 1) for atom in range(atoms)), *([(atoms, atoms)] if alone else []))


def peak_of(layers: Layers, pages: Sequence[Segment], *, spilled: bool) -> int:
    """Return the predicted peak of a paged step."""
    held, peaks = 0, list[int]()
    for first, end in pages:
        peaks.append(_peak(layers, first, end, held, spilled=spilled, last=(first, end) == pages[-1]))
        held += layers.outputs[end - 1] if not spilled and end else 0
    return max(peaks)


def _extend(layers: Layers, prefix: _Prefix, segment: Segment, speed: Speed, *, spilled: bool) -> _Prefix:
    """Return a prefix with a segment that runs twice, and whose output is kept."""
    first, end = segment
    output = layers.outputs[end - 1]
    written = output if spilled else 0
    seconds = sum(layers.flops[first:end]) / speed.flops
    seconds += speed.moving(sum(layers.weights[first:end]) + written, written, end - first + 2 * spilled, spilled)
    return _Prefix(0 if spilled else prefix.held + output, prefix.seconds + seconds, (*prefix.segments, segment))


def _peak(layers: Layers, first: int, end: int, held: int, *, spilled: bool, last: bool) -> int:
    """Return the predicted bytes while a gradient passes the atoms from `first` to before `end`, and the head if `last`."""
    held += layers.outputs[first - 1] if spilled and first else 0
    resident = layers.batch + held + sum(layers.weights[first:end]) + (layers.weights[-1] if last else 0)
    positions = range(first, end + last)
    passing = [
        sum(layers.kept[first : position + 1]) + layers.working[position] + layers.state[position]
        for position in positions
    ]
    return resident + max(passing)


def _best(prefixes: Sequence[_Prefix]) -> list[_Prefix]:
    """Return the prefixes that no other one beats in both bytes and seconds."""
    found: list[_Prefix] = []
    for prefix in sorted(prefixes, key=lambda each: (each.seconds, each.held)):
        if not found or prefix.held < found[-1].held:
            found.append(prefix)
    return found
