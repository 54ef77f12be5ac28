"""Check updates before they change the model, and average them as they arrive.

The average is a running sum, so the server's memory does not depend on the number of clients in a round.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any, Protocol, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.models.cascade import Shape, unit_of
from piecework.models.width import Indices
from piecework.training.answers import AnswerError
from piecework.training.parcels import view

Spec = Mapping[str, tuple[tuple[int, ...], np.dtype]]  # name -> shape and dtype
Who = TypeVar("Who")
Norms = dict[str, float]  # unit, or its statistics -> root mean square of the update, or the limit of it
# Suffix of a unit's name: running means and variances of its batch norms, which scale as squared features.
STATISTICS = ":statistics"
HEAD_ALONE = "head:alone"  # the head of an update that contains nothing else
MAX_BATCHES = 2**31  # maximum number of batches of a client in a round
LEAST_NORMS = 3  # updates that are held back until the norms of a unit without a history can be compared


class UpdateRejectedError(AnswerError):
    """An update may not enter the model. The message is the reason for the records."""


class WeightedMean:
    """The weighted mean sum_k w_k x_k / sum_k w_k of each entry, over the clients k that sent it, accumulated in float64.

    Clients may send whole arrays, or the entries of an array at some indices. Integer buffers (`num_batches_tracked`) take the
    maximum instead.
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._weights: dict[str, Any] = {}  # a number, or one for each entry

    def add(
        self,
        arrays: Mapping[str, np.ndarray],
        weight: float,
        indices: Mapping[str, Indices] | None = None,
        full: Mapping[str, Shape] | None = None,
    ) -> None:
        """Add one client's arrays with a weight > 0.

        With `indices`, an array holds the entries at these indices of an array of the shape in `full`.
        """
        for name, array in arrays.items():
            if not np.issubdtype(array.dtype, np.floating):
                self._sums[name] = np.maximum(self._sums.get(name, array), array)
            elif indices is not None and full is not None:
                if name not in self._sums:
                    self._sums[name], self._weights[name] = np.zeros(full[name]), np.zeros(full[name])
                place = np.ix_(*indices[name])
                self._sums[name][place] += weight * array.astype(np.float64)
                self._weights[name][place] += weight
            else:
                added = array.astype(np.float64) * weight
                self._sums[name] = np.add(self._sums[name], added) if name in self._sums else added
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the mean of an array that clients sent whole, in float64, or the maximum of an integer buffer in its type."""
        total = self._sums[name]
        return total / self._weights[name] if np.issubdtype(total.dtype, np.floating) else total

    def weight(self, name: str) -> float:
        """Return the sum of the weights of an array that clients sent whole."""
        return float(self._weights[name])

    def over(self, name: str, previous: np.ndarray) -> np.ndarray:
        """Return the mean of an array in the dtype of its previous value. Entries that no client sent stay as they were."""
        if not np.issubdtype(previous.dtype, np.floating):
            return np.asarray(
                self._sums[name], dtype=previous.dtype
            )  # numpy turns arrays without dimensions into scalars
        weights = np.asarray(self._weights[name])
        fresh = previous.copy()
        np.divide(self._sums[name], weights, out=fresh, where=weights > 0, casting="same_kind")
        return fresh


class Mean(Protocol):
    """A running mean of some of a model's arrays."""

    def __contains__(self, name: str) -> bool: ...
    def over(self, name: str, previous: np.ndarray) -> np.ndarray: ...


def share_bytes(one: ArrayRecord, other: ArrayRecord) -> bool:
    """Return whether two records have the same names, in the same order, and the same bytes objects; no values are compared.

    A record holds arrays of its own: one made of another's arrays shares nothing with it but their bytes.
    """
    return list(one) == list(other) and all(one[name].data is other[name].data for name in one)


def replace_arrays(arrays: ArrayRecord, mean: Mean) -> ArrayRecord:
    """Return the model with the means in place of its arrays. Arrays that no client trained are not copied."""
    return ArrayRecord(
        {name: Array(mean.over(name, array.numpy())) if name in mean else array for name, array in arrays.items()}
    )


