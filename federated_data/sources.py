"""Read the published data sets in their usual layouts, once, on the machine that prepares them.

torchvision and scikit-learn are imported inside the functions, because clients only read what `datasets.prepare` wrote.
"""

import gzip
import hashlib
import http.client
import importlib
import io
import math
import os
import pickle
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_HOLD_OUT, _HOLD_OUT_SEED = 0.2, 2024
_FASHION_MNIST = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_LAYOUTS = {
    "fashion-mnist": "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte (or .gz)",
    "cifar10": "cifar-10-batches-py/{data_batch_1..5,test_batch}",
    "cifar100": "cifar-100-python/{train,test}",
}


WHERE = "absolute, or relative to data-dir (PIECEWORK_DATA)"  # a user's own file or folder


class DatasetError(ValueError):
    """A data set is unknown, missing or damaged. The message says which file and what to do."""


@dataclass(frozen=True, eq=False)
class Source:
    """Images (N, H, W, C), uint8 or float32, feature vectors (N, F), float32, or tokens (N, length), uint16; labels (N,) int64.

    `mean` and `std` have one value per channel or feature; None = to be computed. `groups` (N,) int64 are the owners of the
    examples, such as writers, if known. Tokens are below `vocabulary`; 0 = to be found. `class_names` are in the order of
    labels, if known.
    """

    inputs: NDArray[Any]
    labels: Ints
    test_inputs: NDArray[Any]
    test_labels: Ints
    num_classes: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    groups: Ints | None = None
    vocabulary: int = 0
    class_names: tuple[str, ...] = ()


def digits(source: Path, download: bool) -> Source:
    """Read scikit-learn's embedded 8x8 digits, 1797 images; the 17 grey levels are scaled to 0..255."""
    raw = import_extra("sklearn.datasets").load_digits()
    images = np.rint(raw.images * (255 / 16)).astype(np.uint8)[..., None]
    return hold_out(images, raw.target.astype(np.int64), 10)


def digits32(source: Path, download: bool) -> Source:
    """Return `digits` with the same split at 32x32, each pixel repeated four by four times, for models that need the size."""
    small = digits(source, download)
    images, test_images = (part.repeat(4, axis=1).repeat(4, axis=2) for part in (small.inputs, small.test_inputs))
    return Source(images, small.labels, test_images, small.test_labels, small.num_classes)


def fashion_mnist(source: Path, download: bool) -> Source:
    """Read the four idx files in torchvision's layout, but not with torchvision, which would unpickle `processed` files."""
    raw = source / "FashionMNIST" / "raw"
    if download and not all(_idx_file(raw, stem) for stem in _FASHION_MNIST):
        vision = import_extra("torchvision.datasets")
        for name, md5 in vision.FashionMNIST.resources:
            fetch(f"{vision.FashionMNIST.mirrors[0]}{name}", raw, name, md5)
    arrays = []
    for stem in _FASHION_MNIST:
        file = _idx_file(raw, stem)
        if file is None:
            raise _missing("fashion-mnist", source, raw / stem)
        arrays.append(_read_idx(file, ndim=3 if "images" in stem else 1))
    images, labels, test_images, test_labels = arrays
    for x, y, part in ((images, labels, "train"), (test_images, test_labels, "t10k")):
        if len(x) != len(y) or y.max() > 9 or x.shape[1:] != images.shape[1:]:
            raise DatasetError(
                f"{raw}/{part}-* do not match: {len(x)} images of {x.shape[1:]}, {len(y)} labels up to {y.max()}"
            )
    sets = (images[..., None], labels.astype(np.int64), test_images[..., None], test_labels.astype(np.int64))
    return Source(*sets, num_classes=10, mean=(0.2860,), std=(0.3530,), class_names=_FASHION_MNIST_CLASSES)


def cifar10(source: Path, download: bool) -> Source:
    """Read CIFAR-10's python batches in torchvision's layout."""
    sets, names = _cifar("cifar10", "CIFAR10", "labels", source, download)
    return Source(*sets, num_classes=10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), class_names=names)


def cifar10_16(source: Path, download: bool) -> Source:
    """Return `cifar10` at 16x16: each pixel is the mean of two by two, rounded."""
    full = cifar10(source, download)
    images, test_images = (halve(part) for part in (full.inputs, full.test_inputs))
    return replace(full, inputs=images, test_inputs=test_images, mean=None, std=None)


