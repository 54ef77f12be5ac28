"""Locks on open files, which the kernel releases when their holder ends, even by kill -9 or a power cut.

Process ids cannot tell whether a holder lives, because a restarted container reuses them. The locks are those of `fcntl.flock`,
and not of the library filelock, which has none that several processes share.
"""

import errno
import os
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def have_locks() -> bool:
    """Return whether the platform has locks; a file system may still have none."""
    return fcntl is not None


def lock(file: IO[Any] | int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed; return False if another process holds a lock that excludes this one.

    Several processes may hold a `shared` lock; with `wait` the others are waited for. Raises OSError if there are no locks on
    this platform or file system.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, "this platform has no file locks")
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def unlock(file: IO[Any] | int) -> None:
    """Release a lock that `lock` took, before the file is closed."""
    fcntl.flock(file, fcntl.LOCK_UN)


def is_still(path: Path, file: IO[Any]) -> bool:
    """Return whether a path still leads to this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
