"""What is missing of the claims, and how many hours of a core it will take, from the rounds that there are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.claims.definition import Claim, Row
from benchmarks.claims.jobs import Job, Wanted, folders, job_of, possible, reachable_jobs, searches, wanted
from benchmarks.claims.recorded import Recorded
from benchmarks.claims.records import DOCS
from benchmarks.claims.search import figures_so_far, found_rate, jobs_to_run
from benchmarks.claims.standings import cannot_train
from piecework.server_app.records import RunDir
from piecework.studies.notes import Note, NoteError, State, damage_beside, state_of
from piecework.studies.pace import Pace, Seen, look_at, pace_of, seconds_left
from piecework.training.settings import Settings

STATES: tuple[State, ...] = ("recorded", "done", "running", "failed", "broken", "damaged", "begun", "missing")


ENDED: tuple[State, ...] = ("recorded", "done", "failed", "damaged")


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
        found = {place: figures_so_far(claim, place, out, self.recorded.figures(place)) for place in searches(claim)}
        self.damage = [damage for _, damage in found.values() if damage]
        self.rates = {place: found_rate(claim, place, figures) for place, (figures, _) in found.items()}
        self.searched = {place: jobs_to_run(claim, place, figures) for place, (figures, _) in found.items()}
        self.wanted = {want: self._jobs_of(want) for each in wanted(claim) for want in each}
        self.seen: dict[str, Seen] = {}

    def state(self, job: Job) -> State:
        """Return the state of a run; one of a recorded search is recorded."""
        return "recorded" if self.recorded.has(job) else state_of(job.folder(self.out))

    def _jobs_of(self, want: Wanted) -> list[Job]:
        """Return the run, or, until its rate is known, the run with each rate that may be chosen."""
        rate = None if want.source is None else self.rates[want.source]
        return possible(self.claim, want) if want.source and rate is None else [job_of(self.claim, want, rate)]

    def known(self) -> set[str]:
        """Return the folders that runs of the definition have."""
        jobs = [job for place in self.searched for job in reachable_jobs(self.claim, place)]
        jobs += [job for each in self.wanted.values() for job in each]
        return {str(job.folder(self.out)) for job in jobs}

    def look(self, job: Job) -> Seen:
        """Return what there is of a run, with its share of a core."""
        folder = job.folder(self.out)
        if str(folder) not in self.seen:
            self.seen[str(folder)] = look_at(folder, share_of(folder))
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
    except NoteError:  # which the status names
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
    """Return the run that is recorded, or the one with the most rounds."""
    return (
        jobs[0] if len(jobs) == 1 else max(jobs, key=lambda job: (watch.recorded.has(job), len(watch.look(job).rounds)))
    )
