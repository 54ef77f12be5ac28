"""What is missing of the claims, and how many hours of a core it will take, from the rounds that there are.

Rounds are taken to be of equal length. Those of a cascade's stages are not, so that its estimate is rough until a run has
completed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.claims.definition import Claim, ClaimError, Row
from benchmarks.claims.jobs import Job, Place, Wanted, job_of, possible, search_jobs, searches, wanted
from benchmarks.claims.notes import Note, State, damage_beside, folders, state_of
from benchmarks.claims.recorded import Recorded
from benchmarks.claims.records import DOCS
from benchmarks.claims.results import rate_or_damage
from benchmarks.claims.standings import cannot_train
from piecework.report.read_records import Record
from piecework.server_app.records import RunDir
from piecework.server_app.run_folder import has_completed
from piecework.training.settings import Settings

STATES: tuple[State, ...] = ("recorded", "done", "running", "failed", "broken", "damaged", "begun", "missing")


ENDED: tuple[State, ...] = ("recorded", "done", "failed", "damaged")


@dataclass(frozen=True)
class Pace:
    """A core's seconds of a round without and with an evaluation (None: none was seen), and of what a run does besides."""

    plain: float
    evaluated: float | None
    beside: float = 0.0


@dataclass(frozen=True)
class Seen:
    """What was seen of a run: its rounds, and the seconds that it took besides them, None unless it has completed.

    `share` is how much of a core its processes had (notes.py): seconds times it are those on a core of its own.
    """

    rounds: Sequence[Record]
    beside: float | None = None
    share: float = 1.0


def pace_of(runs: Iterable[Seen]) -> Pace | None:
    """Return the pace of runs of one row on a core of their own, None without a round.

    Each run's first round, which also traces the model, counts only where there is no other. Where every round was evaluated,
    the others are taken to be as long.
    """
    found = list(runs)
    later = [(run, record) for run in found for record in run.rounds[1:]] or [
        (r, each) for r in found for each in r.rounds
    ]
    plain = [run.share * record["seconds"] for run, record in later if record["accuracy"] is None]
    evaluated = [run.share * record["seconds"] for run, record in later if record["accuracy"] is not None]
    if not later:
        return None
    beside = [run.share * run.beside for run in found if run.beside is not None]
    return Pace(fmean(plain or evaluated), fmean(evaluated) if evaluated else None, fmean(beside) if beside else 0.0)


def seconds_left(settings: Settings, done: int, pace: Pace) -> float:
    """Return the seconds that a run with these settings takes after its first `done` rounds.

    Where no evaluation was seen, rounds with one are counted as others.
    """
    to_come = range(done + 1, settings.num_rounds + 1)
    due = sum(map(settings.evaluation_due, to_come))
    evaluated = pace.plain if pace.evaluated is None else pace.evaluated
    return (len(to_come) - due) * pace.plain + due * evaluated + pace.beside


@dataclass
class RowStatus:
    """The runs of a row by their states, those of its searches too. `hours` are None where no round was seen yet.

    Those that are broken count as to be tried again.

    `unknown` are the runs of which nothing says how long they take, `unevaluated` those of which nothing says how long an
    evaluation does, so that it is not in the hours. `untrainable` are those that failed because no client can train.
    """

    row: str
    counts: dict[State, int]
    hours: float | None
    unknown: int
    unevaluated: int
    untrainable: int


