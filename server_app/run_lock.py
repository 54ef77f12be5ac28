"""One writer a run: the lock of a run's folder.

`fcntl.flock` on an open file: the kernel lets go of it when the process ends, however it ends, so a killed run leaves nothing
behind that has to be removed. The file stays; what is written in it says who holds the lock.
"""

import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # a platform without it
    fcntl = None  # type: ignore[assignment]

LOG = logging.getLogger("piecework")
LOCK_FILE = "lock"


class RunLockedError(ValueError):
    """Another process writes this run."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Be the only writer of a run's folder, which is made where there is none. Raises RunLockedError, naming the other.

    Where the file system or the platform has no locks, says so in the log and goes on without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+") as file:
        if not _take(file, folder):
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
    """Wait, at most so long, until no client writes a run. Raises RunLockedError.

    For a launcher whose ServerApp will write: what counts is the lock that the ServerApp takes.
    """
    deadline = time.monotonic() + seconds
    while (other := writer(folder)) is not None:
        if time.monotonic() >= deadline:
            raise RunLockedError(in_use(folder, other))
        time.sleep(0.2)


def writer(folder: Path) -> str | None:
    """Who writes a run at the moment; None where no client does, or no client can tell."""
    path = folder / LOCK_FILE
    if not path.is_file():
        return None
    with path.open("r") as file:
        return None if _take(file, folder, shared=True) else _holder(file)


def in_use(folder: Path, holder: str) -> str:
    """What is wrong, and what to do instead."""
    return (
        f"{folder} is being written by {holder}: two processes would spoil the run. Wait until that one ends, or stop it; the "
        "lock goes with its process"
    )


def _take(file: IO[str], folder: Path, *, shared: bool = False) -> bool:
    """Whether the lock could be had, or there are none here."""
    if fcntl is None:
        LOG.warning("this platform has no file locks: see to it that no other process writes %s", folder)
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        LOG.warning("%s cannot be locked (%s): see to it that no other process writes it", folder, error)
    return True


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        found = json.loads(file.read())
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):  # it has only just taken it
        return "another process"