def halve(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images (N, H, W, C) of half the height and width, from means of two by two pixels."""
    n, height, width, channels = images.shape
    blocks = images.reshape(n, height // 2, 2, width // 2, 2, channels)
    halved: NDArray[np.uint8] = np.rint(blocks.sum(axis=(2, 4), dtype=np.uint16) / 4).astype(np.uint8)
    return halved


def cifar100(source: Path, download: bool) -> Source:
    """Read CIFAR-100's python batches in torchvision's layout, with the 100 fine labels."""
    sets, names = _cifar("cifar100", "CIFAR100", "fine_labels", source, download)
    return Source(
        *sets, num_classes=100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762), class_names=names
    )


def own_place(kind: str, where: str, data_dir: str) -> Path:
    """Return the file or folder of a user's own data set, below `data_dir` if that is set.

    Raises DatasetError if it is missing there, but not in the working directory: the two may be different data.
    """
    here = Path(where).expanduser()
    found = Path(data_dir).expanduser() / here
    elsewhere = os.path.exists(here) and not os.path.exists(found)  # noqa: PTH110 (a name may be too long for a path)
    if kind != "hub" and elsewhere:
        raise DatasetError(
            f"there is no {found}, and data-dir (or PIECEWORK_DATA) says to look there: for that in the working directory "
            f"write {kind}:{here.resolve()}"
        )
    return found


def hold_out(
    inputs: NDArray[Any],
    labels: Ints,
    num_classes: int,
    groups: Ints | None = None,
    class_names: tuple[str, ...] = (),
) -> Source:
    """Hold out a fifth of each class as the test set, always the same fifth."""
    train, test = hold_out_rows(labels)
    sets = (inputs[train], labels[train], inputs[test], labels[test])
    return Source(*sets, num_classes, groups=None if groups is None else groups[train], class_names=class_names)


def hold_out_rows(labels: Ints, fraction: float = _HOLD_OUT) -> tuple[Ints, Ints]:
    """Return the rows of training and test sets, which has a fraction of each class; see `hold_out`.

    Raises DatasetError if there are too few examples.
    """
    rng = np.random.default_rng(np.random.SeedSequence(_HOLD_OUT_SEED))
    parts = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    test = np.sort(np.concatenate([part[: round(fraction * len(part))] for part in parts]))
    if not len(test):
        raise DatasetError(f"{len(labels)} examples are too few to hold out a test set; give separate test examples")
    return np.setdiff1d(np.arange(len(labels)), test), test


def import_extra(module: str, extra: str = "data") -> Any:
    """Import a module of an extra. Raises DatasetError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DatasetError(f"{error}; preparing this data set needs `pip install 'piecework[{extra}]'`") from None


def _cifar(
    name: str, class_name: str, label_key: str, source: Path, download: bool
) -> tuple[tuple[NDArray[np.uint8], Ints, NDArray[np.uint8], Ints], tuple[str, ...]]:
    """Return training and test images and labels, and the names of the classes if their file exists."""
    lists = getattr(import_extra("torchvision.datasets"), class_name)  # only for file names and md5 sums
    base = source / lists.base_folder
    if download and not all((base / file).is_file() for file, _ in lists.train_list + lists.test_list):
        fetch(lists.url, source, lists.filename, lists.tgz_md5)
    batches = []
    for file, md5 in lists.train_list + lists.test_list:
        path = base / file
        if not path.is_file():
            raise _missing(name, source, path)
        batch = _check_pickle(path, md5, name)
        pixels = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        batches.append((pixels, np.array(batch[label_key], dtype=np.int64)))
    images, labels = zip(*batches[: len(lists.train_list)], strict=True)
    test_images, test_labels = batches[-1]
    meta = base / lists.meta["filename"]
    names = _check_pickle(meta, lists.meta["md5"], name)[lists.meta["key"]] if meta.is_file() else ()
    sets = np.concatenate(images), np.concatenate(labels), np.ascontiguousarray(test_images), test_labels
    return sets, tuple(names)


def _check_pickle(path: Path, md5: str, name: str) -> Any:
    """Read a file of CIFAR's. Raises DatasetError unless it is the published one."""
    data = path.read_bytes()
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
        raise DatasetError(f"{path} is damaged: its md5 is not {md5}; delete it and fetch {name} again")
    return read_pickle(data)


def read_pickle(data: bytes) -> Any:
    """Unpickle numpy arrays and Python's own containers. Raises DatasetError for anything else."""
    return _PlainUnpickler(io.BytesIO(data), encoding="latin1").load()


class _PlainUnpickler(pickle.Unpickler):
    """Builds only numpy arrays and Python's own containers, because a pickle may name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.zeros(0).__reduce__()[0]  # numpy has moved it; this works in every version
        raise DatasetError(f"a pickle asks for {module}.{name}; only numpy arrays are read from one")


def _idx_file(raw: Path, stem: str) -> Path | None:
    return next((path for path in (raw / stem, raw / f"{stem}.gz") if path.is_file()), None)


def _read_idx(path: Path, ndim: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes: 0, 0, 8, ndim; the sizes as big-endian uint32; the bytes."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read: {error}; fetch it again") from None
    start = 4 + 4 * ndim
    shape = tuple(int(size) for size in np.frombuffer(data[4:start], dtype=">u4")) if len(data) >= start else ()
    if data[:4] != bytes((0, 0, 8, ndim)) or len(data) != start + math.prod(shape) or not math.prod(shape):
        raise DatasetError(f"{path} is damaged: {len(data)} bytes, its header says {data[:4].hex()} and shape {shape}")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _missing(name: str, source: Path, path: Path) -> DatasetError:
    return DatasetError(
        f"{name}: no {path}; set data-dir (now {source}) to the folder that holds {_LAYOUTS[name]}, "
        "or set data.download = true"
    )


def fetch(url: str, root: Path, file: str, md5: str) -> None:
    """Download and unpack one archive with torchvision, which checks its md5."""
    try:
        import_extra("torchvision.datasets.utils").download_and_extract_archive(url, str(root), filename=file, md5=md5)
    except (OSError, RuntimeError, EOFError, http.client.HTTPException) as error:
        raise DatasetError(f"cannot download {url} to {root}: {error}; fetch it by hand and set data-dir") from None