@dataclass
class ClaimStatus:
    """The rows of a claim.

    `older`: folders of runs that are not the definition's, or not any more. `damage`: what is damaged, a sentence each.
    """

    claim: str
    rows: list[RowStatus]
    older: list[str]
    damage: list[str]

    @property
    def hours(self) -> float:
        """The hours that are known to be left."""
        return sum(row.hours or 0.0 for row in self.rows)

    @property
    def unknown(self) -> int:
        """How many runs are of unknown length."""
        return sum(row.unknown for row in self.rows)

    @property
    def unevaluated(self) -> int:
        """For how many runs evaluations are not in the hours."""
        return sum(row.unevaluated for row in self.rows)

    def to_values(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        return {**asdict(self), "hours": self.hours, "unknown": self.unknown, "unevaluated": self.unevaluated}


class Watch:
    """What lies below `out` of a claim, read once."""

    def __init__(self, claim: Claim, out: Path, records: Path) -> None:
        self.claim, self.out, self.recorded = claim, out, Recorded.of(claim, records)
        self.searched = {place: search_jobs(claim, place) for place in searches(claim)}
        found = {place: self._rate(place) for place in self.searched}
        self.rates = {place: rate for place, (rate, _) in found.items()}
        self.damage = [damage for _, damage in found.values() if damage]
        self.wanted = {want: self._jobs_of(want) for each in wanted(claim) for want in each}
        self.seen: dict[str, Seen] = {}

    def _rate(self, place: Place) -> tuple[float | None, str]:
        recorded = self.recorded.rate(place)
        return rate_or_damage(self.claim, place, self.out) if recorded is None else (recorded, "")

    def state(self, job: Job) -> State:
        """Return the state of a run; one of a recorded search is recorded."""
        recorded = self.recorded.run(job) if not job.searched else self.recorded.searches.get(job.place)
        return state_of(job.folder(self.out)) if recorded is None else "recorded"

    def _jobs_of(self, want: Wanted) -> list[Job]:
        """Return the run, or, until its rate is known, the run with each rate that may be chosen."""
        rate = None if want.source is None else self.rates[want.source]
        return possible(self.claim, want) if want.source and rate is None else [job_of(self.claim, want, rate)]

    def known(self) -> set[str]:
        """Return the folders that runs of the definition have."""
        jobs = [job for each in self.searched.values() for job in each]
        jobs += [job for each in self.wanted.values() for job in each]
        return {str(job.folder(self.out)) for job in jobs}

    def look(self, job: Job) -> Seen:
        """Return what there is of a run: its rounds before any damage."""
        folder = job.folder(self.out)
        if str(folder) not in self.seen:
            run_dir = RunDir(folder)
            rounds, _ = run_dir.readable_rounds()
            inside = sum(record["seconds"] for record in rounds)
            beside = max(0.0, run_dir.seconds() - inside) if has_completed(run_dir) else None
            self.seen[str(folder)] = Seen(rounds, beside, share_of(folder))
        return self.seen[str(folder)]

    def pace(self, job: Job) -> Pace | None:
        """Return the pace that a run is expected to have, from the nearest runs that have a round; None if none has.

        They are the run itself, then other seeds of its row in its case, then the row's search, then the row in other cases;
        then, in the same order, what the records have.
        """
        row = [each for want, jobs in self.wanted.items() if want.row == job.row for each in jobs]
        tried = [each for place, jobs in self.searched.items() if place[1] == job.row for each in jobs]
        near = [[job]]
        for here in (True, False):
            near += [[each for each in group if (each.case == job.case) is here] for group in (row, tried)]
        if job.searched:  # other rates are nearer to it than other seeds
            near[1], near[2] = near[2], near[1]
        found = next((pace for group in near if (pace := pace_of(map(self.look, group))) is not None), None)
        return found or self._recorded_pace(job)

    def _recorded_pace(self, job: Job) -> Pace | None:
        for case in (job.case, None):
            if seconds := [*self.recorded.seconds_of_rounds(job.row, case)]:
                return Pace(fmean(seconds), fmean(seconds))
        return None


def share_of(folder: Path) -> float:
    """Return how much of a core a run's processes had; 1 where nothing noted it."""
    try:
        note = Note.read(folder)
    except ClaimError:  # which the status names
        return 1.0
    return (note and note.share) or 1.0


def status_of(claim: Claim, out: Path, records: Path = DOCS) -> ClaimStatus:
    """Return what is done and what is missing of a claim, below `out` and in `records`.

    Raises ClaimError or CheckpointError.
    """
    watch = Watch(claim, out, records)
    known = watch.known()
    older = [str(folder) for folder in folders(out, claim.name) if str(folder) not in known]
    rows = [row_status(watch, row) for row in claim.rows]
    return ClaimStatus(claim.name, rows, older, watch.damage)


def row_status(watch: Watch, row: Row) -> RowStatus:
    """Return the status of a row's runs."""
    runs = [job for place, jobs in watch.searched.items() if place[1] == row.name for job in jobs]
    runs += [most_advanced(watch, jobs) for want, jobs in watch.wanted.items() if want.row == row.name]
    counts, seconds, unknown, unevaluated, untrainable = dict.fromkeys(STATES, 0), 0.0, 0, 0, 0
    for job in runs:
        state = watch.state(job)
        counts[state] += 1
        watch.damage += filter(None, [damage_beside(job.folder(watch.out))])
        if state in ENDED:
            untrainable += state == "failed" and is_idle(watch, job)
            continue
        pace = watch.pace(job)
        unknown += pace is None
        unevaluated += pace is not None and pace.evaluated is None
        done = RunDir(job.folder(watch.out)).last_complete_round()
        seconds += 0.0 if pace is None else seconds_left(Settings.from_run_config(job.settings), done, pace)
    timed = sum(counts.values()) - sum(counts[state] for state in ENDED) > unknown
    hours = seconds / 3600 if timed or not unknown else None
    return RowStatus(row.name, counts, hours, unknown, unevaluated, untrainable)


def is_idle(watch: Watch, job: Job) -> bool:
    """Return whether no client could train in a run that failed, by the rule of the claims' pages."""
    note = Note.read(job.folder(watch.out))
    trained = any(record["answered"] for record in watch.look(job).rounds)
    return note is not None and not trained and cannot_train(note.failed)


def most_advanced(watch: Watch, jobs: Sequence[Job]) -> Job:
    """Return the run with the most rounds."""
    return jobs[0] if len(jobs) == 1 else max(jobs, key=lambda job: len(watch.look(job).rounds))
