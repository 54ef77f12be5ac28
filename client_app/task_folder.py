"""The folder of a running task, and the removal of folders whose task's process died.

A task that the server gave up on may still run beside the next one. Therefore each task has its own folder, and other tasks
remove it only when no process works in it. This is known from an flock on a file in the folder, which the kernel releases when
its holder ends, even by kill -9 or a power cut. Process ids cannot be used, because a restarted container reuses them.
"""

import os
import shutil
from itertools import count
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: folders are not locked, and leftovers of killed tasks stay until `piecework clean`
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


def claim(root: Path, task: str) -> tuple[Path, BinaryIO, bool]:
    """Return an empty folder for a task, `<task>` or `<task>-<n>`, the open file that locks it, and whether it held files."""
    for number in count(1):
        folder = root / (task if number == 1 else f"{task}-{number}")
        lock = take(folder)
        if lock is not None:
            left = [path for path in folder.iterdir() if path.name != LOCK]
            for path in left:
                remove(path)
            return folder, lock, bool(left)
    raise AssertionError("there is always a next number")


def take(folder: Path) -> BinaryIO | None:
    """Lock a folder, which is created if need be, and return the open lock file; None if a running process holds the lock.

    If the platform or the file system supports no locks, the file is returned unlocked.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / LOCK).open("ab")
        except FileNotFoundError:
            continue  # another task removed the folder in between
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:
            return file
        if is_still(folder / LOCK, file):
            return file
        file.close()


def is_still(path: Path, file: BinaryIO) -> bool:
    """Return whether a path still leads to this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def remove_leftovers(root: Path, own: Path, kept: set[str]) -> list[str]:
    """Remove the task folders in `root` that no process works in, and return their names.

    `own` is the caller's folder, and `kept` are folders that belong to no task. Without working locks nothing is removed.
    """
    if (unlocked := take(own)) is not None:  # we hold its lock, so this succeeds only if locks do not work
        unlocked.close()
        return []
    removed = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name not in kept and path != own):
        lock = take(folder)
        if lock is not None:
            with lock:
                shutil.rmtree(folder, ignore_errors=True)  # another task may be removing it too
            if not folder.exists():
                removed.append(folder.name)
    return removed


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
