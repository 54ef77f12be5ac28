"""The queue of a harness: what it was asked for, what it has started, and how a run is started."""

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import psutil
import tomli_w

from benchmarks.claims.child import spawn
from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Place
from benchmarks.claims.notes import Note, beside
from benchmarks.claims.recorded import Recorded
from benchmarks.claims.records import DOCS
from piecework.server_app.records import RunDir
from piecework.training.settings.table import nest

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is run, and how. `first`: rounds after which a run is stopped, 0 = none; see `to_time`."""

    out: Path
    jobs: int = 1
    only: str = ""
    hours: float = math.inf
    first: int = 0
    retry: bool = False
    data_dir: str = ""
    records: Path = DOCS


@dataclass
class Child:
    """A run in a process. `stopped` says why the harness ended it, if it did.

    `before` is the version of the summary that an earlier process left. `core`: the seconds of a core that this one had in the
    `watched` seconds after `began`.
    """

    job: Job
    folder: Path
    process: Popen[bytes]
    before: tuple[int, int] | None
    stopped: str = ""
    core: float = 0.0
    watched: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def watch(self) -> None:
        """Look how much of a core's time the process has had."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:  # it has ended
            return
        self.core, self.watched = times.user + times.system, time.monotonic() - self.began

    def stop(self, why: str) -> None:
        """Ask the run to end, as Ctrl-C would: it keeps its rounds."""
        if not self.stopped:
            self.stopped = why
            self.process.send_signal(signal.SIGTERM)


@dataclass
class Queue:
    """The runs of now: those that are running, and by their folders those that were started, or left to other processes.

    `said` is what was said of others, `recorded` what the claims' records have, `failed` the labels of those that failed,
    `accidents` the failures since the last run that gave a result. `held` are the locks of those that are running. `rates` are
    what searches have found.
    """

    claims: Sequence[Claim]
    options: Options
    say: Say
    children: list[Child] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    accidents: int = 0
    held: dict[Path, ExitStack] = field(default_factory=dict)
    rates: dict[tuple[str, Place], float | None] = field(default_factory=dict)
    recorded: dict[str, Recorded] = field(default_factory=dict)

    def tell(self, text: str) -> None:
        """Say something, unless it was said."""
        if text not in self.said:
            self.said.add(text)
            self.say(text)


def start(job: Job, options: Options, commit: str, machine: str) -> Child:
    """Start a run, or go on with it where it has begun."""
    folder = job.folder(options.out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (Note.read(folder) or Note.of(job)).started(commit, machine).write(folder)
    words = ["run", "--set", "workers=1"]
    if RunDir(folder).has_begun():
        words += ["--set", f"resume-from={folder}"]
    else:
        settings = beside(folder, "toml")
        settings.write_text(tomli_w.dumps(nest(dict(job.settings))), encoding="utf-8")
        own = {"output-dir": folder.parent, "run-name": folder.name, "training.torch-threads": 1}
        own |= {"data-dir": options.data_dir} if options.data_dir else {}
        words += [
            "--preset",
            str(settings),
            *(word for key, value in own.items() for word in ("--set", f"{key}={value}")),
        ]
    before = RunDir(folder).summary_version()
    return Child(job, folder, spawn(words, beside(folder, "log")), before)


def close(child: Child) -> None:
    """Close the pipe by which a run knows that the harness lives."""
    assert child.process.stdin is not None
    child.process.stdin.close()
