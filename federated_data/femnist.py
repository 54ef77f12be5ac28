"""Read FEMNIST, the handwritten characters of LEAF (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018).

LEAF's `preprocess.sh` writes JSON files of about a hundred writers each: `users`, a list of names; `num_samples`, the number of
characters of each; and `user_data`, by name, with `x`, lists of 784 pixels from 0 to 1, and `y`, labels.
"""

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecework.device_profiles.documents import abbreviate, read_json
from piecework.federated_data.sources import DatasetError, Ints, Source, hold_out

EDGE = 28
CLASS_NAMES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)  # in the order of LEAF's labels
_AGAIN = "write it again by LEAF's data/femnist/preprocess.sh"


def femnist(source: Path, download: bool) -> Source:
    """Read `femnist/train/*.json` and `femnist/test/*.json`, or `femnist/all_data/*.json` alone, of which a fifth is held out.

    The groups are the writers, numbered in the order of their names. One file at a time is in memory, beside all images: all of
    FEMNIST takes about 3 GB (50 kB per image of a file) and five minutes.
    """
    base = source / "femnist"
    parts = {name: sorted((base / name).glob("*.json")) for name in ("train", "test", "all_data")}
    if parts["train"] and parts["test"]:
        images, labels, groups = _read(parts["train"])
        test_images, test_labels, _ = _read(parts["test"])
        return Source(
            images, labels, test_images, test_labels, len(CLASS_NAMES), groups=groups, class_names=CLASS_NAMES
        )
    if parts["train"] or parts["test"] or not parts["all_data"]:
        lost = next(
            (name for name in ("train", "test") if parts["train"] or parts["test"] if not parts[name]), "all_data"
        )
        raise DatasetError(
            f"femnist: no {base / lost}/*.json; set data-dir (now {source}) to the folder that holds "
            "femnist/{train,test}/*.json or femnist/all_data/*.json, as LEAF's data/femnist/preprocess.sh writes them; "
            "they cannot be downloaded"
        )
    images, labels, groups = _read(parts["all_data"])
    return hold_out(images, labels, len(CLASS_NAMES), groups, CLASS_NAMES)


def _read(files: list[Path]) -> tuple[NDArray[np.uint8], Ints, Ints]:
    """Return images (N, 28, 28, 1), labels, and the number of each one's writer."""
    images, labels, writers = list[NDArray[np.uint8]](), list[Ints](), list[str]()
    where: dict[str, Path] = {}
    for file in files:
        for writer, pixels, own in _writers(file):
            if writer in where:
                raise DatasetError(
                    f"{file}: writer {writer!r} is in {where[writer].name} too; keep the files of one run of preprocess.sh"
                )
            where[writer] = file
            images.append(pixels)
            labels.append(own)
            writers.append(writer)
    order = np.argsort(np.argsort(writers))
    groups = np.repeat(order, [len(own) for own in labels]).astype(np.int64)
    return np.concatenate(images)[..., None], np.concatenate(labels), groups


def _writers(file: Path) -> Iterator[tuple[str, NDArray[np.uint8], Ints]]:
    """Yield the name, the images (n, 28, 28) and the labels (n,) of each writer of a file. Raises DatasetError."""
    try:
        held = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} cannot be read: {error}; {_AGAIN}") from None
    if not isinstance(held, dict) or [key for key in ("users", "num_samples", "user_data") if key not in held]:
        keys = abbreviate(list(held) if isinstance(held, dict) else held)
        raise DatasetError(f"{file} holds {keys}, not users, num_samples and user_data; {_AGAIN}")
    users, counts, data = held["users"], held["num_samples"], held["user_data"]
    lists = isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)
    if not lists or not users or sorted(map(str, users)) != sorted(data) or len(counts) != len(users):
        raise DatasetError(
            f"{file} is damaged: users, num_samples and user_data are not of the same writers, {abbreviate(users)}; {_AGAIN}"
        )
    for writer, count in zip(map(str, users), counts, strict=True):
        own = data.pop(writer)
        yield writer, *_characters(own, count, f"{file}: writer {writer!r}")


def _characters(own: Any, count: int, where: str) -> tuple[NDArray[np.uint8], Ints]:
    """Return a writer's images and labels. Raises DatasetError, which begins with `where`."""
    try:
        pixels, labels = np.array(own["x"], dtype=np.float64), np.array(own["y"])
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{where} has no lists x and y of numbers ({error!r:.80}); {_AGAIN}") from None
    if pixels.shape != (count, EDGE**2) or labels.shape != (count,) or not count:
        raise DatasetError(
            f"{where} has x of shape {pixels.shape} and y of {labels.shape}, for num_samples = {count} they are "
            f"({count}, {EDGE**2}) and ({count},); {_AGAIN}"
        )
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise DatasetError(f"{where} has pixels from {pixels.min()} to {pixels.max()}; they are 0 to 1: {_AGAIN}")
    for label in own["y"]:
        if type(label) is not int or not 0 <= label < len(CLASS_NAMES):
            raise DatasetError(
                f"{where} has a label {abbreviate(label)}; labels are whole numbers from 0 to {len(CLASS_NAMES) - 1}: {_AGAIN}"
            )
    return np.rint(pixels * 255).astype(np.uint8).reshape(-1, EDGE, EDGE), labels.astype(np.int64)
