"""Data sets as memory-mapped arrays: `prepare` converts a source once, `load` maps what it wrote.

Clients import this module, so it imports nothing heavier than numpy. A source imports what it needs when it is read.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecework.device_profiles.documents import abbreviate, read_json
from piecework.device_profiles.names import did_you_mean
from piecework.device_profiles.plugins import list_plugins
from piecework.device_profiles.user_cache import default_cache
from piecework.federated_data import hub, own_sources, tables, texts
from piecework.federated_data.catalogue import COLUMNAR, DATASETS, EMBEDDED, OWN, PUBLISHED, READERS
from piecework.federated_data.columns import NO_COLUMNS, Columns
from piecework.federated_data.hub import hub_place
from piecework.federated_data.partition import client_class_counts
from piecework.federated_data.registered import is_registered, key_of, read_registered
from piecework.federated_data.sources import DatasetError, Source, own_place

__all__ = [
    "DATASETS",
    "PUBLISHED",
    "ArrayDataset",
    "DatasetError",
    "client_class_counts",
    "default_cache",
    "load",
    "prepare",
    "set_name",
    "write",
]

FILES: Mapping[str, Callable[[Path], list[Path]]] = {  # of which a user's folder consists
    "folder": own_sources.image_files,
    "text": texts.text_files,
    "table": tables.table_files,
    "hub": hub.saved_files,
}
_SCHEMA = 1
_FILES = ("train-images.npy", "train-labels.npy", "test-images.npy", "test-labels.npy")
_GROUPS = "train-groups.npy"
_META = {"schema": int, "name": str, "num_classes": int, "mean": list, "std": list, "md5": dict}  # of meta.json
_OPTIONAL = {"vocabulary": int, "class_names": list}
_SCALES = ("mean", "std")
_EXPORT_KEYS = {"client", "clients", "examples", "settings"}


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """A data set on disk, mapped read-only.

    `inputs` and `test_inputs` are images (N, H, W, C), uint8 or float32, feature vectors (N, F), float32, or tokens (N, L),
    uint16 below `vocabulary`, which is 0 for others. `labels` and `test_labels` are (N,) int64 in 0..num_classes-1. `mean` and
    `std`, one per channel or feature, are statistics of the training examples: of pixel / 255 for uint8, of the values
    themselves for float32; tokens have none.
    `groups`, (N,) int64 or None, are the owners of the training examples. `class_names`, by label, are empty if unknown.

    Images are resized to `image_size` x `image_size` pixels when they are read, unless that is 0.

    `export` is None, or describes how `piecework export-data` made this part of a set: `client` (None = the server's part),
    `clients`, `examples` (of the whole training set, to which `mean` and `std` also refer), and `settings` of the partition.
    """

    name: str
    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    test_inputs: NDArray[Any]
    test_labels: NDArray[np.int64]
    export: Mapping[str, Any] | None = None
    groups: NDArray[np.int64] | None = None
    vocabulary: int = 0
    class_names: tuple[str, ...] = ()
    image_size: int = 0

    @property
    def examples(self) -> int:
        """The number of training examples of the whole set, even if this is a part of it."""
        return len(self.labels) if self.export is None else int(self.export["examples"])

    @property
    def kind(self) -> str:
        """`images`, `feature vectors` or `tokens`."""
        return "images" if self.inputs.ndim == 4 else "tokens" if self.vocabulary else "feature vectors"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image on disk, (F,) of a feature vector, or (length,) of a text."""
        _, *axes = self.inputs.shape
        return (axes[2], axes[0], axes[1]) if len(axes) == 3 else tuple(axes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example as it is read: that on disk, but for images that are resized. Raises DatasetError."""
        return resized_shape(self.stored_shape, self.image_size)


def prepare(
    name: str, *, data_dir: str, cache_dir: Path, download: bool = False, columns: Columns = NO_COLUMNS
) -> Path:
    """Convert the data set `name` unless `cache_dir` already holds it; returns its folder, for `load`.

    `name` is a key of DATASETS; those of OWN are written with their file or folder, as `npz:<file>`, relative to `data_dir` if
    that is set. That of an installed package is written NAME or NAME:<path>. `columns` are those that the user names of a data
    set of COLUMNAR. An empty `data_dir` means `<cache_dir>/downloads` for the published sets. A user's file or folder that has
    changed is converted again. A `data_dir` that is itself a prepared folder is returned. Several processes may prepare at the
    same time. Raises DatasetError, which names what is unknown, missing or damaged.
    """
    kind, colon, where = name.partition(":")
    registered = is_registered(kind, DATASETS)
    if (colon and not where) or not (registered or (kind in DATASETS and (kind in OWN) == bool(where))):
        known = [f"{key}:<{OWN[key]}>" if key in OWN else key for key in DATASETS]
        known += list_plugins("datasets")
        raise DatasetError(f"unknown data set {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}")
    if data_dir and (ready := _ready(name, Path(data_dir).expanduser().resolve())):
        return ready
    root = Path(data_dir).expanduser() if data_dir else cache_dir / "downloads"
    if where:
        root = own_place(kind, where, data_dir)
    root = hub_place(root, where) if kind == "hub" else root.resolve()
    if columns.named() and kind not in COLUMNAR:
        raise DatasetError(f"{columns.named()}: the data set {name!r} has no columns; {' and '.join(COLUMNAR)} have")
    target = cache_dir.resolve() / _folder_name(kind, root, where, columns)
    if _is_prepared(target):
        return target
    if registered:
        source = read_registered(kind, root, download)
    else:
        source = DATASETS[kind](root, download, *([columns] if kind in COLUMNAR else []))
    staging = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        staging.mkdir(parents=True)
        write(staging, name, source)
        _install(staging, target)
    except OSError as error:
        raise DatasetError(
            f"cannot write the cache {target}: {error}; set PIECEWORK_CACHE to a folder with room"
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def load(directory: Path, verify: bool = False) -> ArrayDataset:
    """Map what `prepare` wrote to `directory`; `verify` also compares each file's md5. Raises DatasetError."""
    meta = _read_meta(directory)
    arrays = []
    grouped = [_GROUPS] if _GROUPS in meta["md5"] else []
    for file in (*_FILES, *grouped):
        path = directory / file
        try:
            if verify and _md5(path) != meta["md5"].get(file):
                raise DatasetError(_describe_damage(path, "its md5 differs"))
            arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
        except DatasetError:
            raise
        except PermissionError as error:
            raise DatasetError(f"{path} cannot be read: {error}; give it to the user who runs this") from None
        except own_sources.UNREADABLE as error:
            raise DatasetError(_describe_damage(path, error)) from None
    inputs, labels, test_inputs, test_labels, *groups = arrays
    pairs = [(inputs, labels, _FILES[1]), (test_inputs, test_labels, _FILES[3])]
    for x, y, file in pairs + [(inputs, numbers, _GROUPS) for numbers in groups]:
        if x.ndim not in (2, 4) or y.dtype != np.int64 or y.shape != x.shape[:1]:
            raise DatasetError(
                _describe_damage(directory / file, f"{y.dtype} {y.shape} for inputs {x.dtype} {x.shape}")
            )
    return ArrayDataset(
        name=meta["name"],
        inputs=inputs,
        labels=labels,
        num_classes=meta["num_classes"],
        mean=tuple(meta["mean"]),
        std=tuple(meta["std"]),
        test_inputs=test_inputs,
        test_labels=test_labels,
        export=meta.get("export"),
        groups=groups[0] if groups else None,
        vocabulary=meta.get("vocabulary", 0),
        class_names=tuple(meta.get("class_names", ())),
    )


def resized_shape(shape: tuple[int, ...], image_size: int) -> tuple[int, ...]:
    """Return the shape (C, H, W) of an image at `data.image-size`, 0 = its own. Raises DatasetError for other examples."""
    if not image_size:
        return shape
    if len(shape) != 3:
        raise DatasetError(
            f"data.image-size = {image_size}: examples of shape {shape} are no images and cannot be resized; set it to 0"
        )
    return shape[0], image_size, image_size


def set_name(name: str) -> str:
    """Return a data set's name without the folders of a user's file, which differ between machines."""
    kind, colon, where = name.partition(":")
    return f"{kind}{colon}{Path(where).name}"


def _ready(name: str, folder: Path) -> Path | None:
    """Return `folder` if it is a prepared folder of this data set, else None."""
    if not all((folder / file).is_file() for file in ("meta.json", _FILES[1])):
        return None
    held = _read_meta(folder)["name"]
    if set_name(held) != set_name(name):
        raise DatasetError(
            f"data-dir {folder} holds a prepared {held!r}, the run asks for {name!r}; change one of them"
        )
    return folder


def _folder_name(kind: str, root: Path, where: str, columns: Columns) -> str:
    if kind in EMBEDDED:
        return kind
    key = [str(root), *READERS.get(kind, ())]
    if kind not in DATASETS:
        key += key_of(kind, root, where)
    if columns.named():
        key.append(columns.named())
    if kind in OWN and root.is_absolute() and root.exists():  # a name of the hub is not absolute
        files = FILES[kind](root) if kind in FILES else [root]
        key += [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return f"{kind}-{hashlib.sha256(chr(10).join(key).encode()).hexdigest()[:12]}"


def write(staging: Path, name: str, source: Source, export: Mapping[str, Any] | None = None) -> None:
    """Write a synced prepared folder into the empty folder `staging`; `export` as in ArrayDataset. Raises OSError."""
    mean, std, tokens = source.mean, source.std, source.inputs.ndim == 2 and source.inputs.dtype == np.uint16
    if mean is None or std is None:
        mean, std = ((), ()) if tokens else _channel_statistics(source.inputs)
    arrays = dict(zip(_FILES, (source.inputs, source.labels, source.test_inputs, source.test_labels), strict=True))
    if source.groups is not None:
        arrays[_GROUPS] = source.groups
    for file, array in arrays.items():
        with (staging / file).open("wb") as stream:
            np.save(stream, array, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
    meta = {
        "schema": _SCHEMA,
        "name": name,
        "num_classes": source.num_classes,
        "mean": mean,
        "std": std,
        "md5": {file: _md5(staging / file) for file in arrays},
    }
    if tokens:
        found = max(int(part.max(initial=0)) for part in (source.inputs, source.test_inputs)) + 1
        meta["vocabulary"] = source.vocabulary or found
    if source.class_names:
        meta["class_names"] = source.class_names
    if export is not None:
        meta["export"] = dict(export)
    with (staging / "meta.json").open("w", encoding="utf-8") as text:
        json.dump(meta, text, indent=1)
        text.flush()
        os.fsync(text.fileno())


def _install(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if _is_prepared(target):  # another process was faster
            return
        if not target.exists():
            raise
        # It is of another version or without its meta.json. Its readers keep the files that they have mapped.
        aside = staging.with_name(f"{staging.name}.old")
        target.rename(aside)
        staging.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def _is_prepared(directory: Path) -> bool:
    try:
        _read_meta(directory)
    except DatasetError:
        return False
    return True


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / "meta.json"
    try:
        meta = read_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetError(
            f"no {path}: there is no prepared data set. On a device, data-dir in its node-config names the folder; elsewhere "
            "delete the folder if it exists, and run again"
        ) from None
    except PermissionError as error:
        raise DatasetError(f"{path} cannot be read: {error}; give it to the user who runs this") from None
    except (OSError, ValueError) as error:
        raise DatasetError(_describe_damage(path, error)) from None
    if not isinstance(meta, dict) or meta.get("schema") != _SCHEMA or not _META.keys() <= meta.keys():
        raise DatasetError(_describe_damage(path, f"it is not of schema {_SCHEMA}"))
    for key, kind in (_META | _OPTIONAL).items():
        if key in meta and not (
            isinstance(meta[key], kind) and all(map(_is_finite, meta[key] if key in _SCALES else ()))
        ):
            raise DatasetError(_describe_damage(path, f"its {key} = {abbreviate(meta[key])}"))
    if "export" in meta and not (isinstance(meta["export"], dict) and meta["export"].keys() >= _EXPORT_KEYS):
        raise DatasetError(
            _describe_damage(path, f"its export = {meta['export']!r} does not have all of {sorted(_EXPORT_KEYS)}")
        )
    return meta


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


def _describe_damage(path: Path, why: object) -> str:
    return f"{path} is damaged ({why}); delete the folder {path.parent} and rerun"


def _channel_statistics(images: NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, or feature; that of a constant one is 1, because it is a divisor."""
    scale = 1 / 255 if images.dtype == np.uint8 else 1.0
    rows = max(1, 2**20 // images[0].size)  # in blocks, because the whole set in float64 takes eight times its bytes
    blocks = [images[start : start + rows] for start in range(0, len(images), rows)]
    count, axes = images.size // images.shape[-1], tuple(range(images.ndim - 1))
    mean = sum(block.sum(axes, dtype=np.float64) for block in blocks) * scale / count
    std = np.sqrt(sum(np.square(block * scale - mean).sum(axes) for block in blocks) / count)
    return tuple(mean.tolist()), tuple(np.where(std > 1e-12, std, 1.0).tolist())


def _md5(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
