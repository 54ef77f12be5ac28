"""The segments of a paged step: those with the fewest predicted seconds that a device can hold.

What a segment takes is predicted from the profile of the plain step, which was traced; the paged step that is found is traced
too (planning/fit.py), so that a wrong prediction costs a try, and never a budget.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeVar, cast

from piecework.device_profiles.memory import Overlap
from piecework.device_profiles.profile import DeviceState
from piecework.models.layer_statistics import layer_statistics
from piecework.models.step import Segment
from piecework.planning.part import Part
from piecework.planning.step_cost import ActivationProfile

Number = TypeVar("Number", int, float)


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

    def hidden(self, overlaps: Iterable[Overlap]) -> float:
        """Return the seconds that reading and computing at the same time saves."""
        return sum(min(each.flops / self.flops, self.moving(each.bytes_read, 0, each.accesses)) for each in overlaps)


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

    `weights` are bytes of parameters and buffers, `state` those of the optimiser's state of the largest parameter and `states`
    of all, `working` those of a gradient's pass through an atom beside weights and what is kept, and `flops` a forward pass's
    of the batch, a whole number. `kept` and `outputs` are of atoms alone, and `batch` are the bytes of the examples and their
    labels.
    """

    weights: tuple[int, ...]
    state: tuple[int, ...]
    working: tuple[int, ...]
    flops: tuple[float, ...]
    kept: tuple[int, ...]
    outputs: tuple[int, ...]
    batch: int
    states: tuple[int, ...]


