"""What is done and what is missing of a study, and how long it will take."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecework.server_app.records import RunDir
from piecework.studies.notes import Note, NoteError, State, beside, state_of
from piecework.studies.pace import Pace, in_words, look_at, pace_of, seconds_left
from piecework.studies.study import Study, StudyJob
from piecework.training.settings import Settings

OPEN: tuple[State, ...] = ("running", "begun", "missing")
FAILED: tuple[State, ...] = ("failed", "broken", "damaged")
NAMES = {"begun": "interrupted", "broken": "failed", "damaged": "failed"}  # as users read a state


@dataclass(frozen=True)
class RunStatus:
    """A run of a study: its state, why it failed, its rounds so far and in all, the seconds left (None: nothing says it)."""

    job: StudyJob
    folder: Path
    state: State
    reason: str
    rounds: int
    of: int
    left: float | None
    evaluated: bool

    @property
    def shown(self) -> str:
        """The state as users read it."""
        return NAMES.get(self.state, self.state)

    @property
    def why(self) -> str:
        """Why there is no result of it: the reason of a failure, else how far it is."""
        if self.state in FAILED:
            return self.reason
        return f"after round {self.rounds} of {self.of}" if self.rounds else "no round of it is finished"

    @property
    def log(self) -> Path:
        """The file with what its processes printed, which is there once it was started."""
        return beside(self.folder, "log")

    def to_values(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "row": self.job.row.label,
            "seed": self.job.seed,
            "state": self.shown,
            "reason": self.reason,
            "rounds": self.rounds,
            "run_dir": str(self.folder) if RunDir(self.folder).has_begun() else None,
        }


@dataclass(frozen=True)
class StudyStatus:
    """The runs of a study, in the order in which they are started."""

    runs: Sequence[RunStatus]

    def count(self, *states: State) -> int:
        """Return how many runs are in one of these states."""
        return sum(run.state in states for run in self.runs)

    @property
    def failed(self) -> list[RunStatus]:
        """The runs that failed."""
        return [run for run in self.runs if run.state in FAILED]

    @property
    def without_result(self) -> list[RunStatus]:
        """The runs that are not done, those that failed first."""
        return sorted((run for run in self.runs if run.state != "done"), key=lambda run: run.state not in FAILED)

    @property
    def hours(self) -> float | None:
        """The hours that are known to be left; None if nothing is known of any run."""
        known = [run.left for run in self.runs if run.left is not None]
        return sum(known) / 3600 if known or not self.count(*OPEN) else None

    @property
    def unknown(self) -> int:
        """Of how many runs nothing says how long they take."""
        return sum(run.state in OPEN and run.left is None for run in self.runs)

    @property
    def unevaluated(self) -> int:
        """For how many runs evaluations are not in the hours."""
        return sum(run.left is not None and not run.evaluated for run in self.runs)

    def __str__(self) -> str:
        counts = [f"{self.count('done')} of {len(self.runs)} runs done"]
        named: dict[str, tuple[State, ...]] = {"running": ("running",), "interrupted": ("begun",), "failed": FAILED}
        named["missing"] = ("missing",)
        counts += [f"{count} {name}" for name, states in named.items() if (count := self.count(*states))]
        if self.count(*OPEN):
            counts += [in_words(self.hours, self.unknown, self.unevaluated)]
        return ", ".join(counts)

    def to_values(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        counts: dict[str, tuple[State, ...]] = {
            "done": ("done",),
            "failed": FAILED,
            "running": ("running",),
            "interrupted": ("begun",),
        }
        return {
            "status": "completed"
            if self.count("done") == len(self.runs)
            else "failed"
            if self.failed
            else "unfinished",
            **{name: self.count(*states) for name, states in counts.items()},
            "missing": self.count("missing"),
            "hours_left": self.hours,
            "of_unknown_length": self.unknown,
            "runs": [run.to_values() for run in self.runs],
        }


def status_of(study: Study, folder: Path) -> StudyStatus:
    """Return what is done and what is missing of a study."""
    jobs = study.jobs()
    seen = {job.hash: look_at(job.folder(folder)) for job in jobs}
    found = []
    for job in jobs:
        path, total = job.folder(folder), Settings.from_run_config(job.settings).num_rounds
        state, done, left, pace = state_of(path), RunDir(path).last_complete_round(), None, None
        if state in OPEN:
            near = [job], [each for each in jobs if each.row == job.row], [each for each in jobs if is_like(each, job)]
            pace = next(filter(None, (pace_of(seen[each.hash] for each in group) for group in near)), None)
            left = None if pace is None else seconds_left(Settings.from_run_config(job.settings), done, pace)
        found.append(RunStatus(job, path, state, reason_of(path, state), done, total, left, _knows(pace)))
    return StudyStatus(found)


def is_like(job: StudyJob, other: StudyJob) -> bool:
    """Return whether two runs are of the same system, so that one says how long the other takes, if nothing nearer does."""
    return job.row.strategy == other.row.strategy


def _knows(pace: Pace | None) -> bool:
    return pace is not None and pace.evaluated is not None


def reason_of(folder: Path, state: State) -> str:
    """Return why a run failed; nothing if it did not."""
    try:
        note = Note.read(folder)
    except NoteError as error:
        return str(error)
    return note.failed if note is not None and state in FAILED else ""
