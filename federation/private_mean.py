"""The private mean of partial updates: clipped whole, summed, noised, and divided by what was known before.

The equation is in federation/privacy.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flwr.app import ArrayRecord

from piecework.federation.aggregation import UpdateRejectedError, WeightedMean
from piecework.federation.privacy import Privacy
from piecework.models.cascade import Shape, unit_of
from piecework.models.width import Indices, take
from piecework.training.parcels import view

Entries = Mapping[str, Indices | None]  # all of an array, or its entries at some indices


class Holders(NamedTuple):
    """So many clients that hold the same entries of the model."""

    entries: Entries
    clients: int


class PrivateMean(WeightedMean):
    """The model, moved by the noisy sum of all clients' clipped updates over the expected number of those that hold an entry.

    Every client counts alike: weights are ignored. Integer buffers do not move. `model` is what clients were sent.
    """

    def __init__(self, privacy: Privacy, model: ArrayRecord) -> None:
        super().__init__()
        self._privacy, self._release, self._model = privacy, privacy.releases, model
        self._holders: dict[str, int | np.ndarray] = {}
        self._noisy: dict[str, tuple[float, int]] = {}  # squares of what moved an array's entries, and their number

    def expect(self, holders: Sequence[Holders]) -> None:
        """Take note of which clients hold which entries, whether they take part or not."""
        for entries, clients in holders:
            for name, where in entries.items():
                if name not in self._model or not np.issubdtype(np.dtype(self._model[name].dtype), np.floating):
                    continue
                if where is None:
                    self._holders[name] = self._holders.get(name, 0) + clients
                else:
                    held = self._holders.setdefault(name, np.zeros(self._model[name].shape, np.int32))
                    assert isinstance(held, np.ndarray)
                    held[np.ix_(*where)] += clients

    def add(
        self,
        arrays: Mapping[str, np.ndarray],
        weight: float,
        indices: Mapping[str, Indices] | None = None,
        full: Mapping[str, Shape] | None = None,
    ) -> None:
        """Add all that one client trained, as a change of the model of norm at most C.

        Raises UpdateRejectedError for a change so large that its norm is no number.
        """
        places = {name: np.ix_(*indices[name]) if indices is not None else ... for name in arrays if name in self}
        changes = {}
        for name in places:
            sent = view(self._model[name])
            before = take(sent, indices[name]) if indices is not None else sent
            changes[name] = np.subtract(arrays[name], before, dtype=np.float64)
        norm = math.sqrt(sum(float(np.square(change).sum()) for change in changes.values()))
        if not math.isfinite(norm):
            raise UpdateRejectedError("the norm of what the client changed is too large for a number")
        factor = self._privacy.clip / max(norm, self._privacy.clip)
        for name, change in changes.items():
            if name not in self._sums:
                self._sums[name] = np.zeros(self._model[name].shape)
            self._sums[name][places[name]] += factor * change

    def __contains__(self, name: str) -> bool:
        """Return whether any client holds an array, so that it moves in this round even if nobody answers."""
        return name in self._holders

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the new array in float64."""
        return self.over(name, self._model[name].numpy().astype(np.float64))

    def weight(self, name: str) -> float:
        """Return the expected number of clients that train an array which all of them hold whole."""
        return self._privacy.rate * float(self._holders[name])

    def over(self, name: str, previous: np.ndarray) -> np.ndarray:
        """Return the new array in the dtype of its previous value. Entries that no client holds stay as they were."""
        held = np.broadcast_to(self._holders[name], previous.shape)
        rng = self._privacy.generator("noise", self._release, name)
        moved = rng.normal(0.0, self._privacy.noise, previous.shape)
        moved += self._sums.get(name, 0.0)
        within = moved[held > 0]
        self._noisy[name] = float(np.square(within).sum()), within.size
        np.divide(moved, self._privacy.rate * held, out=moved, where=held > 0)
        return np.where(held > 0, previous + moved, previous).astype(previous.dtype)

    def signal_to_noise(self) -> dict[str, float]:
        """Return for each unit the norm of the sum of updates, in multiples of that of the noise on it.

        It is estimated from the noisy sum alone, so that it gives nothing away: sqrt(|noisy|^2 / (n (z C)^2) - 1), or 0.
        """
        squares, counts = dict[str, float](), dict[str, int]()
        for name, (square, count) in self._noisy.items():
            unit = unit_of(name)
            squares[unit], counts[unit] = squares.get(unit, 0.0) + square, counts.get(unit, 0) + count
        variance = self._privacy.noise**2
        ratios = {unit: square / (counts[unit] * variance) for unit, square in squares.items() if counts[unit]}
        return {unit: math.sqrt(max(0.0, ratio - 1)) for unit, ratio in ratios.items()}
