"""The messages that wait for a worker, in the order in which they are to begin."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from piecework.engines.cluster.book import Want
from piecework.engines.cluster.shared_arrays import Apart


class Address(NamedTuple):
    """Where a message's client keeps its files: the run's folder of clients, and the experiment; empty = it needs none."""

    state_dir: str
    experiment: str


@dataclass(frozen=True)
class Prepared:
    """A message as it waits: what it needs, what is sent, its objects by digest, and where its client keeps its files.

    `trains` says that its answer enters a record of training, where a remark is read.
    """

    want: Want
    message: Apart
    digests: list[bytes]
    address: Address
    trains: bool


class Waiting:
    """Prepared messages, the longest first, and those of one length in the order in which they came."""

    def __init__(self) -> None:
        self._prepared: dict[str, Prepared] = {}
        self._places: dict[str, tuple[float, int, str]] = {}
        self._order: list[tuple[float, int, str]] = []
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._prepared

    def __iter__(self) -> Iterator[Prepared]:
        return (self._prepared[identifier] for _, _, identifier in self._order)

    def add(self, prepared: Prepared, *, again: bool = False) -> None:
        """Take in a message. One that waits `again` comes before others of its length."""
        want, number = prepared.want, next(self._numbers)
        place = -want.seconds, -number if again else number, want.identifier
        self._prepared[want.identifier], self._places[want.identifier] = prepared, place
        insort(self._order, place)

    def pop(self, identifier: str) -> Prepared:
        """Take out a message. Raises KeyError."""
        del self._order[bisect_left(self._order, self._places.pop(identifier))]
        return self._prepared.pop(identifier)
