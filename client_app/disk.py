"""Files replaced whole or not at all; and errors of a disk that cannot be written: what is free, and what to do."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WHAT_TO_FREE = (
    "Free some: old runs can be deleted, and `piecework clean` removes what emulated clients of ended runs stored"
)


class StorageError(OSError):
    """A file cannot be written. The message names it, says why, and what to do."""


@contextmanager
def writing(path: Path, then: str = "") -> Iterator[None]:
    """Raise StorageError if the body cannot write to `path`; `then` is what to do when it can be written again."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        lines = [f"{path} cannot be written: {error}", what_to_free(path.parent, error), then]
        raise StorageError("\n".join(filter(None, lines))) from error


def write_atomically(path: Path, content: bytes, then: str = "", mode: int | None = None) -> None:
    """Replace a file's content entirely or, if the process is interrupted, not at all. Raises StorageError.

    `then` is what to do when it can be written again. The file is never more accessible than `mode`; None = as the user's umask
    has it.
    """
    temporary = path.with_name(path.name + ".tmp")
    with writing(path, then):
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if mode is not None:
            temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)


def sync(path: Path) -> None:
    """Flush a file or folder to disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def what_to_free(folder: Path, error: Exception) -> str:
    """Return how much is free in a folder, and what can be deleted, if an error says that its disk is full; else nothing."""
    return f"{shutil.disk_usage(folder).free:,} bytes are free there. {WHAT_TO_FREE}" if is_full(error) else ""


def is_full(error: BaseException) -> bool:
    """Return whether an error, or what it was raised from, says that a disk is full.

    What writes safetensors raises no OSError, but names the system's error number in its text.
    """
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError):
        code = int(next(iter(re.findall(r"os error (\d+)", str(error))), 0))
    return code in FULL or (error.__cause__ is not None and is_full(error.__cause__))
