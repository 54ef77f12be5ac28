"""Runs of the command line in child processes with a session of their own, and what is left of them when they are killed.

A child is forked from a process that has imported what a run needs, so that it takes two seconds instead of ten, and then does
what the command `piecework` does. This process never trains itself: what a child computes begins there.
"""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

import piecework.client_app.app
import piecework.engines.launch  # noqa: F401
from piecework.cli import main
from piecework.device_profiles.memory import trace

MARK = "PIECEWORK_CHAOS"  # the environment variable that tells whose a process is
HANGS = 300.0  # seconds after which a process that has not ended is said to hang
GRACE = 60.0  # seconds in which what a killed process started has to end
PAUSE = 0.005


@dataclass
class Child:
    """A process of the command line. `said` is the file of its output, `family` what it was seen to have started."""

    pid: int
    mark: str
    said: Path
    started: float
    family: set[psutil.Process] = field(default_factory=set)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or the negative number of a signal, its output and its seconds."""

    code: int
    said: str
    seconds: float


def warm_up() -> None:
    """Import torch's compiler, which tracing needs, once for all children."""
    trace(lambda: torch.zeros(1) + 1)


def start(
    arguments: Sequence[str],
    said: Path,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> Child:
    """Start `piecework ARGUMENTS`; `prepare` is called in the new process before."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    said.write_bytes(b"")  # it may be killed before it opens it
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    if not (pid := os.fork()):
        code = 70
        try:
            _redirect(said)
            os.environ.update({MARK: mark, **(environment or {})})
            tempfile.tempdir = None  # TMPDIR may be another one now
            prepare()
            main(list(arguments))
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):  # the disk is full
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    return Child(pid, mark, said, began)


def _redirect(said: Path) -> None:
    """Begin a session, with no input and the output in a file."""
    os.setsid()
    for descriptor, target in (
        (0, os.open(os.devnull, os.O_RDONLY)),
        (1, os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)),
        (2, 1),
    ):
        os.dup2(target, descriptor)


def end_of(child: Child, until: float = 0.0) -> Ended | None:
    """Wait for a child's end, at most until a moment of the monotonic clock (0: until it hangs); None if it goes on.

    One that hangs is killed, and has ended with -9 after HANGS seconds.
    """
    hangs = child.started + HANGS
    while True:
        found, status = os.waitpid(child.pid, os.WNOHANG)
        now = time.monotonic()
        if found:
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            said = child.said.read_text("utf-8", "replace")
            return Ended(code, said, now - child.started)
        if until and now >= until:
            return None
        if now >= hangs:
            kill(child, everything=True)
        time.sleep(PAUSE)


def kill(child: Child, *, everything: bool) -> None:
    """Kill a child by SIGKILL: the process that was started, or its whole group. What it started is noted before."""
    with suppress(psutil.NoSuchProcess):
        child.family |= set(psutil.Process(child.pid).children(recursive=True))
    if everything:
        os.killpg(child.pid, signal.SIGKILL)
    else:
        os.kill(child.pid, signal.SIGKILL)


def leftovers(child: Child, folder: Path) -> list[str]:
    """Return what is left of a child that has ended, once its guardian had the time: processes, which are ended, and files.

    `folder` is where temporary files of the child are.
    """
    until = time.monotonic() + GRACE
    while (alive := _alive(child)) or any(folder.iterdir()):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    left = []
    for process in alive:
        with suppress(psutil.Error):
            left.append(f"process {' '.join(process.cmdline())[:100]}")
            process.kill()
    return left + [f"file {path.name}" for path in folder.iterdir()]


def _alive(child: Child) -> set[psutil.Process]:
    """Return the processes of a child that run: those it was seen to have started, and those with its mark."""
    found = set()
    for process in [*child.family, *psutil.process_iter()]:
        with suppress(psutil.Error, OSError):
            runs = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            if runs and (process in child.family or process.environ().get(MARK) == child.mark):
                found.add(process)
    return found


def run(arguments: Sequence[str], said: Path, prepare: Callable[[], None] = lambda: None) -> Ended:
    """Run `piecework ARGUMENTS` to its end."""
    ended = end_of(start(arguments, said, prepare=prepare))
    assert ended is not None
    return ended
