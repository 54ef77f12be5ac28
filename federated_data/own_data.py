"""A node's own data in a run: they must be like the server's, and are read as the server's are."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from piecework.device_profiles.documents import abbreviate
from piecework.federated_data.datasets import ArrayDataset, set_name
from piecework.federated_data.sources import DatasetError, Ints

# Images of 0-255 beside 0-1 spread 255 times as much. The bounds leave room for darker, brighter or plainer ones.
LEAST_SPREAD, MOST_SPREAD = 0.01, 20.0  # of pixels: standard deviations, as fractions of the run's
OWN = "this node's own data"  # in an error, which the server gets: without the folders of their files
ADVICE = "prepare data like those of the run (piecework own-data), or leave the node out"


@dataclass(frozen=True)
class Expected:
    """What a run expects of its nodes' examples: those of the server's data set, with its `mean` and `std`.

    `shape` is that of one example on disk. `class_names` and `vocabulary` are empty and 0 if there are none.
    """

    dataset: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    num_classes: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int

    @classmethod
    def of(cls, data: ArrayDataset) -> Self:
        """Return what a run with this data set expects."""
        scales, classes = (data.mean, data.std), (data.num_classes, data.class_names)
        example = data.kind, str(data.inputs.dtype), data.stored_shape
        return cls(set_name(data.name), *example, *classes, *scales, data.vocabulary)

    def to_text(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_values(cls, values: Any) -> Self:
        """Read the values that `to_text` wrote. Raises ValueError for others."""
        return cast(Self, EXPECTED.validate_python(values))


EXPECTED = TypeAdapter(Expected)


def adopt(data: ArrayDataset, expected: Expected, whose: str = OWN, advice: str = ADVICE) -> ArrayDataset:
    """Return a node's own data, or other data, with the classes, the scale and the vocabulary of the run.

    Classes with names are found by them, in any order, and the data may have only some. Without names labels are numbers.
    Raises DatasetError, which begins with `whose` data they are, and of examples of another kind ends with `advice`.
    """
    held = (data.kind, str(data.inputs.dtype), data.stored_shape)
    wanted = (expected.kind, expected.dtype, expected.shape)
    if held != wanted:
        shown = [f"{kind} of {dtype} and shape {_shape(shape)}" for kind, dtype, shape in (held, wanted)]
        raise DatasetError(
            f"{whose}, {set_name(data.name)}, hold {shown[0]}, and the run's, {expected.dataset}, {shown[1]}: {advice}"
        )
    if data.vocabulary > expected.vocabulary:
        raise DatasetError(
            f"{whose}, {set_name(data.name)}, have tokens up to {data.vocabulary - 1}, and the run's, {expected.dataset}, "
            f"up to {expected.vocabulary - 1}: number the words as the run's data do"
        )
    _require_pixel_scale(data, expected, whose)
    numbers = _class_numbers(data, expected, whose)
    return replace(
        data,
        labels=_renumber(data.labels, numbers),
        test_labels=_renumber(data.test_labels, numbers),
        num_classes=expected.num_classes,
        class_names=expected.class_names,
        mean=expected.mean,
        std=expected.std,
        vocabulary=expected.vocabulary,
    )


def _require_pixel_scale(data: ArrayDataset, expected: Expected, whose: str) -> None:
    """Raise DatasetError for images of another unit, such as pixels from 0 to 255 beside pixels from 0 to 1.

    Columns of a table are left alone: a node's may spread much more than the run's, and be of the same unit.
    """
    scales = np.array([data.mean, data.std, expected.mean, expected.std])
    varying = (scales[1] != 1) & (scales[3] != 1)  # that of a constant is 1
    if data.kind != "images" or not varying.any():
        return
    mean, std, run_mean, run_std = np.median(scales[:, varying], axis=1)
    if not LEAST_SPREAD <= std / run_std <= MOST_SPREAD:
        raise DatasetError(
            f"{whose}, {set_name(data.name)}, have pixels of mean {mean:.4g} and deviation {std:.4g}, and the run's, "
            f"{expected.dataset}, of mean {run_mean:.4g} and deviation {run_std:.4g} (medians of the channels"
            f"{', of pixel / 255' if data.inputs.dtype == np.uint8 else ''}): that is another scale, such as 0-255 beside "
            "0-1, so bring the pixels to the scale of the run's"
        )


def _class_numbers(data: ArrayDataset, expected: Expected, whose: str) -> Sequence[int]:
    """Return the run's number of each class of the node."""
    own, known = data.class_names, expected.class_names
    if own and (known or not _are_numbers(own)):
        unknown = sorted({*own} - {*known})
        if unknown:
            has = ", ".join(known[:10]) or f"numbers below {expected.num_classes} without names"
            raise DatasetError(
                f"{whose}, {set_name(data.name)}, have a class {abbreviate(unknown[0])}, and the run's, {expected.dataset}, "
                f"have {has}: name the classes as the run does"
            )
        place = {name: number for number, name in enumerate(known)}
        return [place[name] for name in own]
    numbers = [int(name) for name in own] if own else list(range(data.num_classes))
    if max(numbers) >= expected.num_classes:
        raise DatasetError(
            f"{whose}, {set_name(data.name)}, have labels up to {max(numbers)}, and the run's, {expected.dataset}, "
            f"{expected.num_classes} classes, from 0: number the classes as the run does"
        )
    return numbers


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isdecimal() and len(name) < 10 for name in names)


def _renumber(labels: Ints, numbers: Sequence[int]) -> Ints:
    if list(numbers) == list(range(len(numbers))):
        return labels
    found: NDArray[np.int64] = np.array(numbers, dtype=np.int64)[labels]
    return found


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
