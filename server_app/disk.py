"""Errors of a disk that cannot be written, most often because it is full: what was written, what is free, what to do."""

import errno
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
    """Raise StorageError if the body cannot write to `path`; `then` is what to do when it can be written again.

    What writes safetensors raises no OSError, but names the system's error number in its text.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = (
            error.errno if isinstance(error, OSError) else int(next(iter(re.findall(r"os error (\d+)", str(error))), 0))
        )
        lines = [f"{path} cannot be written: {error}"]
        if code in FULL:
            lines.append(f"{shutil.disk_usage(path.parent).free:,} bytes are free there. {WHAT_TO_FREE}")
        raise StorageError("\n".join([*lines, *filter(None, [then])])) from error
