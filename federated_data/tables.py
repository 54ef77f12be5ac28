"""Read feature vectors from a table: a .csv or .parquet file, or a folder with `train` and `test` of these.

pandas reads both; it is imported here, because clients only read what `datasets.prepare` wrote. Polars would do as well, and
nothing else of this project's has it; the csv module of Python guesses no types.
"""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from piecework.device_profiles.profile import available_memory
from piecework.federated_data.columns import NO_COLUMNS, Columns
from piecework.federated_data.own_sources import LARGEST, MOST_CLASSES
from piecework.federated_data.sources import WHERE, DatasetError, Ints, Source, hold_out, import_extra

if TYPE_CHECKING:
    import pandas

LABELS = ("label", "target", "class", "y")  # names of the column with the classes, of which a table has one
GROUP = "group"
SUFFIXES = (".csv", ".parquet")
EXACT = 2**53  # from which on floats skip whole numbers
SHOWN = 8  # columns in a message
# What stands for a missing number; pandas has these too, and applies them to words.
MISSING = (
    "",
    "NA",
    "N/A",
    "n/a",
    "#N/A",
    "#NA",
    "<NA>",
    "NaN",
    "nan",
    "-NaN",
    "-nan",
    "null",
    "NULL",
    "None",
    "#N/A N/A",
)
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
UTF_16 = b"\xff\xfe", b"\xfe\xff"  # with which such a file begins


def table(source: Path, download: bool, columns: Columns = NO_COLUMNS) -> Source:
    """Read a table with a column `label`, `target`, `class` or `y`, numbers in all others, and perhaps a column `group`.

    `columns` names others, and which ones are features. Classes are whole numbers or words, numbered in their order. A folder
    holds train.csv and test.csv (or .parquet); of a file, or without a test part, 20 % is held out. Groups are for partition
    `natural`.
    """
    files = table_files(source)
    train = _read(files[0], columns)
    label, group, names = choose_columns(list(train.columns), columns, str(files[0]))
    values, numbers = np.unique(classes_of(train[label], files[0]), return_inverse=True)
    if len(values) > MOST_CLASSES:
        raise DatasetError(
            f"{files[0]}: column {label!r} has {len(values):,} classes; at most {MOST_CLASSES:,} are read"
        )
    inputs, labels = features_of(train, names, files[0]), numbers.astype(np.int64)
    words, groups = tuple(map(str, values.tolist())), groups_of(train, group, files[0])
    if len(files) == 1:
        return hold_out(inputs, labels, len(values), groups, class_names=words)
    test = _read(files[1], columns)
    _require_columns(test, [*names, label], files, [] if columns.inputs else [group])
    found = classes_of(test[label], files[1])
    if len(unknown := np.setdiff1d(found, values)):
        raise DatasetError(
            f"{files[1]}: class {str(unknown[0])!r} is none of {files[0].name}, which has {', '.join(words[:SHOWN])}"
        )
    test_labels = np.searchsorted(values, found).astype(np.int64)
    test_inputs = features_of(test, names, files[1])
    return Source(inputs, labels, test_inputs, test_labels, len(values), groups=groups, class_names=words)


def table_files(source: Path) -> list[Path]:
    """Return the file of a table, or those of its training and test parts. Raises DatasetError if there is none."""
    if not source.is_dir():
        if not source.is_file() or source.suffix.lower() not in SUFFIXES:
            why = "is neither a .csv nor a .parquet file" if source.is_file() else "does not exist"
            raise DatasetError(f"table {source} {why}; write table:<file or folder>, {WHERE}")
        return [source]
    found = {
        part: sorted(path for path in source.glob(f"{part}.*") if path.suffix.lower() in SUFFIXES and path.is_file())
        for part in ("train", "test")
    }
    if len(found["train"]) != 1 or len(found["test"]) > 1:
        raise DatasetError(
            f"{source} has to hold one of train.csv and train.parquet, and at most one of test.csv and test.parquet"
        )
    return [*found["train"], *found["test"]]


