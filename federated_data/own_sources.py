"""Read a user's own data: one .npz file of arrays, or a folder of pictures per class."""

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecework.device_profiles.profile import available_memory
from piecework.federated_data.sources import WHERE, DatasetError, Source, hold_out, import_extra

_NAMES = ("x_train", "y_train", "x_test", "y_test")
_GROUPS = "group_train"
MOST_CLASSES = 10**6  # as many as a plan takes
LARGEST = 1e30  # feature: a model's file has no larger mean
MOST_NAMED = 10  # members of a file that a message lists
MOST_DEFLATED = 1032  # bytes that a byte of a compressed member can stand for at most
# What zipfile, its decompressors, numpy's header and numpy itself raise for members that are not what they should be.
UNREADABLE = (
    *(OSError, ValueError, EOFError, AttributeError, TypeError, KeyError, RuntimeError, SyntaxError, MemoryError),
    *(RecursionError, OverflowError, zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
_UNREAD_SUFFIXES = (".webp", ".bmp", ".gif", ".tif", ".tiff")  # of images that would be left out


def npz(source: Path, download: bool) -> Source:
    """Read arrays x_train, y_train, optional x_test, y_test (else 20 % is held out), and group_train.

    Images are uint8 or float32 of shape (N, H, W), (N, H, W, C) or (N, C, H, W), with C up to 4. Feature vectors are floats of
    shape (N, F), and tokens integers below 65,536 of shape (N, length). Labels and groups are integers from 0;
    group_train (N,) is for partition `natural`.
    """
    arrays, held = _read_arrays(source)
    wanted = _NAMES if {"x_test", "y_test"} & set(arrays) else _NAMES[:2]
    if lost := [name for name in wanted if name not in arrays]:
        raise DatasetError(f"{source} has no {', '.join(lost)}; it holds {_few(held) or 'nothing'}")
    inputs = _as_inputs(arrays["x_train"], f"x_train in {source}")
    labels = _as_numbers(arrays["y_train"], len(inputs), "label", f"y_train in {source}")
    groups = None
    if _GROUPS in arrays:
        groups = _as_numbers(arrays[_GROUPS], len(inputs), "group", f"{_GROUPS} in {source}")
    if "x_test" not in arrays:
        return hold_out(inputs, labels, int(labels.max()) + 1, groups)
    test_inputs = _as_inputs(arrays["x_test"], f"x_test in {source}")
    test_labels = _as_numbers(arrays["y_test"], len(test_inputs), "label", f"y_test in {source}")
    if (test_inputs.shape[1:], test_inputs.dtype) != (inputs.shape[1:], inputs.dtype):
        raise DatasetError(
            f"x_test in {source} is {test_inputs.dtype}, an example of shape {test_inputs.shape[1:]}, "
            f"x_train {inputs.dtype} of {inputs.shape[1:]}; they must have the same type and shape"
        )
    classes = int(max(labels.max(), test_labels.max())) + 1
    return Source(inputs, labels, test_inputs, test_labels, classes, groups=groups)


def _few(names: list[str]) -> str:
    """Return the first names, shortened, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(name[:100] for name in names[:MOST_NAMED]) + more


def _read_arrays(source: Path) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the arrays that we know, and the names of all members. Raises DatasetError."""
    try:
        with zipfile.ZipFile(source) as archive:
            held = sorted(name.removesuffix(".npy") for name in archive.namelist())
            known = [name for name in (*_NAMES, _GROUPS) if name in held]
            return {name: _read_array(archive, name) for name in known}, held
    except FileNotFoundError:
        raise DatasetError(f"no file {source}; write npz:<file>, {WHERE}") from None
    except UNREADABLE as error:
        raise DatasetError(f"{source} is damaged or not an .npz file of plain arrays: {error}") from None


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Return a member. Raises ValueError if it is no array, or if its header declares more than it has, or than fits here.

    numpy makes room for all that a header declares before it reads the first byte, so the header is read on its own first.
    """
    file = f"{name}.npy"
    if file not in archive.namelist():
        raise ValueError(f"{name} is no array: numpy.savez calls such a member {file}")
    member = archive.getinfo(file)
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are not read: make it an array of numbers of one shape")
    declared, there = math.prod(shape) * dtype.itemsize, min(member.file_size, MOST_DEFLATED * member.compress_size)
    if declared > there:
        raise ValueError(f"{name} declares {dtype} of shape {shape}, {declared:,} bytes, and has at most {there:,}")
    if declared > (room := available_memory()):
        raise ValueError(f"{name} is {dtype} of shape {shape}, {declared:,} bytes, and {room:,} are available")
    with archive.open(member) as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        return array


def folder(source: Path, download: bool) -> Source:
    """Read one folder of PNG or JPEG images per class, under train/ and test/; without test/, 20 % is held out.

    Classes are numbered in the order of their names. Images are grey if all of them are, else RGB, and all of one size.
    """
    if not source.is_dir():
        raise DatasetError(f"no folder {source}; write folder:<dir>, {WHERE}")
    train = source / "train" if (source / "train").is_dir() else source
    test = source / "test" if train != source and (source / "test").is_dir() else None
    classes = [entry.name for entry in _classes(train)]
    files, labels = _list_images(train, classes)
    test_files, test_labels = _list_images(test, classes) if test else ([], np.zeros(0, dtype=np.int64))
    both = files + test_files
    images = read_images(len(both), lambda number: (both[number], both[number]))
    if not test:
        return hold_out(images, labels, len(classes), class_names=tuple(classes))
    return Source(
        images[: len(files)], labels, images[len(files) :], test_labels, len(classes), class_names=tuple(classes)
    )


def image_files(root: Path) -> list[Path]:
    """List every image file under `root`, sorted."""
    return sorted(path for path in root.rglob("*") if path.suffix.lower() in _IMAGE_SUFFIXES)


def _as_inputs(array: NDArray[Any], what: str) -> NDArray[Any]:
    if array.ndim and not len(array):
        raise DatasetError(f"{what} has no examples: its shape is {array.shape}")
    if array.ndim == 2 and np.issubdtype(array.dtype, np.floating):
        return _as_vectors(array, what)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        return _as_images(array, what)
    if array.size == 0 or array.min() < 0 or array.max() > np.iinfo(np.uint16).max:
        ends = f"from {array.min()} to {array.max()}" if array.size else "of no values"
        raise DatasetError(f"{what} has tokens {ends}, shape {array.shape}; tokens are 0 to {np.iinfo(np.uint16).max}")
    return array.astype(np.uint16)


def _as_vectors(array: NDArray[Any], what: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        vectors = array.astype(np.float32)
    if array.size == 0:
        raise DatasetError(f"{what} has no values: its shape is {array.shape}")
    _require_values(array, np.abs(vectors) <= LARGEST, what)
    return vectors


def _require_values(array: NDArray[Any], allowed: NDArray[np.bool_], what: str) -> None:
    """Raise DatasetError for values that are not `allowed`, which names the first."""
    if not allowed.all():
        place = np.unravel_index(int(np.argmin(allowed)), array.shape)
        raise DatasetError(
            f"{what} has {array[place]} at [{', '.join(map(str, place))}], the first of {np.count_nonzero(~allowed):,} such "
            f"values: fill missing values, and leave out what is no number up to {LARGEST:g}"
        )


def _as_images(array: NDArray[Any], what: str) -> NDArray[Any]:
    if array.dtype not in (np.uint8, np.float32):
        convert = '; write x.astype("float32")' if array.dtype.kind in "biuf" else ""
        raise DatasetError(f"{what} is {array.dtype}; images are uint8 (0..255) or float32{convert}")
    given = array
    if array.ndim == 3:
        array = array[..., None]
    elif array.ndim == 4 and array.shape[3] > 4 >= array.shape[1]:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[3] > 4 or array.size == 0:
        raise DatasetError(
            f"{what} has shape {array.shape}; allowed are (N, H, W), (N, H, W, C), (N, C, H, W), C up to 4, "
            "(N, F) of feature vectors, which are floats, and (N, length) of tokens, which are integers"
        )
    if array.dtype == np.float32:
        _require_values(given, np.isfinite(given), what)
    return np.ascontiguousarray(array)


def _as_numbers(array: NDArray[Any], count: int, name: str, what: str) -> NDArray[np.int64]:
    if array.size != count or array.shape[:1] != (count,) or not np.issubdtype(array.dtype, np.integer):
        words = array.shape == (count,) and array.dtype.kind in "USbf"
        number = "; numpy.unique(ALL, return_inverse=True)[1] numbers those of all parts together" if words else ""
        raise DatasetError(
            f"{what} is {array.dtype} of shape {array.shape}; {name}s are integers of shape ({count},){number}"
        )
    numbers = array.reshape(-1).astype(np.int64)
    if numbers.min() < 0:
        raise DatasetError(f"{what} has a {name} {numbers.min()}; {name}s count from 0")
    if name == "label" and numbers.max() >= MOST_CLASSES:  # counts of labels take memory for each up to the largest
        raise DatasetError(f"{what} has a {name} {numbers.max()}; labels are below {MOST_CLASSES:,}")
    return numbers


def _classes(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _list_images(root: Path, classes: list[str]) -> tuple[list[Path], NDArray[np.int64]]:
    files: list[Path] = []
    labels: list[int] = []
    for entry in _classes(root):
        if entry.name not in classes:
            raise DatasetError(f"{entry} is not a class of the training images; those are {', '.join(classes)}")
        found = image_files(entry)
        if unread := [path for path in sorted(entry.rglob("*")) if path.suffix.lower() in _UNREAD_SUFFIXES]:
            raise DatasetError(
                f"{unread[0]} is neither PNG nor JPEG, and one of {len(unread):,} such images that would be left out: convert "
                "them, as by Pillow's Image.open(FILE).save(NAME.png), and move the others away"
            )
        files += found
        labels += [classes.index(entry.name)] * len(found)
    if not files:
        raise DatasetError(
            f"no .png, .jpg or .jpeg in the class folders of {root}; expected train/<class>/* or <class>/*"
        )
    return files, np.array(labels, dtype=np.int64)


def read_images(count: int, opened: Callable[[int], tuple[object, Path | io.BytesIO]]) -> NDArray[np.uint8]:
    """Return images (N, H, W, C): grey if all are, else RGB. `opened(n)` is what to call the n-th, and its file.

    Raises DatasetError for one that cannot be read, or is of another size than the first.
    """
    image = import_extra("PIL.Image")

    def read(number: int, what: Callable[[Any], Any]) -> Any:
        shown, file = opened(number)
        return open_image(image, file, what, shown)

    headers = [read(number, lambda picture: (picture.size, picture.mode)) for number in range(count)]
    (width, height), _ = headers[0]
    for number, (size, mode) in enumerate(headers):
        if size != (width, height):
            raise DatasetError(
                f"{opened(number)[0]} is {size[0]}x{size[1]}, {opened(0)[0]} is {width}x{height}; make all images one size"
            )
        if mode.startswith(("I", "F")):
            raise DatasetError(
                f"{opened(number)[0]} has more than 8 bits a channel (mode {mode}); convert it, or use npz: with float32"
            )
    grey = all(mode in ("1", "L", "LA") for _, mode in headers)
    if (needed := count * height * width * (1 if grey else 3)) > (room := available_memory()):
        raise DatasetError(
            f"{count:,} images of {width}x{height} take {needed:,} bytes, and {room:,} are available: make them smaller"
        )
    pixels = np.empty((count, height, width, 1 if grey else 3), dtype=np.uint8)
    for number, row in enumerate(pixels):
        picture = read(number, lambda picture: np.asarray(picture.convert("L" if grey else "RGB")))
        row[:] = picture.reshape(row.shape)
    return pixels


def open_image(image: Any, file: Path | io.BytesIO, read: Callable[[Any], Any], shown: object = None) -> Any:
    """Return `read(file)` of an image file; `image` is the module PIL.Image. Raises DatasetError if it cannot be read.

    `shown` is how the error names a file without a name.
    """
    try:
        with image.open(file) as picture:
            return read(picture)
    except (OSError, SyntaxError, ValueError, EOFError, image.DecompressionBombError) as error:
        raise DatasetError(f"{shown or file} cannot be read as an image: {error}") from None
