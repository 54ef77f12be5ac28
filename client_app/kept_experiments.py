"""Which experiments a device keeps on its disk: the newest few, whose stores a resumed run finds again.

Every task holds a shared lock on a file in its experiment's folder, `in-use`, and a folder is removed only under an exclusive
one. So an experiment in which any task works is never removed, and a task that begins meanwhile waits and starts a new folder.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from piecework.client_app.file_lock import have_locks, is_still, lock

IN_USE = "in-use"
EXPERIMENT = re.compile("[0-9a-f]{32}")  # as server_app/run_values.py makes them; other folders are not ours to remove


def hold(experiment: Path) -> BinaryIO:
    """Return an open file that keeps an experiment's folder, which is created if need be, until the file is closed."""
    while True:
        experiment.mkdir(parents=True, exist_ok=True)
        try:
            file = (experiment / IN_USE).open("ab")
        except FileNotFoundError:
            continue  # the folder was removed in between
        try:
            lock(file, shared=True, wait=True)
        except OSError:
            return file  # no locks here: remove_old removes nothing either
        if is_still(experiment / IN_USE, file):
            return file
        file.close()


def remove_old(state_dir: Path, current: str, kept: int) -> list[str]:
    """Remove all experiments but the current one and the `kept` others that were used last; return notes of what was done.

    One in use is kept, and counts among the others. Without working locks nothing is removed. With `kept` = 0 all stay. Other
    clients may do the same in this folder: one after another, because a folder that is being removed looks as if it were used
    now. What cannot be removed stays, with a note.
    """
    if not kept or not have_locks():
        return []
    folder = os.open(state_dir, os.O_RDONLY)
    try:
        with suppress(OSError):
            lock(folder, wait=True)
        return _remove_each(state_dir, current, kept)
    finally:
        os.close(folder)


def _remove_each(state_dir: Path, current: str, kept: int) -> list[str]:
    notes = []
    for experiment in old_experiments(state_dir, current, kept):
        try:
            if remove(experiment):
                notes.append(f"removed its store of experiment {experiment.name}: memory.keep-experiments = {kept}")
        except FileNotFoundError:
            pass  # another client has just removed it
        except OSError as error:
            notes.append(f"could not remove its store of experiment {experiment.name}: {error.strerror or error}")
    return notes


def old_experiments(state_dir: Path, current: str, kept: int) -> list[Path]:
    """Return the experiments that may be removed, the oldest first."""
    if not kept or not have_locks():
        return []
    folders = [path for path in state_dir.iterdir() if EXPERIMENT.fullmatch(path.name) and path.name != current]
    return sorted(filter(Path.is_dir, folders), key=lambda path: (_last_use(path), path.name))[:-kept]


def _last_use(experiment: Path) -> float:
    """Return when a task last began or ended in an experiment: its folder came into its client's, or went."""
    times = [0.0]
    with suppress(OSError):  # another client removes it, or it is not ours to read
        for path in experiment.iterdir():
            if path.is_dir():
                times.append(path.stat().st_mtime)
    return max(times)


def remove(experiment: Path) -> bool:
    """Remove an experiment in which no task works; return whether it was removed. Raises OSError if it cannot be."""
    with (experiment / IN_USE).open("ab") as file:
        return remove_under(file, experiment)


def remove_under(file: BinaryIO, experiment: Path) -> bool:
    """Remove an experiment whose file IN_USE is open, as `remove` does."""
    try:
        if not lock(file):
            return False
    except OSError:  # no locks here
        return False
    if not is_still(experiment / IN_USE, file):
        return False  # another client removed it before we had the lock, and a task may have begun a new one
    for path in experiment.iterdir():
        if path.name != IN_USE:
            shutil.rmtree(path, ignore_errors=True)
    if left := [path.name for path in experiment.iterdir() if path.name != IN_USE]:
        raise PermissionError(f"{left[0]} in it stays")
    (experiment / IN_USE).unlink()
    with suppress(OSError):  # another task has just begun a new folder in it
        experiment.rmdir()
    return True
