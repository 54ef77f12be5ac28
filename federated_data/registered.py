"""Data sets that installed packages register (device_profiles/plugins.py): their readers, and a check of what these return."""

import hashlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecework.device_profiles.plugins import find_plugin, load_plugin, refuse_exit
from piecework.federated_data.sources import DatasetError, Source


def is_registered(kind: str, shipped: Collection[str]) -> bool:
    """Return whether an installed package registers a data set. Raises PluginError if another one has the name too."""
    return find_plugin("datasets", kind, shipped) is not None


def read_registered(kind: str, root: Path, download: bool) -> Source:
    """Return what a package's reader reads from a folder or file. Raises DatasetError, which names the reader."""
    reader: Callable[[Path, bool], Any] = load_plugin("datasets", kind)
    try:
        with refuse_exit():
            found = reader(root, download)
    except DatasetError:
        raise
    except Exception as error:  # whatever the package's code raises
        raise DatasetError(
            f"the reader of the data set {kind!r} failed for {root}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Source):
        raise DatasetError(f"the reader of the data set {kind!r} returned a {type(found).__name__}: expected a Source")
    _require_examples(found.inputs, found.labels, f"the reader of the data set {kind!r}: inputs", found)
    _require_examples(found.test_inputs, found.test_labels, f"the reader of the data set {kind!r}: test_inputs", found)
    if found.test_inputs.shape[1:] != found.inputs.shape[1:] or found.test_inputs.dtype != found.inputs.dtype:
        raise DatasetError(
            f"the reader of the data set {kind!r}: test_inputs are {_shown(found.test_inputs)}, inputs {_shown(found.inputs)}: "
            "they must have the same type, and examples of the same shape"
        )
    if found.groups is not None and (found.groups.dtype != np.int64 or found.groups.shape != found.labels.shape):
        raise DatasetError(
            f"the reader of the data set {kind!r}: groups are {_shown(found.groups)}: expected int64 of {len(found.labels)}"
        )
    return found


def key_of(kind: str, root: Path, where: str) -> list[str]:
    """Return what a converted set depends on: the code of its reader's file, and files that the user named."""
    load_plugin("datasets", kind)
    plugin = find_plugin("datasets", kind)
    file = getattr(sys.modules[plugin.point.module], "__file__", None) if plugin is not None else None
    code = Path(file).read_bytes() if file else b""
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    stats = [(path, path.stat()) for path in files if where and path.exists()]
    return [hashlib.sha256(code).hexdigest(), *(f"{path} {s.st_size} {s.st_mtime_ns}" for path, s in stats)]


def _shown(array: NDArray[Any]) -> str:
    return f"{array.dtype} {array.shape}"


def _require_examples(x: NDArray[Any], y: NDArray[Any], what: str, source: Source) -> None:
    """Raise DatasetError for arrays that are not as `Source` says."""
    images = x.ndim == 4 and x.shape[3] <= 4 and x.dtype in (np.uint8, np.float32)
    if not (images or (x.ndim == 2 and x.dtype in (np.uint16, np.float32))) or x.size == 0:
        raise DatasetError(
            f"{what} are {_shown(x)}: expected images (N, H, W, C) of uint8 or float32 with C up to 4, feature vectors (N, F) "
            "of float32, or tokens (N, length) of uint16"
        )
    if y.dtype != np.int64 or y.shape != x.shape[:1]:
        raise DatasetError(f"{what} have labels {_shown(y)}: expected int64 of shape {x.shape[:1]}")
    if y.min() < 0 or y.max() >= source.num_classes:
        raise DatasetError(
            f"{what} have labels {y.min()} to {y.max()}: expected from 0 to below the {source.num_classes} classes"
        )
    if x.dtype == np.float32 and not np.isfinite(x).all():
        raise DatasetError(f"{what} have values that are not finite")
