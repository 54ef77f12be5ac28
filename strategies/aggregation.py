"""Updates are checked before they touch the model, and averaged as they arrive.

The running sum is what makes a server's memory independent of the number of clients in a round.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, median_low
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord

Spec = Mapping[str, tuple[tuple[int, ...], np.dtype]]  # name -> shape and dtype
Who = TypeVar("Who")
HELD = 3  # updates of the first round that are held until their norms can be compared


class UpdateRejectedError(ValueError):
    """An update may not enter the model; the message is the reason that goes into the records."""


class WeightedMean:
    """sum_k w_k x_k / sum_k w_k per array, over those clients that sent it; float64 inside, the array's own type outside.

    Integer buffers (`num_batches_tracked`) take the maximum instead.
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._weights: dict[str, float] = {}

    def add(self, arrays: Mapping[str, np.ndarray], weight: float) -> None:
        """Take in one client's arrays; `weight` > 0."""
        for name, array in arrays.items():
            if not np.issubdtype(array.dtype, np.floating):
                self._sums[name] = np.maximum(self._sums.get(name, array), array)
            elif name in self._sums:
                self._sums[name] += array.astype(np.float64) * weight
            else:
                self._sums[name] = array.astype(np.float64) * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def __getitem__(self, name: str) -> np.ndarray:
        """The mean of an array, float64 (integers as they are)."""
        total = self._sums[name]
        return total / self._weights[name] if np.issubdtype(total.dtype, np.floating) else total


@dataclass(frozen=True)
class CheckedUpdate:
    """Arrays that may enter the model, how many examples they stand for, and their distance from the model that was sent."""

    arrays: dict[str, np.ndarray]
    examples: int
    norm: float


def check_update(
    arrays: ArrayRecord, examples: object, previous: ArrayRecord, spec: Spec, norm_limit: float = math.inf
) -> CheckedUpdate:
    """Known names, exact shapes and dtypes, finite values, a positive count, a norm within the limit.

    Raises UpdateRejectedError with the reason.
    """
    if not isinstance(examples, int) or isinstance(examples, bool) or examples <= 0:
        raise UpdateRejectedError(f"num-examples is {examples!r}: it must be a positive integer")
    if not arrays:
        raise UpdateRejectedError("the update holds no arrays")
    checked, square = {}, 0.0
    for name in arrays:
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
                raise UpdateRejectedError(
                    f"array {name!r} holds {np.count_nonzero(~np.isfinite(array))} non-finite values"
                )
            square += float(np.square(np.subtract(array, previous[name].numpy(), dtype=np.float64)).sum())
        checked[name] = array
    return CheckedUpdate(checked, examples, within_limit(math.sqrt(square), norm_limit))


def within_limit(norm: float, limit: float) -> float:
    """The norm. Raises UpdateRejectedError."""
    if norm > limit:
        raise UpdateRejectedError(f"the update's norm {norm:.4g} is past the limit {limit:.4g} (update-norm-limit)")
    return norm


def _decode(arrays: ArrayRecord, name: str) -> np.ndarray:
    try:
        array = arrays[name].numpy()
    except Exception as error:  # numpy's reader raises half a dozen kinds, of zip files and tokens among them
        raise UpdateRejectedError(f"array {name!r} cannot be read: {error}") from error
    if not isinstance(array, np.ndarray):  # an archive of arrays is read without complaint
        raise UpdateRejectedError(f"array {name!r} cannot be read: it is a {type(array).__name__}")
    return array


def norm_limit(accepted: list[float], factor: float, arrays: ArrayRecord) -> float:
    """factor x the median norm accepted in earlier rounds, or x the norm of the model itself where there is none yet.

    No limit where the factor is 0.
    """
    if not factor:
        return math.inf
    return factor * (median(accepted) if accepted else model_norm(arrays))


def compared(updates: Iterable[tuple[Who, CheckedUpdate]], factor: float) -> Iterator[tuple[Who, CheckedUpdate, float]]:
    """Each update with the limit of its norm, where no earlier round's norms are known: factor x the median of the first few.

    These are held until there are HELD of them, or no more come. With factor 0 there is no limit and nothing is held.
    """
    limit, held = (math.inf, None) if not factor else (0.0, list[tuple[Who, CheckedUpdate]]())
    for who, update in updates:
        if held is None:
            yield who, update, limit
            continue
        held.append((who, update))
        if len(held) == HELD:
            limit = factor * median_low(update.norm for _, update in held)
            yield from ((*pair, limit) for pair in held)
            held = None
    if held:
        limit = factor * median_low(update.norm for _, update in held)
        yield from ((*pair, limit) for pair in held)


def model_norm(arrays: ArrayRecord) -> float:
    """The Euclidean norm over all floating-point arrays."""
    decoded = (array.numpy() for array in arrays.values())
    return math.sqrt(
        sum(float(np.square(a, dtype=np.float64).sum()) for a in decoded if np.issubdtype(a.dtype, np.floating))
    )


def spec_of(arrays: ArrayRecord) -> Spec:
    """Names, shapes and dtypes of a model."""
    return {name: (tuple(array.shape), np.dtype(array.dtype)) for name, array in arrays.items()}