@dataclass(frozen=True)
class CheckedUpdate:
    """Arrays that may enter the model, the number of examples behind them, and each unit's distance from the weights sent.

    Norms are per unit, because one client may send a block and another only the head. They are root mean squares, so that an
    update of a fraction of a unit's channels compares with one of all channels. Batch-norm statistics are counted apart from
    weights.
    """

    arrays: dict[str, np.ndarray]
    examples: int
    norms: Norms


def check_update(
    arrays: ArrayRecord,
    examples: object,
    previous: ArrayRecord,
    spec: Spec,
    limits: Mapping[str, float] | None = None,
    maximum: Callable[[], float] = lambda: math.inf,
) -> CheckedUpdate:
    """Return the update if its names, shapes, dtypes and values are valid and each unit's norm is within its limit.

    `examples` must be a positive integer. If any unit has no entry in `limits`, the Euclidean norm of all weights together is
    at most `maximum()`; this excludes batch-norm statistics, because their scale cannot be known in advance. Raises
    UpdateRejectedError with the reason.
    """
    if not isinstance(examples, int) or isinstance(examples, bool) or examples <= 0:
        raise UpdateRejectedError(f"num-examples is {examples!r}: it must be a positive integer")
    if not arrays:
        raise UpdateRejectedError("the update holds no arrays")
    checked, squares, counts = {}, dict[str, float](), dict[str, int]()
    for name in arrays:
        array = _check_array(arrays, name, spec)
        if np.issubdtype(array.dtype, np.floating):
            square = float(np.square(np.subtract(array, view(previous[name]), dtype=np.float64)).sum())
            unit = unit_of(name) + (STATISTICS if name.endswith(("running_mean", "running_var")) else "")
            squares[unit], counts[unit] = squares.get(unit, 0.0) + square, counts.get(unit, 0) + array.size
        elif name.endswith("num_batches_tracked"):
            _require_counts(name, array, previous[name].numpy())
        checked[name] = array
    if set(squares) == {"head"}:  # a head trained alone moves differently from one behind layers that learn too
        squares, counts = {HEAD_ALONE: squares["head"]}, {HEAD_ALONE: counts["head"]}
    norms = {unit: math.sqrt(square / max(1, counts[unit])) for unit, square in squares.items()}
    require_within(norms, limits or {})
    weights = [unit for unit in norms if not unit.endswith(STATISTICS)]
    total = math.sqrt(sum(squares[unit] for unit in weights))
    if any(unit not in (limits or {}) for unit in weights) and total > maximum():
        raise UpdateRejectedError(
            f"the update's norm {total:.4g} exceeds the limit {maximum():.4g} (faults.update-norm-limit)"
        )
    return CheckedUpdate(checked, examples, norms)


def _check_array(arrays: ArrayRecord, name: str, spec: Spec) -> np.ndarray:
    """Return an array of an update. Raises UpdateRejectedError for an unknown name, another shape or dtype, or bad values."""
    if name not in spec:
        raise UpdateRejectedError(f"array {name!r} is not part of the model")
    array = _decode(arrays, name)
    shape, dtype = spec[name]
    if array.shape != shape:
        raise UpdateRejectedError(f"array {name!r} has shape {array.shape}, expected {shape}")
    if array.dtype != dtype:
        raise UpdateRejectedError(f"array {name!r} has dtype {array.dtype}, expected {dtype}")
    if np.issubdtype(dtype, np.floating):
        if not np.isfinite(array).all():
            raise UpdateRejectedError(f"array {name!r} holds {np.count_nonzero(~np.isfinite(array))} non-finite values")
        if name.endswith("running_var") and (array < 0).any():
            raise UpdateRejectedError(f"array {name!r} has variances below 0, the smallest is {array.min():.4g}")
    return array


def _require_counts(name: str, array: np.ndarray, previous: np.ndarray) -> None:
    """Raise UpdateRejectedError for implausible batch counts: the model takes the largest, so one bad count would stay."""
    if (array < 0).any() or (array > previous + MAX_BATCHES).any():
        raise UpdateRejectedError(
            f"array {name!r} counts {array.min()} to {array.max()} batches: it must be at least 0, and at most "
            f"{MAX_BATCHES:,} more than what was sent"
        )


