"""Read data sets of the Hugging Face hub with `datasets`: images, texts, or feature vectors.

No code of a data set is run: since version 4, `datasets` reads files only. It is imported here, because clients only read what
`prepare` wrote.
"""

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from piecework.federated_data import own_sources, tables, texts
from piecework.federated_data.columns import Columns
from piecework.federated_data.sources import WHERE, DatasetError, Ints, Source, hold_out, hold_out_rows, import_extra

if TYPE_CHECKING:
    import pandas

TESTS = ("test", "validation", "valid", "val", "dev")  # splits that are test examples, preferred first
WORDS = ("string", "large_string")
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.+)?")  # on the hub: NAME, OWNER/NAME, and a configuration
Splits = Mapping[str, Any]  # a datasets.Dataset by the name of its split


def hub(source: Path, download: bool, columns: Columns) -> Source:
    """Read a data set that `save_to_disk` wrote to a folder (an absolute path), or NAME or NAME:CONFIG of the hub.

    What is not on this machine is fetched only with `download`. The input is the only image column, else the only text column,
    else all columns of numbers; the label is the only ClassLabel, else a column of a usual name; `columns` may name others. The
    test examples are those of the split `test`, or of `validation` if that has no labels; without either 20 % is held out.
    Raises DatasetError.
    """
    library = import_extra("datasets", "hub")
    name = str(source)
    splits = _saved(library, source) if source.is_absolute() else _named(library, name, download)
    try:
        return _to_source(splits, columns, name)
    except DatasetError:
        raise
    except Exception as error:  # whatever the library raises for rows that it cannot read
        raise DatasetError(f"{name} cannot be read: {_shorten(error)}") from error


def _to_source(splits: Splits, columns: Columns, name: str) -> Source:
    train, test, label, group, inputs = _choose(splits, columns, name)
    kind = _kind_of(train, inputs, name)
    parts = [train] if test is None else [train, test]
    labels, names = _labels(parts, label, name)
    groups = tables.groups_of(_frame(train, [group]), group, name) if group else None
    if kind == "text":
        return _as_texts(parts, inputs[0], labels, names, groups, name)
    if kind == "image":
        images = _read_images(parts, inputs[0], name)
        found: list[NDArray[Any]] = [images[: len(train)], images[len(train) :]]
    else:
        found = [tables.features_of(*_expand(_frame(part, inputs), name), name) for part in parts]
    if test is None:
        return hold_out(found[0], labels[0], len(names), groups, names)
    if found[0].shape[1:] != found[1].shape[1:]:
        raise DatasetError(f"{name}: training examples have the shape {found[0].shape[1:]}, test {found[1].shape[1:]}")
    return Source(found[0], labels[0], found[1], labels[1], len(names), groups=groups, class_names=names)


def hub_place(root: Path, where: str) -> Path:
    """Return `root`, the folder that `where` would be, as an absolute path, or `where` if it can only be a name of the hub."""
    return Path(where) if NAME.fullmatch(where) and not root.is_dir() else root.resolve()