def layers_of(part: Part, profile: ActivationProfile, batch_size: int, kept: float, micro_batch: int = 0) -> Layers:
    """Return what paging a part depends on. The optimiser keeps `kept` bytes of each parameter.

    The profile is that of a step that frees gradients in its backward pass, on a micro-batch if there is one. Between segments,
    whole batches wait.
    """
    units = [*(f"atoms.{atom}" for atom in part.atoms), part.head]
    found = [layer_statistics(part.blueprint, unit) for unit in units]
    largest = [max((layer.parameters for layer in each.layers), default=0) for each in found]
    resident = sum(each.state_bytes for each in found) + round(kept * sum(each.parameters for each in found))
    at_once, example = micro_batch or batch_size, part.input_bytes + 8
    working = [
        max(0, peak - resident - example * at_once - sum(profile.kept[: position + 1]))
        for position, peak in enumerate(profile.peaks)
    ]
    return Layers(
        tuple(each.state_bytes for each in found),
        tuple(round(kept * count) for count in largest),
        tuple(working),
        tuple(float(each.flops * batch_size) for each in found),
        profile.kept,
        tuple(output * batch_size // at_once for output in profile.outputs),
        example * batch_size,
        tuple(round(kept * each.parameters) for each in found),
    )


@dataclass(frozen=True)
class _Prefix:
    """Segments of the first atoms, the bytes of their outputs that stay in memory, and the seconds that they cost."""

    held: int
    seconds: float
    segments: tuple[Segment, ...]


def fewest_seconds(
    layers: Layers, limit: float, speed: Speed, *, spilled: bool, ahead: bool = False
) -> tuple[Segment, ...] | None:
    """Return the segments of the paged step with the fewest seconds whose peak is at most `limit` bytes; None if none has.

    This is dynamic programming over atoms: of all segments of the first atoms only those remain that no others beat in bytes
    and in seconds, with the same last segment if the step reads `ahead`, which then takes two at least. Every step reads and
    writes weights and the optimiser's state once; what is counted here comes on top of it.
    """
    atoms, form = len(layers.kept), _Form(layers, speed, spilled, ahead)
    ends: list[list[_Prefix]] = [[] for _ in range(atoms + 1)]
    ends[0] = [_Prefix(0, 0.0, ())]
    found: list[_Prefix] = []
    for first in range(atoms + 1):
        for prefix in _best(ends[first], alike=ahead):
            if form.peak(prefix, (first, atoms), last=True) <= limit and (prefix.segments or not ahead):
                found.append(form.extend(prefix, (first, atoms), last=True))
            for end in range(first + 1, atoms + 1):
                if form.peak(prefix, (first, end), last=False) > limit:
                    break
                ends[end].append(form.extend(prefix, (first, end), last=False))
    return min(found, key=lambda each: (each.seconds, len(each.segments))).segments if found else None


def finest(atoms: int, *, alone: bool = True) -> tuple[Segment, ...]:
    """Return the pages with one atom in each segment, and the head `alone`, or with the last atom."""
    return (*((atom, atom + 1) for atom in range(atoms)), *([(atoms, atoms)] if alone else []))


def peak_of(layers: Layers, pages: Sequence[Segment], *, spilled: bool, ahead: bool = False) -> int:
    """Return the predicted peak of a paged step."""
    form, prefix, peaks = _Form(layers, BOARD, spilled, ahead), _Prefix(0, 0.0, ()), list[int]()
    for number, segment in enumerate(pages, start=1):
        peaks.append(form.peak(prefix, segment, last=number == len(pages)))
        prefix = form.extend(prefix, segment, last=number == len(pages))
    return max(peaks)


def seconds_on_top(
    layers: Layers, pages: Sequence[Segment], speed: Speed, *, spilled: bool, ahead: bool = False
) -> float:
    """Return the seconds of a paged step beside those of computing once, and of moving weights and optimiser's state once."""
    form, prefix = _Form(layers, speed, spilled, ahead), _Prefix(0, 0.0, ())
    for number, segment in enumerate(pages, start=1):
        prefix = form.extend(prefix, segment, last=number == len(pages))
    return prefix.seconds


class _Form:
    """What the bytes and seconds of segments depend on beside the segments."""

    def __init__(self, layers: Layers, speed: Speed, spilled: bool, ahead: bool) -> None:
        self.layers, self.speed, self.spilled, self.ahead = layers, speed, spilled, ahead
        self.weights, self.states, self.flops = _sums(layers.weights), _sums(layers.states), _sums(layers.flops)
        self.passing = _largest_passes(layers, ahead)

    def extend(self, prefix: _Prefix, segment: Segment, *, last: bool) -> _Prefix:
        """Return a prefix with one more segment. It runs twice, and its output is kept, unless it is the last."""
        (first, end), speed, held, seconds = segment, self.speed, prefix.held, prefix.seconds
        if not last:
            output = self.layers.outputs[end - 1]
            written = output if self.spilled else 0
            seconds += (self.flops[end] - self.flops[first]) / speed.flops
            read, accesses = self.weights[end] - self.weights[first] + written, end - first + 2 * self.spilled
            seconds += speed.moving(read, written, accesses, self.spilled)
            held += 0 if self.spilled else output
        if self.ahead and prefix.segments:
            seconds -= speed.hidden(self._overlaps(prefix.segments[-1], segment, last=last))
        return _Prefix(held, seconds, (*prefix.segments, segment))

    def _overlaps(self, before: Segment, segment: Segment, *, last: bool) -> tuple[Overlap, Overlap]:
        """Return the read of a segment in the forward pass of the one before, and of that one in the backward pass of this.

        A backward pass computes thrice what a forward pass does, which it repeats.
        """
        (start, first), end = before, segment[1] + last  # the head follows the last atom
        moved = self.weights[end] - self.weights[first]
        moved += self.states[end] - self.states[first] if last else 0
        forward = Overlap(self.flops[first] - self.flops[start], moved, end - first)
        moved = self.weights[first] - self.weights[start] + self.states[first] - self.states[start]
        return forward, Overlap(3 * (self.flops[end] - self.flops[first]), moved, first - start)

    def peak(self, prefix: _Prefix, segment: Segment, *, last: bool) -> int:
        """Return the predicted bytes while a gradient passes a segment, and the head if it is the `last`."""
        (first, end), layers = segment, self.layers
        held = prefix.held + (layers.outputs[first - 1] if self.spilled and first else 0)
        resident = layers.batch + held + self.weights[end + last] - self.weights[first]
        if self.ahead and prefix.segments:
            start = prefix.segments[-1][0]
            resident += self.weights[first] - self.weights[start] + self.states[first] - self.states[start]
        return resident + self.passing[first, end + last]


def _sums(values: Iterable[Number]) -> list[Number]:
    """Return the sums of the first values: of none, of one, ... and of all."""
    return cast("list[Number]", [0, *accumulate(values)])


@lru_cache(256)
def _largest_passes(layers: Layers, ahead: bool) -> dict[Segment, int]:
    """Return what a gradient's pass takes at most beside weights, for all layers from one up to another.

    The optimiser's state is there for one parameter at a time, or for all that have not moved yet if the step reads `ahead`.
    """
    kept, states, found = _sums(layers.kept), _sums(layers.states), dict[Segment, int]()
    for first in range(len(layers.working)):
        most = 0
        for position, working in enumerate(layers.working[first:], start=first):
            following = min(position + 1, len(layers.kept))
            state = states[position + 1] - states[first] if ahead else layers.state[position]
            most = max(most, kept[following] - kept[first] + working + state)
            found[first, position + 1] = most
    return found


def _best(prefixes: Sequence[_Prefix], *, alike: bool) -> list[_Prefix]:
    """Return the prefixes that no other one beats in both bytes and seconds, or none with an `alike` last segment."""
    least: dict[tuple[Segment, ...], int] = {}
    found: list[_Prefix] = []
    for prefix in sorted(prefixes, key=lambda each: (each.seconds, each.held)):
        key = prefix.segments[-1:] if alike else ()
        if key not in least or prefix.held < least[key]:
            found.append(prefix)
            least[key] = prefix.held
    return found
