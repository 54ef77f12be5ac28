"""The queue of a plan: what it was asked for, what it has started, and how a run is started."""

import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Protocol

import psutil
import tomli_w

from piecework.server_app.records import RunDir
from piecework.studies.child import spawn
from piecework.studies.jobs import Job
from piecework.studies.notes import Note, State, beside
from piecework.training.settings import Scalar
from piecework.training.settings.table import nest

Say = Callable[[str], None]


class Plan(Protocol):
    """What is to be run."""

    def jobs(self, queue: "Queue") -> Iterator[Job]:
        """Yield the runs that could be started now, in order, those too that are done; say what others wait for."""
        ...

    def is_recorded(self, job: Job) -> bool:
        """Return whether a run's result is known from elsewhere, so that it is not run here."""
        ...


@dataclass(frozen=True)
class Words:
    """How the queue speaks of what carries it out, and of the commands that go on and that try again what has failed."""

    starter: str = "the harness"
    command: str = "run"
    retry: str = "--retry tries it again"
    retry_all: str = "`run --retry` tries them again"
    status: str = "`status` says what is missing"


@dataclass(frozen=True)
class Options:
    """How runs are carried out. `first`: rounds after which a run is stopped, 0 = none.

    `retry` are the states of failed runs that are tried again. After `accidents` failures in a row that are no results nothing
    more is started. `always` are settings that each start of a run is given, `at_first` its first one alone, and `options` are
    further words of each command line. `commit` and `machine` are noted beside each run. `keeps_models`: clients' own models
    stay where completed runs have them.
    """

    out: Path
    jobs: int = 1
    hours: float = math.inf
    first: int = 0
    retry: Collection[State] = ()
    accidents: float = math.inf
    always: Mapping[str, Scalar] = field(default_factory=dict)
    at_first: Mapping[str, Scalar] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    commit: str = ""
    machine: str = ""
    keeps_models: bool = False
    words: Words = Words()


@dataclass
class Child:
    """A run in a process. `stopped` says why it was asked to end, if it was.

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

    `said` is what was said of others, `failed` the labels of those that failed, `accidents` the failures since the last run
    that gave a result. `held` are the locks of those that are running.
    """

    plan: Plan
    options: Options
    say: Say
    children: list[Child] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    accidents: int = 0
    held: dict[Path, ExitStack] = field(default_factory=dict)

    def tell(self, text: str) -> None:
        """Say something, unless it was said."""
        if text not in self.said:
            self.said.add(text)
            self.say(text)


def start(job: Job, options: Options) -> Child:
    """Start a run, or go on with it where it has begun."""
    folder = job.folder(options.out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (Note.read(folder) or Note.of(job)).started(options.commit, options.machine).write(folder)
    words = ["run", *options.options, *assigned(options.always)]
    if RunDir(folder).has_begun():
        words += assigned({"resume-from": str(folder)})
    else:
        settings = beside(folder, "toml")
        settings.write_text(tomli_w.dumps(nest(dict(job.settings))), encoding="utf-8")
        own = {"output-dir": str(folder.parent), "run-name": folder.name, **options.at_first}
        words += ["--preset", str(settings), *assigned(own)]
    before = RunDir(folder).summary_version()
    return Child(job, folder, spawn(words, beside(folder, "log")), before)


def assigned(values: Mapping[str, Scalar]) -> list[str]:
    """Return settings as words of a command line."""
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}
    return [word for key, text in texts.items() for word in ("--set", f"{key}={text}")]


def close(child: Child) -> None:
    """Close the pipe by which a run knows that what started it lives."""
    assert child.process.stdin is not None
    child.process.stdin.close()