def saved_files(root: Path) -> list[Path]:
    """List the files of a data set on disk."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def _saved(library: Any, folder: Path) -> Splits:
    if not folder.is_dir():
        raise DatasetError(f"no folder {folder}; write hub:<folder>, {WHERE}, or hub:<name> as on the hub")
    try:
        found = library.load_from_disk(str(folder))
    except Exception as error:  # whatever the library raises for damaged files
        raise DatasetError(
            f"{folder} cannot be read as a data set: {_shorten(error)}; a folder is one that datasets.save_to_disk wrote"
        ) from error
    return dict(found) if isinstance(found, Mapping) else {"train": found}


def _named(library: Any, name: str, download: bool) -> Splits:
    path, _, config = name.partition(":")
    if Path(path).is_dir():
        raise DatasetError(
            f"hub:{name}: `datasets` would read {Path(path).resolve()} instead of one of the hub: start in another folder, or "
            "write that whole path if you mean it"
        )
    try:
        with _offline(library, not download):
            return dict(library.load_dataset(path, config or None))
    except Exception as error:  # of the network, of names, and of damaged files
        why = "" if download else "; only what the cache of `datasets` holds is read without data.download = true"
        raise DatasetError(f"hub:{name} is no folder, and cannot be read as a name: {_shorten(error)}{why}") from error


@contextmanager
def _offline(library: Any, offline: bool) -> Iterator[None]:
    """Keep `datasets` from the network. Its environment variables are read only when it is imported."""
    places = [library.config, import_extra("huggingface_hub.constants", "hub")]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = offline or place.HF_HUB_OFFLINE
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _choose(splits: Splits, asked: Columns, name: str) -> tuple[Any, Any, str, str, list[str]]:
    """Return the training part, the test part or None, and the columns of labels, of groups and of inputs."""
    if "train" not in splits and len(splits) != 1:
        raise DatasetError(f"{name} has no split 'train': it has {', '.join(splits) or 'none'}")
    train = splits.get("train", next(iter(splits.values())))
    if not len(train):
        raise DatasetError(f"{name}: its training split has no rows")
    classes = [column for column, kind in train.features.items() if type(kind).__name__ == "ClassLabel"]
    found = classes[0] if len(classes) == 1 else ""
    label, group, others = tables.choose_columns(list(train.features), asked, name, found)
    inputs = others if asked.inputs else _find_inputs(train, others, name)
    for part in TESTS:
        test = splits.get(part) if splits.get(part) is not train else None
        if test is not None and len(test) and _is_labelled(test, label):
            if lost := [column for column in (*inputs, label) if column not in test.features]:
                raise DatasetError(f"{name}: its split {part!r} has no column {lost[0]!r}, as 'train' has")
            return train, test, label, group, inputs
    return train, None, label, group, inputs


def _is_labelled(part: Any, label: str) -> bool:
    """Return whether a split has labels: in a contest's test split they are all -1."""
    return label in part.features and not all(value in (-1, None) for value in part[label])


def _find_inputs(part: Any, names: list[str], where: str) -> list[str]:
    """Return the only column of images, else of texts, else all columns of numbers."""
    kinds = {name: _column_kind(part, name) for name in names}
    for kind in ("image", "text"):
        found = [name for name in names if kinds[name] == kind]
        if len(found) == 1:
            return found
        if found:
            raise DatasetError(
                f"{where} has several columns of {kind}s, {', '.join(found)}: name one by data.input-columns"
            )
    numbers = [name for name in names if kinds[name] == "number"]
    if numbers and len(numbers) < len(names):
        raise DatasetError(
            f"{where} has columns that are no numbers, {_show(part, [name for name in names if not kinds[name]])}: name those "
            "that are the input by data.input-columns"
        )
    if not numbers:
        raise DatasetError(
            f"{where} has no column of images, texts or numbers besides the label: it has {_show(part, list(part.features))}"
        )
    return numbers


def _show(part: Any, names: list[str]) -> str:
    return ", ".join(f"{name} ({part.features[name]})" for name in names[: tables.SHOWN])


def _column_kind(part: Any, name: str) -> str:
    """Return `image`, `text`, `number` (a column of lists of numbers too), or nothing for another column."""
    feature = part.features[name]
    if type(feature).__name__ == "Image":
        return "image"
    inner = getattr(feature, "feature", feature)
    dtype = str(getattr(inner, "dtype", "")) if type(inner).__name__ == "Value" else ""
    if inner is feature and dtype in WORDS:
        return "text"
    return "number" if dtype.startswith(("int", "uint", "float", "bool")) else ""


def _kind_of(part: Any, inputs: list[str], where: str) -> str:
    kinds = {name: _column_kind(part, name) for name in inputs}
    if len({*kinds.values()}) == 1 and (kind := kinds[inputs[0]]) and (kind == "number" or len(inputs) == 1):
        return kind
    raise DatasetError(
        f"{where}: the input is one column of images, one of texts, or columns of numbers; data.input-columns has "
        f"{_show(part, inputs)}"
    )


