"""The lock of a run's folder, so that only one process writes a run.

It is a lock on an open file, so a killed run leaves none behind. The file remains; while the lock is held, it names the holder.
"""

import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

import psutil

from piecework.client_app.file_lock import lock, unlock
from piecework.device_profiles.documents import read_json

LOG = logging.getLogger("piecework")
LOCK_FILE = "lock"
LOOKS = 100  # times that a lock is tried while others only look whether it is held, PAUSE seconds apart
PAUSE = 0.01


class RunLockedError(ValueError):
    """Another process is writing this run."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder in the body; the folder is created if needed. Raises RunLockedError with the holder.

    If the platform or the file system has no locks, the body runs without one, and a warning is logged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+") as file:
        if not _take_from_lookers(file, folder):
            raise RunLockedError(in_use(folder, _holder(file)))
        file.truncate(0)
        holder = {"pid": os.getpid(), "host": platform.node(), "since": datetime.now().isoformat(" ", "seconds")}
        file.write(json.dumps(holder))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def require_free(folder: Path, seconds: float = 0.0) -> None:
    """Wait, at most `seconds`, until no process is writing a run. Raises RunLockedError.

    This is an early check for launchers. The ServerApp that writes the run takes the lock itself.
    """
    deadline = time.monotonic() + seconds
    while (other := writer(folder)) is not None:
        if time.monotonic() >= deadline:
            raise RunLockedError(in_use(folder, other))
        time.sleep(0.2)


def writer(folder: Path) -> str | None:
    """Return the process that is writing a run, in words; None if there is none, or if the platform has no locks."""
    path = folder / LOCK_FILE
    if not path.is_file():
        return None
    with path.open("r") as file:
        return None if _take(file, folder, shared=True) else _holder(file)


def holder(folder: Path) -> str | None:
    """Return the process that is writing a run, in words, for those that look often; None if there is none.

    Unlike `writer` it leaves a lock alone that its last holder released, so that it is never in the way of the next one. After
    a kill the file names a process that holds nothing: do not look again before the file has changed. Raises OSError.
    """
    path = folder / LOCK_FILE
    with path.open("r", encoding="utf-8") as file:
        if not file.read(1):
            return None
        try:
            free = lock(file, shared=True)
        except OSError:  # no locks here: the process named by the file lives, as far as can be known
            free = killed_writer(folder) is not None
        return None if free else _holder(file)


def in_use(folder: Path, holder: str) -> str:
    """Return the error message for a run that `holder` is writing."""
    return (
        f"{folder} is being written by {holder}: two processes would corrupt the run. Wait until that one ends or stop it; the "
        "lock is released when it ends"
    )


def _take_from_lookers(file: IO[str], folder: Path) -> bool:
    """Take the lock, also where `writer` is just looking, which holds a shared lock for a moment: that is no other writer."""
    for _ in range(LOOKS):
        if _take(file, folder):
            return True
        if not _take(file, folder, shared=True):
            return False
        unlock(file)
        time.sleep(PAUSE)
    return False


def _take(file: IO[str], folder: Path, *, shared: bool = False) -> bool:
    """Take the lock. Returns False if another process holds it, and True if there are no locks here."""
    try:
        return lock(file, shared=shared)
    except OSError as error:
        LOG.warning("%s cannot be locked (%s): see to it that no other process writes it", folder, error)
        return True


def killed_writer(folder: Path) -> str | None:
    """Name the process of this machine that took the lock and ended without releasing it, as after SIGKILL; else None.

    It reads the lock file and never takes the lock, so that a process that starts to write is not disturbed.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):  # no file, or one that is just being written
        found = read_json((folder / LOCK_FILE).read_text(encoding="utf-8"))
        if found["host"] == platform.node() and not _lives(found["pid"]):
            return f"process {found['pid']} since {found['since']}"
    return None


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        found = read_json(file.read())
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):  # the holder has not written its name yet
        return "another process"
