"""Carry out a study: start what is missing, and show how far it is."""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from piecework import __version__
from piecework.commands.console import PlainConsole
from piecework.server_app.records import CheckpointError, RunDir
from piecework.studies.notes import State, this_machine
from piecework.studies.queue import Options, Queue, Words
from piecework.studies.runner import carry_out
from piecework.studies.status import StudyStatus, status_of
from piecework.studies.study import FREE, Study, StudyPlan
from piecework.training.settings import Scalar, SettingsError

BAR = 16  # columns
LOOK = 30.0  # seconds after which the time left is estimated anew during a run
RETRIED: tuple[State, ...] = ("broken",)  # what failed without a result may complete now


def go_on(
    folder: Path,
    study: Study,
    console: PlainConsole | None,
    *,
    given: Mapping[str, Scalar],
    options: tuple[str, ...] = (),
) -> StudyStatus:
    """Start what a study is missing and go on with what was interrupted, and return its status.

    The console shows a line where a run starts and ends, and on a terminal a bar; None shows nothing. Of the settings that were
    `given` now, resumed runs have those that say how they are carried out. `options` are further words of each command line.
    Raises SettingsError for a study on a SuperLink that is to go on without one.
    """
    require_its_nodes(folder, study, options)
    study.write(folder)
    words = Words(
        starter="the study",
        command=command_of(folder, options),
        retry="to try it again, remove its folder and the note beside it (.json)",
    )
    of_runs = Options(
        out=folder,
        retry=RETRIED,
        always={key: value for key, value in given.items() if key in FREE and key != "data-dir"},
        options=options,
        commit=f"piecework {__version__}",
        machine=this_machine(),
        keeps_models=True,  # they are results, which `evaluate --client` and `export --client` take
        words=words,
    )
    with StudyProgress(study, folder, console) as progress:
        carry_out(StudyPlan(study), of_runs, progress.say, progress.watch)
    return status_of(study, folder)


def require_its_nodes(folder: Path, study: Study, options: Sequence[str]) -> None:
    """Raise SettingsError if a run of the study had the nodes of a SuperLink, and `options` name none.

    That run would be refused; those that have not begun would have emulated clients, and be compared with it.
    """
    if "--superlink" in options:
        return
    for run in (RunDir(job.folder(folder)) for job in study.jobs()):
        with suppress(CheckpointError):  # of a run that is missing or damaged, of which the queue speaks
            if address := run.settings().get("run.superlink"):
                raise SettingsError(
                    f"{run.path} had the clients of the SuperLink {address}, whose data and devices are not here: go on with "
                    f"the study by --superlink {address}, and --root-certificates or --insecure"
                )


def command_of(folder: Path, options: Sequence[str] = ()) -> str:
    """Return the command that goes on with a study, with the options that its runs were given."""
    return shlex.join(["piecework", "run", "--study", str(folder), *options])


class StudyProgress:
    """Shows a study on a console: a line where a run starts and ends, and on a terminal a bar of rounds."""

    def __init__(self, study: Study, folder: Path, console: PlainConsole | None) -> None:
        self.study, self.folder, self.console = study, folder, console
        self.rounds, self.looked = -1, -math.inf
        self.status: StudyStatus | None = None
        live = console is not None and console.is_terminal and not console.is_dumb_terminal
        columns = BarColumn(BAR), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
        self.bar = Progress(*columns, console=console) if live else None
        self.task = self.bar.add_task("", total=1) if self.bar is not None else None

    def __enter__(self) -> "StudyProgress":
        if self.bar is not None:
            self.bar.start()
        if self.console is not None:
            self._print(f"study {self.folder}: {self._look()}")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """Print what the queue says, and how far the study is where that has changed by the end of a run."""
        self._print(text)
        if self.console is not None and not text.endswith((" starts", " goes on")):
            before, now = self.status, self._look()
            if before is None or str(before) != str(now):
                self._print(str(now))

    def watch(self, queue: Queue) -> None:
        """Move the bar where a run has another round."""
        if self.bar is None or self.task is None or not queue.children:
            return
        rounds = sum(RunDir(child.folder).last_complete_round() for child in queue.children)
        if rounds != self.rounds:
            late = time.monotonic() - self.looked > LOOK
            status = self._look() if self.status is None or late else self.status
            self.rounds = rounds
            now = queue.children[0]
            done = rounds + sum(run.rounds for run in status.runs if run.folder != now.folder)
            text = f"{now.job.label} round {RunDir(now.folder).last_complete_round()}: {status}"
            self.bar.update(self.task, completed=done, total=sum(run.of for run in status.runs), description=text)

    def _look(self) -> StudyStatus:
        """Look how far the study is, which reads the records of all its runs."""
        self.status, self.looked = status_of(self.study, self.folder), time.monotonic()
        return self.status

    def _print(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False, soft_wrap=True)
