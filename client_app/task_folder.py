"""The folder of a task at work, and the folders of tasks whose process is gone.

A task that the server gave up on may still run beside the next one, so no two share a folder, and a folder is removed by
others only when no client works in it. An flock on a file in it tells: the kernel gives it back when its holder ends, by
kill -9 and power cuts too. Process ids would not do, because a container that starts again gives the same ones.
"""

import os
import shutil
from itertools import count
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: folders are not locked, and what killed tasks leave stays until `piecework clean`
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"


def claim(root: Path, task: str) -> tuple[Path, BinaryIO, bool]:
    """An empty folder for a task, `<task>` or `<task>-<n>`, the open file that locks it, and whether something lay in it."""
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
    """The lock of a folder, which is made if need be; None where someone who is alive has it.

    Where the file system knows no locks, the file is given without one.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / LOCK).open("ab")
        except FileNotFoundError:
            continue  # another task tidied the folder away in between
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:
            return file
        if _is_still(folder / LOCK, file):
            return file
        file.close()


def _is_still(path: Path, file: BinaryIO) -> bool:
    """Whether an open file still lies under its name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def remove_leftovers(root: Path, own: Path, kept: set[str]) -> list[str]:
    """Remove the task folders in `root` that no client works in; their names. `kept` are not folders of tasks."""
    if (unlocked := take(own)) is not None:  # it is ours, and locked where locks work
        unlocked.close()
        return []
    removed = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name not in kept and path != own):
        lock = take(folder)
        if lock is not None:
            with lock:
                shutil.rmtree(folder, ignore_errors=True)  # another task may be tidying up too
            if not folder.exists():
                removed.append(folder.name)
    return removed


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
