"""Where an export goes: refused before anything is computed if it cannot be written, and left as it was if the export fails.

An export is written under a hidden name beside its own, which no message names: they name what the user gave.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from piecework.client_app.disk import FULL

ELSEWHERE = "name another place (--out)"


class ExportError(ValueError):
    """A run cannot be written in a format, or what was written does not compute what the model computes."""


def require_target(to: Path, form: str, defaults: Mapping[str, str]) -> None:
    """Raise ExportError, which says what to do, if the format cannot write to `to`.

    `defaults` are the names that the formats give their file or, if these have no extension, their folder.
    """
    default = defaults[form]
    what = "one file" if Path(default).suffix else "a folder of files"
    parent = to.absolute().parent
    if not parent.is_dir():
        what_is = f"{parent} is a file" if parent.exists() else f"there is no folder {parent}"
        raise ExportError(f"{to} cannot be written: {what_is}; create the folder, or {ELSEWHERE}")
    if Path(default).suffix and to.is_dir():
        raise ExportError(f"{to} is a folder, and {form} writes {what}: name the file, as in {to / default}")
    if not Path(default).suffix and to.exists() and not to.is_dir():
        raise ExportError(f"{to} is a file, and {form} writes {what}: {ELSEWHERE}")
    extension = to.suffix.lower()
    others = {Path(name).suffix or f".{other}": other for other, name in defaults.items()}
    if extension != Path(default).suffix and extension in others:
        if others[extension] == form:
            raise ExportError(f"{to} looks like a file, and {form} writes {what}: leave the extension out")
        raise ExportError(
            f"{to} has the extension of {others[extension]}, and the format is {form}, which writes {what}: name it "
            f"{to.with_suffix(Path(default).suffix)}, or ask for --format {others[extension]}"
        )
    place = to if to.is_dir() else parent
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise ExportError(f"{to} cannot be written: nothing may be written in {place}; {ELSEWHERE}")


def cannot_write(target: Path, error: OSError) -> ExportError:
    """Return an error that names what the user gave, why it cannot be written, and what to do."""
    why = error.strerror or str(error)
    if error.errno in FULL:
        return ExportError(
            f"{target} cannot be written: {why}; {shutil.disk_usage(target.absolute().parent).free:,} bytes are free there. "
            f"Free some, or {ELSEWHERE}"
        )
    return ExportError(f"{target} cannot be written: {why}; {ELSEWHERE}")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a hidden name beside a file; what the body wrote there becomes the file if the body ends without an error.

    Raises ExportError for what the disk refuses.
    """
    unchecked = hidden(target)
    try:
        yield unchecked
        unchecked.replace(target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        unchecked.unlink(missing_ok=True)


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder, whose files get into `folder` if the body ends without an error; else nothing changes there.

    Raises ExportError for what the disk refuses.
    """
    unchecked = hidden(folder)
    try:
        shutil.rmtree(unchecked, ignore_errors=True)
        unchecked.mkdir()
        yield unchecked
        folder.mkdir(exist_ok=True)
        for file in sorted(unchecked.iterdir()):
            file.replace(folder / file.name)
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(unchecked, ignore_errors=True)


def hidden(path: Path) -> Path:
    """Return a hidden name beside a file or folder, under which it is written until it has been checked."""
    absolute = path.absolute()
    return absolute.with_name(f".{absolute.name}.unchecked")
