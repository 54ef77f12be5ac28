"""What a claim's records say of each row in each case: its accuracies by seed, its failures, what is still missing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.claims.definition import Case, Claim, Row
from benchmarks.claims.jobs import Place, searches, seed_job, source_of
from benchmarks.claims.records import Records, RunRecord, SearchRecord
from benchmarks.claims.search import is_current_search
from benchmarks.claims.storage import STORAGE
from piecework.studies.failures import DIVERGED

TIME_AT = {storage: 2 + place for place, storage in enumerate(STORAGE)}  # where a curve's points have seconds
MEGABYTES_AT, ACCURACY_AT = 1, -1
LATE = 1.01  # of a time: what takes as long as the row that sets it is judged by its last round too


@dataclass(frozen=True)
class Standing:
    """A row in a case. Accuracies are in percent.

    `runs` have completed; `failed` have not, or no client has trained in them; `missing` are the seeds without a record.
    """

    row: Row
    runs: tuple[RunRecord, ...]
    failed: tuple[RunRecord, ...]
    missing: tuple[int, ...]

    @property
    def by_seed(self) -> dict[int, float]:
        """The mean of the last evaluations, by seed."""
        return {run.seed: 100 * run.mean_last for run in self.runs if run.mean_last is not None}

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; None without a run."""
        return fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds; None with fewer than two."""
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    @property
    def candidate(self) -> bool:
        """Whether the row competes: it is no bound, and no experiment."""
        return self.row.role == "candidate"

    @property
    def untrainable(self) -> bool:
        """Whether no client can train anything in any of its runs."""
        return bool(self.failed) and not self.runs and all(map(is_idle, self.failed))

    @property
    def recorded(self) -> bool:
        """Whether there is a record of it."""
        return bool(self.runs or self.failed)

    def average(self, figure: Callable[[RunRecord], float | None]) -> float | None:
        """Return the mean of a figure over the completed runs; None if one lacks it."""
        values = [figure(run) for run in self.runs]
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else None

    def seconds(self, storage: str) -> float | None:
        """Return the simulated time by which all its seeds are through; None without a run."""
        return max((run.simulated[storage] for run in self.runs), default=None)


def is_idle(run: RunRecord) -> bool:
    """Return whether no client could train in a run, which has completed all the same or has failed for this reason."""
    return not run.ok and (run.status == "completed" or cannot_train(run.reason))


def cannot_train(reason: str) -> bool:
    """Return whether a run that failed for this reason says that no client can train."""
    return "no client" in reason and not reason.startswith(DIVERGED)


def reason_of(run: RunRecord) -> str:
    """Return in a line why a run gave no trained model."""
    if run.status == "completed":
        return "no client could train" if is_idle(run) else "it was never evaluated"
    return next(iter(run.reason.strip().splitlines()), "no reason is recorded")


def standings(claim: Claim, runs: Sequence[RunRecord]) -> dict[str, list[Standing]]:
    """Return the standings by case: the highest accuracy first, then rows that failed, then missing ones.

    `runs` are those that `current` returns.
    """
    return {case.name: standings_in(claim, case, runs) for case in claim.cases}


def standings_in(claim: Claim, case: Case, runs: Sequence[RunRecord]) -> list[Standing]:
    """Return the standings of a case."""
    found = []
    for row in claim.rows:
        if case not in claim.cases_of(row):
            continue
        own = [run for run in runs if (run.case, run.row) == (case.name, row.name)]
        completed = tuple(run for run in own if run.status == "completed" and run.mean_last is not None and run.ok)
        failed = tuple(run for run in own if run not in completed)
        known = {run.seed for run in own}
        found.append(Standing(row, completed, failed, tuple(n for n in claim.seeds_of(case, row) if n not in known)))
    return sorted(found, key=lambda each: (each.mean is None, -(each.mean or 0), not each.failed))


def current(claim: Claim, records: Records) -> list[RunRecord]:
    """Return the records of runs that the definition has, with the settings that it gives, sorted by seed."""
    return sorted((run for run in records.runs if is_current(claim, run)), key=lambda run: run.seed)


def current_searches(claim: Claim, records: Records) -> dict[Place, SearchRecord]:
    """Return the records of the searches that the definition needs, by case and row: those with its settings."""
    found = {(each.case, each.row): each for each in records.searches}
    return {
        place: found[place]
        for place in searches(claim)
        if place in found and is_current_search(claim, place, found[place])
    }


def is_current(claim: Claim, run: RunRecord) -> bool:
    """Return whether the definition has a run of this case, row and seed with the same settings."""
    places = {(case.name, row.name): (case, row) for row in claim.rows for case in claim.cases_of(row)}
    if (run.case, run.row) not in places:
        return False
    case, row = places[run.case, run.row]
    searched = source_of(claim, case, row) is not None
    job = seed_job(claim, case, row, run.seed, run.rate if searched else None)
    return run.seed in claim.seeds_of(case, row) and run.hash == job.hash


def deadlines(found: Iterable[Standing], storage: str) -> list[float]:
    """Return the simulated times at which candidates are compared: the first of them is through, half of them are through.

    Only those in which clients have trained count. The list is empty if there is none, and has one time if both are the same.
    """
    through = sorted(seconds for each in found if each.candidate and (seconds := each.seconds(storage)) is not None)
    return sorted({through[0], through[(len(through) - 1) // 2]}) if through else []


def with_more_rounds(claim: Claim, case: Case, there: Sequence[Standing]) -> list[Standing]:
    """Return the experiments within budgets that have trained for more rounds than the case's, the best first."""
    rounds = {**claim.settings, **case.settings}.get("num-rounds", 0)
    return [
        each
        for each in there
        if each.row.role == "experiment"
        and each.runs
        and each.row.settings.get("memory.enforce", True)
        and each.row.settings.get("num-rounds", 0) > rounds
    ]


def accuracy_at(standing: Standing, storage: str, seconds: float) -> float | None:
    """Return the accuracy in percent of the last evaluations by a simulated time (LATE), the mean over the seeds.

    It is None without a run, or if there was no evaluation by then with one of the seeds.
    """
    return standing.average(lambda run: accuracy_by(run.curve, TIME_AT[storage], seconds))


def accuracy_by(curve: Sequence[Sequence[float]], column: int, limit: float) -> float | None:
    """Return the accuracy in percent at the last point of a curve whose value in a column is no more than the limit (LATE)."""
    past = [100 * point[ACCURACY_AT] for point in curve if point[column] <= LATE * limit]
    return past[-1] if past else None
