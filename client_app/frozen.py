"""Frozen units on a client's disk, by their content: `frozen/<hash>.safetensors`, kept over rounds and restarts.

A hash is checked when a unit is written and each time before it is used, so that a damaged file is one that is not there.
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


class MissingUnitsError(LookupError):
    """A task names frozen units that the client does not have, or not as they were sent: `missing` is hashes by unit."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        self.missing = dict(missing)
        super().__init__(f"the client's store lacks the frozen units {', '.join(missing)}: they have to be sent again")


def content_hash(arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """sha256 over arrays in the order of their names: for each its name, type, shape and bytes."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays, key=lambda entry: entry[0]):
        _add(digest, name, array)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: str, array: np.ndarray) -> None:
    digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
    digest.update(np.ascontiguousarray(array).data)


def file_hash(path: Path) -> str:
    """The content hash of a safetensors file, one array in memory at a time. Raises SafetensorError where it is none."""
    digest = hashlib.sha256()
    with safe_open(path, framework="np") as file:
        for name in sorted(file.keys()):
            _add(digest, name, file.get_tensor(name))
    return digest.hexdigest()


def keep(folder: Path, scratch: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of a unit under their hash; `scratch` is a folder of this task on the same file system."""
    digest = content_hash(arrays.items())
    folder.mkdir(exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}, scratch / digest
    )
    (scratch / digest).replace(_path(folder, digest))


def not_held(folder: Path, wanted: Iterable[str]) -> Iterator[str]:
    """Those hashes of which there is no sound file; damaged ones are removed."""
    for digest in wanted:
        path = _path(folder, digest)
        try:
            sound = file_hash(path) == digest
        except (FileNotFoundError, SafetensorError):
            sound = False
        if not sound:
            path.unlink(missing_ok=True)
            yield digest


def lay(folder: Path, frozen: Mapping[str, str], model: Path) -> None:
    """Put frozen units into a task's model folder without reading them. Raises MissingUnitsError."""
    missing = set(not_held(folder, frozen.values()))
    if missing:
        raise MissingUnitsError({unit: digest for unit, digest in frozen.items() if digest in missing})
    for unit, digest in frozen.items():
        try:
            os.link(_path(folder, digest), model / f"{unit}.safetensors")
        except OSError:  # a file system without links
            shutil.copyfile(_path(folder, digest), model / f"{unit}.safetensors")


def forget_others(folder: Path, named: Collection[str]) -> None:
    """Remove the frozen units that are not named."""
    for path in folder.glob("*.safetensors"):
        if path.stem not in named:
            path.unlink(missing_ok=True)


def _path(folder: Path, digest: str) -> Path:
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is not a content hash: expected 64 hexadecimal digits")
    return folder / f"{digest}.safetensors"
