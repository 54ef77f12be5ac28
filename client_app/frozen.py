"""Frozen units on a client's disk, named by content hash: `frozen/<hash>.safetensors`. They survive rounds and restarts.

The hash is computed when a unit is written and checked each time before it is used. A damaged file counts as missing.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from piecework.training.readable import MessageError


class MissingUnitsError(LookupError):
    """A task names frozen units that are missing or damaged on the client. `missing` maps units to content hashes."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        self.missing = dict(missing)
        super().__init__(
            f"frozen units {', '.join(missing)} are missing or damaged in the client's store and must be sent again"
        )


def content_hash(arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """Return the sha256 hex digest of arrays in the order of their names: of each its name, type, shape and bytes."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays, key=lambda entry: entry[0]):
        _add(digest, name, array)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: str, array: np.ndarray) -> None:
    digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
    digest.update(np.ascontiguousarray(array).data)


def file_hash(path: Path) -> str:
    """Return the content hash of a safetensors file, with one array in memory at a time.

    Raises SafetensorError if it is not such a file, FileNotFoundError if it does not exist.
    """
    digest = hashlib.sha256()
    with safe_open(path, framework="np") as file:
        for name in sorted(file.keys()):
            _add(digest, name, file.get_tensor(name))
    return digest.hexdigest()


def keep(folder: Path, scratch: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of a unit to `folder`, named by their hash. `scratch` is a task's folder on the same file system."""
    digest = content_hash(arrays.items())
    folder.mkdir(exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}, scratch / digest
    )
    (scratch / digest).replace(_path(folder, digest))


def not_held(folder: Path, wanted: Iterable[str]) -> Iterator[str]:
    """Yield the hashes without an intact file, and remove damaged files. Raises MessageError for text that is no hash."""
    for digest in wanted:
        path = _path(folder, digest)
        try:
            sound = file_hash(path) == digest
        except (FileNotFoundError, SafetensorError):
            sound = False
        if not sound:
            path.unlink(missing_ok=True)
            yield digest


def link_units(folder: Path, frozen: Mapping[str, str], model: Path) -> None:
    """Check frozen units and link them into a task's model folder. `frozen` maps units to content hashes.

    Raises MissingUnitsError for missing or damaged units.
    """
    missing = set(not_held(folder, frozen.values()))
    if missing:
        raise MissingUnitsError({unit: digest for unit, digest in frozen.items() if digest in missing})
    for unit, digest in frozen.items():
        try:
            os.link(_path(folder, digest), model / f"{unit}.safetensors")
        except OSError:  # the file system has no hard links
            shutil.copyfile(_path(folder, digest), model / f"{unit}.safetensors")


def forget_others(folder: Path, named: Collection[str]) -> None:
    """Remove all frozen units except those with the hashes in `named`."""
    for path in folder.glob("*.safetensors"):
        if path.stem not in named:
            path.unlink(missing_ok=True)


def _path(folder: Path, digest: str) -> Path:
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise MessageError(f"{digest!r:.100} is not a content hash: expected 64 hexadecimal digits")
    return folder / f"{digest}.safetensors"