def require_all(update: CheckedUpdate, names: Iterable[str]) -> None:
    """Raise UpdateRejectedError if an array is missing, for methods that cannot use an update of part of the model."""
    if missing := [name for name in names if name not in update.arrays]:
        raise UpdateRejectedError(f"array {missing[0]!r} is missing: this strategy needs an update of the whole model")


def require_within(norms: Norms, limits: Mapping[str, float]) -> None:
    """Raise UpdateRejectedError for the first unit whose norm exceeds its limit. Units without a limit always pass."""
    for unit, norm in norms.items():
        if norm > (limit := limits.get(unit, math.inf)):
            raise UpdateRejectedError(
                f"the update of {unit} moves it by {norm:.4g} (root mean square), more than the limit {limit:.4g} "
                "(faults.update-norm-limit)"
            )


def _decode(arrays: ArrayRecord, name: str) -> np.ndarray:
    try:
        array = arrays[name].numpy()
    except Exception as error:  # numpy's reader raises half a dozen kinds, among them errors of zip files and of tokens
        raise UpdateRejectedError(f"array {name!r} cannot be read: {error}") from error
    if not isinstance(array, np.ndarray):  # numpy also reads an archive of arrays
        raise UpdateRejectedError(f"array {name!r} cannot be read: it is a {type(array).__name__}")
    return array


def norm_limits(accepted: Mapping[str, list[float]], factor: float) -> Norms:
    """Return factor x the median norm accepted in earlier rounds, for each unit with a history; no limits if factor is 0."""
    return {unit: factor_of(unit, factor) * median(norms) for unit, norms in accepted.items()} if factor else {}


def factor_of(unit: str, factor: float) -> float:
    """Return the factor, or its square for batch-norm statistics, which scale as squared features."""
    return factor**2 if unit.endswith(STATISTICS) else factor


def add_norm_limits(
    updates: Iterable[tuple[Who, CheckedUpdate]], factor: float, known: Container[str], enough: int = 0
) -> Iterator[tuple[Who, CheckedUpdate, Norms]]:
    """Yield each update with limits for units without a history: factor x the median of the unit's first LEAST_NORMS norms.

    `known` are the units with a history. An update is held back until LEAST_NORMS updates of each unknown unit that it
    moves have arrived, or until no more updates come, or there are `enough` (0 = all). With factor 0, updates pass at once and
    without limits.
    """
    seen, limits = dict[str, list[float]](), Norms()
    held: list[tuple[Who, CheckedUpdate]] = []
    for count, (who, update) in enumerate(updates, start=1):
        if not factor:
            yield who, update, limits
            continue
        note_norms(seen, {unit: norm for unit, norm in update.norms.items() if unit not in known})
        least = 1 if 0 < enough <= count else LEAST_NORMS
        limits = {
            unit: factor_of(unit, factor) * median_low(n[:LEAST_NORMS]) for unit, n in seen.items() if len(n) >= least
        }
        waiting, held = [*held, (who, update)], []
        for pair in waiting:
            if all(unit in known or unit in limits or not norm for unit, norm in pair[1].norms.items()):
                yield *pair, limits
            else:
                held.append(pair)
    limits = {unit: factor_of(unit, factor) * median_low(norms[:LEAST_NORMS]) for unit, norms in seen.items()}
    yield from ((*pair, limits) for pair in held)


def note_norms(found: dict[str, list[float]], norms: Norms) -> None:
    """Append norms to the lists in `found`, by unit. Zeros are skipped: an unchanged unit shows no typical norm."""
    for unit, norm in norms.items():
        if norm:
            found.setdefault(unit, []).append(norm)


def first_limit(factor: float, arrays: ArrayRecord) -> float:
    """Return the maximum Euclidean norm of an update without a history: factor x the norm of the model; inf if factor is 0."""
    if not factor:
        return math.inf
    decoded = (array.numpy() for array in arrays.values())
    return factor * math.sqrt(
        sum(float(np.square(a, dtype=np.float64).sum()) for a in decoded if np.issubdtype(a.dtype, np.floating))
    )


def spec_of(arrays: ArrayRecord) -> Spec:
    """Return the names, shapes and dtypes of a model's arrays."""
    return {name: (tuple(array.shape), np.dtype(array.dtype)) for name, array in arrays.items()}