def _read(file: Path, columns: Columns) -> "pandas.DataFrame":
    reader = import_extra("pandas", "table")
    if (size := file.stat().st_size) > (room := available_memory()):
        raise DatasetError(f"{file} has {size:,} bytes, and {room:,} are available")
    try:
        if file.suffix.lower() == ".csv":
            header = _require_header(file)
            words = _text_columns(header, columns)
            found: pandas.DataFrame = reader.read_csv(
                file,
                header=0,
                names=header or None,  # without the spaces behind them
                skipinitialspace=True,
                dtype=dict.fromkeys(words, str),
                keep_default_na=False,  # a class or a group may be called NA
                na_values={name: MISSING for name in header if name not in words},
            )
            for name in words:
                found[name] = _classes_from_text(found[name])
        else:
            _require_room(file, room)
            found = reader.read_parquet(file)
    except DatasetError:
        raise
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{file} is no text in UTF-8 (byte {error.start + 1} is {error.object[error.start]:#04x}), as Latin-1 and files of "
            "older spreadsheets are: save it as CSV in UTF-8"
        ) from error
    except ImportError as error:
        raise DatasetError(f"{file}: pandas cannot read it without pyarrow: pip install 'piecework[table]'") from error
    except Exception as error:  # pandas and pyarrow have no common error for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DatasetError(f"{file} cannot be read as a table: {reason}") from error
    found.columns = [str(name) for name in found.columns]
    if repeated := [name for name in found.columns if list(found.columns).count(name) > 1]:
        raise DatasetError(f"{file} has several columns {repeated[0]!r}: give each its own name")
    if not len(found):
        raise DatasetError(f"{file} has no rows")
    return found


def _require_room(file: Path, room: int) -> None:
    """Raise DatasetError for a parquet file with more values than fit here: a run of equal ones takes nearly no bytes of it."""
    declared = import_extra("pyarrow.parquet", "table").read_metadata(file)
    if (needed := 8 * declared.num_rows * declared.num_columns) > room:
        raise DatasetError(
            f"{file} has {declared.num_rows:,} rows of {declared.num_columns:,} columns, {needed:,} bytes, and {room:,} are "
            "available"
        )


def _text_columns(header: list[str], columns: Columns) -> list[str]:
    """Return the columns that may be those of classes and of groups."""
    chosen = [columns.label] if columns.label else [name for name in header if name.lower() in LABELS]
    groups = columns.group or GROUP
    return [name for name in header if name in (*chosen, groups) and name not in columns.inputs]


def _classes_from_text(column: "pandas.Series[str]") -> "pandas.Series[Any]":
    """Return classes as numbers if all that are given are numbers, else the words; what is missing is NaN."""
    column = column.str.strip()  # spaces in front of a value are left out of all columns
    missing = column.isin(MISSING)
    numbers = import_extra("pandas", "table").to_numeric(column.mask(missing), errors="coerce")
    given = numbers.notna()
    return numbers if given.any() and (given | missing).all() else column.mask(column == "")


def _require_header(file: Path) -> list[str]:
    """Return the names of the columns. Raises DatasetError for what is not separated by commas, or no UTF-8.

    So it does for a column without a name, or with another one's, which pandas would rename.
    """
    with file.open("rb") as raw:
        if raw.read(2) in UTF_16:
            raise DatasetError(f"{file} is text in UTF-16: save it as CSV in UTF-8")
    with file.open(encoding="utf-8-sig", newline="") as stream:
        blank: tuple[list[str], ...] = ([], [""])  # which pandas skips
        rows = (row for row in csv.reader(stream, skipinitialspace=True) if row not in blank)
        names, first = [name.strip() for name in next(rows, [])], next(rows, [])
    if len(names) == 1 and (other := next((each for each in OTHER_SEPARATORS if each in names[0]), "")):
        raise DatasetError(
            f"{file}: its columns are separated by {OTHER_SEPARATORS[other]}, expected commas: write it so, as by "
            f"pandas.read_csv({file.name!r}, sep={other!r}).to_csv({file.name!r}, index=False)"
        )
    if len(first) > len(names):
        raise DatasetError(
            f"{file}: row 1 has {len(first)} values, and the header {len(names)} columns: name each column"
        )
    if "" in names:
        raise DatasetError(
            f"{file}: column {names.index('') + 1} has no name, as pandas writes an index: write the file with index=False"
        )
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DatasetError(f"{file} has several columns {repeated[0]!r}: give each its own name")
    return names


def choose_columns(names: list[str], asked: Columns, file: str, known: str = "") -> tuple[str, str, list[str]]:
    """Return the columns of classes, of groups (perhaps none) and of features. Raises DatasetError, which lists the columns.

    `known` is the column of classes if the data say so.
    """
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    if lost := [name for name in (*asked.inputs, asked.label, asked.group) if name and name not in names]:
        raise DatasetError(f"{file} has no column {lost[0]!r} ({asked.named()}); it has {shown}")
    found = [asked.label or known] if asked.label or known else [name for name in names if name.lower() in LABELS]
    if len(found) != 1:
        raise DatasetError(
            f"{file}: expected one column of classes, called {', '.join(LABELS[:-1])} or {LABELS[-1]}; it has "
            f"{' and '.join(found) or 'none'}, of {shown}: name it by data.label-column"
        )
    label, group = found[0], asked.group or (GROUP if GROUP in names and GROUP not in (*found, *asked.inputs) else "")
    inputs = list(asked.inputs) or [name for name in names if name not in (label, group)]
    if len({label, group, *inputs}) < len([label, group, *inputs]):
        raise DatasetError(f"{file}: {asked.named()} name the column of classes {label!r}, or another one, twice")
    return label, group, inputs


def classes_of(column: "pandas.Series[Any]", file: Path | str) -> NDArray[Any]:
    """Return the class of each row: whole numbers, or words."""
    if column.isna().any():
        raise DatasetError(
            f"{file}: row {int(column.isna().to_numpy().argmax()) + 1} has no {column.name!r}: fill it or drop it"
        )
    values = column.to_numpy()
    if values.dtype.kind == "f":
        if len(wrong := np.flatnonzero(~(np.abs(values) < EXACT))):
            raise DatasetError(f"{file}: row {wrong[0] + 1} has the class {values[wrong[0]]}, which is no whole number")
        if not (values == np.round(values)).all():
            odd = values[values != np.round(values)][0]
            raise DatasetError(
                f"{file}: column {column.name!r} holds {odd}: classes are whole numbers or words; there is no regression yet"
            )
        return values.astype(np.int64)
    return values if values.dtype.kind in "iub" else np.array([str(value) for value in values])


def features_of(frame: "pandas.DataFrame", names: list[str], file: Path | str) -> NDArray[np.float32]:
    """Return the columns of numbers as float32 [N, F]. Raises DatasetError, which names the column and the row."""
    if not names:
        raise DatasetError(f"{file} has no columns besides the classes: each other column is a feature")
    found = np.empty((len(frame), len(names)), dtype=np.float32)
    for place, name in enumerate(names):
        column = frame[name]
        if column.dtype.kind not in "biuf":
            row = next((row for row, value in enumerate(column) if not _is_number(value)), 0)
            raise DatasetError(
                f"{file}: column {name!r} holds {column.iloc[row]!r} in row {row + 1}, which is no number: drop it, or "
                "encode it (pandas.get_dummies makes a column of each value)"
            )
        with np.errstate(over="ignore"):
            found[:, place] = column.to_numpy(dtype=np.float64, na_value=np.nan)
        if len(wrong := np.flatnonzero(~(np.abs(found[:, place]) <= LARGEST))):  # nor NaN
            row = int(wrong[0])
            raise DatasetError(
                f"{file}: row {row + 1} has {name} = {column.iloc[row]}: fill missing values, and leave out what is no number "
                f"up to {LARGEST:g}"
            )
    return found


def _is_number(value: Any) -> bool:
    try:
        return value is None or float(value) is not None
    except (TypeError, ValueError):
        return False


def groups_of(frame: "pandas.DataFrame", name: str, file: Path | str) -> Ints | None:
    """Return the numbers of the groups of a column, or None without one."""
    if not name:
        return None
    if frame[name].isna().any():
        raise DatasetError(f"{file}: row {int(frame[name].isna().to_numpy().argmax()) + 1} has no {name!r}")
    return np.unique(frame[name].astype(str).to_numpy(), return_inverse=True)[1].astype(np.int64)


def _require_columns(frame: "pandas.DataFrame", names: list[str], files: list[Path], allowed: list[str]) -> None:
    """Raise DatasetError for a test part without a column, or if any are `allowed`, with another one."""
    for name in names:
        if name not in frame.columns:
            raise DatasetError(f"{files[1]} has no column {name!r}, as {files[0].name} has")
    if allowed and (more := [name for name in frame.columns if name not in (*names, *allowed, GROUP)]):
        raise DatasetError(f"{files[1]} has a column {more[0]!r} that {files[0].name} does not have")
