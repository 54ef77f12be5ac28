"""Which experiments a device keeps on its disk: the newest few, whose stores a resumed run finds again.

Every task holds a shared flock on a file in its experiment's folder, `in-use`, and a folder is removed only under an exclusive
one. So an experiment in which any task works is never removed, and a task that begins meanwhile waits and starts a new folder.
"""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from piecework.client_app.task_folder import is_still

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, and nothing removed
    fcntl = None  # type: ignore[assignment]

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
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:
            return file  # no locks here: remove_old removes nothing either
        if is_still(experiment / IN_USE, file):
            return file
        file.close()


def remove_old(state_dir: Path, current: str, kept: int) -> list[str]:
    """Remove all experiments but the current one and the `kept` others that were used last; return what was removed.

    One in use is kept, and counts among the others. Without working locks nothing is removed. With `kept` = 0 all stay.
    """
    if not kept or fcntl is None:
        return []
    folders = [path for path in state_dir.iterdir() if EXPERIMENT.fullmatch(path.name) and path.name != current]
    old = sorted(folders, key=lambda path: (_last_use(path), path.name))[:-kept]
    return [path.name for path in old if _removed(path)]


def _last_use(experiment: Path) -> float:
    """Return when a task last began or ended in an experiment: its folder came into its client's, or went."""
    clients = [path for path in experiment.glob("*") if path.is_dir()]
    return max((path.stat().st_mtime for path in clients), default=0.0)


def _removed(experiment: Path) -> bool:
    with (experiment / IN_USE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        for path in experiment.iterdir():
            if path.name != IN_USE:
                shutil.rmtree(path, ignore_errors=True)
        if [path.name for path in experiment.iterdir()] != [IN_USE]:
            return False
        (experiment / IN_USE).unlink()
        with suppress(OSError):  # another task has just begun a new folder in it
            experiment.rmdir()
    return True