def _labels(parts: list[Any], label: str, where: str) -> tuple[list[Ints], tuple[str, ...]]:
    """Return the labels of each part, and the names of the classes."""
    names, *others = [getattr(part.features[label], "names", None) for part in parts]
    if any(other != names for other in others):
        raise DatasetError(
            f"{where}: column {label!r} is {parts[0].features[label]} in the training split, and {parts[1].features[label]} in "
            "that of the test: cast both to one ClassLabel"
        )
    found = [tables.classes_of(_frame(part, [label])[label], where) for part in parts]
    if names is None:
        try:
            values = np.unique(np.concatenate(found))
        except TypeError:
            raise DatasetError(f"{where}: column {label!r} holds texts in one split and numbers in another") from None
        return [np.searchsorted(values, each).astype(np.int64) for each in found], tuple(map(str, values.tolist()))
    for labels in found:
        if labels.min() < 0 or labels.max() >= len(names):
            raise DatasetError(
                f"{where}: column {label!r} has labels from {labels.min()} to {labels.max()}, and {len(names)} classes: leave "
                "out what has no label"
            )
    return [labels.astype(np.int64) for labels in found], tuple(names)


def _as_texts(
    parts: list[Any], column: str, labels: list[Ints], names: tuple[str, ...], groups: Ints | None, where: str
) -> Source:
    found = [list(part[column]) for part in parts]
    for entries in found:
        if None in entries:
            raise DatasetError(f"{where}: row {entries.index(None) + 1} has no {column!r}: fill it or drop it")
    if len(found) == 1:
        rows = hold_out_rows(labels[0])
        found, labels = ([[found[0][row] for row in each] for each in rows], [labels[0][each] for each in rows])
        groups = None if groups is None else groups[rows[0]]
    tokens = texts.tokenise(*found)
    return Source(
        tokens[0],
        labels[0],
        tokens[1],
        labels[1],
        len(names),
        groups=groups,
        vocabulary=texts.WORDS + 1,
        class_names=names,
    )


def _read_images(parts: list[Any], column: str, where: str) -> NDArray[np.uint8]:
    """Return the images of all parts, of one size; they are decoded as files of a folder are."""
    library = import_extra("datasets", "hub")
    raw = [part.select_columns([column]).cast_column(column, library.Image(decode=False)) for part in parts]
    places = [(part, row) for part in raw for row in range(len(part))]

    def opened(number: int) -> tuple[str, Path | io.BytesIO]:
        part, row = places[number]
        held, shown = part[row][column], f"{where}, row {row + 1}"
        if held is None or (held["bytes"] is None and held["path"] is None):
            raise DatasetError(f"{shown} has no {column!r}: drop it")
        return shown, io.BytesIO(held["bytes"]) if held["bytes"] is not None else Path(held["path"])

    return own_sources.read_images(len(places), opened)


def _frame(part: Any, names: list[str]) -> "pandas.DataFrame":
    found: pandas.DataFrame = part.select_columns(names).to_pandas()
    return found


def _expand(frame: "pandas.DataFrame", where: str) -> tuple["pandas.DataFrame", list[str]]:
    """Return a table of numbers, in which a column of lists of one length is as many columns, and its columns."""
    pandas = import_extra("pandas", "table")
    parts = []
    for name in frame.columns:
        if frame[name].dtype != object:
            parts.append(frame[[name]])
            continue
        lengths = {len(value) if value is not None else 0 for value in frame[name]}
        if len(lengths) > 1 or not all(lengths):
            raise DatasetError(
                f"{where}: column {name!r} has lists of {min(lengths)} to {max(lengths)} numbers; vectors have one length"
            )
        values = np.array(frame[name].tolist(), dtype=np.float64)
        parts.append(pandas.DataFrame(values, columns=[f"{name}[{place}]" for place in range(values.shape[1])]))
    found = pandas.concat(parts, axis=1)
    return found, list(found.columns)
