"""Ends processes of Flower or Ray, and removes their folder, when the launcher is gone, in whatever way: `guardian.py FOLDER`.

The launcher holds this process's standard input open, which the kernel closes even after SIGKILL. Every process of the run has
the private folder in its environment, or descends from one that has it, even if it has a session of its own.
"""

import shutil
import sys
import time
from contextlib import suppress

import psutil

GRACE_SECONDS = 10.0
MARKS = ("FLWR_HOME", "PIECEWORK_RAY")  # the variables that have the folder


def members(home: str) -> set[psutil.Process]:
    """Return the processes to which this folder belongs, and their descendants, without this process."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or it has just ended
            if belongs(process, home):
                found |= {process, *process.children(recursive=True)}
    return found - {psutil.Process()}


def belongs(process: psutil.Process, home: str) -> bool:
    """Return whether a process has this folder in its environment, or is Ray's, which change theirs, and has a file of it."""
    environment = process.environ()
    if home in (environment.get(mark) for mark in MARKS):
        return True
    return process.name().startswith("ray::") and any(file.path.startswith(home) for file in process.open_files())


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end(home: str) -> None:
    """Terminate the processes of a run, those too that start meanwhile, and kill what is left after GRACE_SECONDS."""
    asked, started = set[psutil.Process](), time.monotonic()
    while time.monotonic() < started + 2 * GRACE_SECONDS:
        family = {process for process in members(home) | asked if lives(process)}
        if not family:
            return
        late = time.monotonic() > started + GRACE_SECONDS
        for process in family:
            with suppress(psutil.Error):
                if late:
                    process.kill()
                elif process not in asked:
                    process.terminate()
        asked |= family
        psutil.wait_procs(family, timeout=0.2)


if __name__ == "__main__":
    sys.stdin.read()
    end(sys.argv[1])
    shutil.rmtree(sys.argv[1], ignore_errors=True)
