"""The folder of a running task, and the removal of folders whose task's process died.

A task that the server gave up on may still run beside the next one. Therefore each task has its own folder, and other tasks
remove it only when no process works in it. This is known from a lock on a file in the folder.
"""

import shutil
from itertools import count
from pathlib import Path
from typing import BinaryIO

from piecework.client_app.file_lock import is_still, lock

LOCK = "lock"


def claim(root: Path, task: str) -> tuple[Path, BinaryIO, bool]:
    """Return an empty folder for a task, `<task>` or `<task>-<n>`, the open file that locks it, and whether it held files."""
    for number in count(1):
        folder = root / (task if number == 1 else f"{task}-{number}")
        held = take(folder)
        if held is not None:
            left = [path for path in folder.iterdir() if path.name != LOCK]
            for path in left:
                remove(path)
            return folder, held, bool(left)
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
            if not lock(file):
                file.close()
                return None
        except OSError:  # no locks here: leftovers of killed tasks stay until `piecework clean`
            return file
        if is_still(folder / LOCK, file):
            return file
        file.close()


def remove_leftovers(root: Path, own: Path, kept: set[str]) -> list[str]:
    """Remove the task folders in `root` that no process works in, and return their names.

    `own` is the caller's folder, and `kept` are folders that belong to no task. Without working locks nothing is removed.
    """
    if (unlocked := take(own)) is not None:  # we hold its lock, so this succeeds only if locks do not work
        unlocked.close()
        return []
    removed = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name not in kept and path != own):
        held = take(folder)
        if held is not None:
            with held:
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
