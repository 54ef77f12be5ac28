"""What the committed records have of the present definition: what was run elsewhere, and is not repeated here."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Place, search_jobs, searches
from benchmarks.claims.records import DOCS, Records, RunRecord, SearchRecord
from benchmarks.claims.results import search_hash


@dataclass(frozen=True)
class Recorded:
    """The searches of the present definition by their places, and the runs by case, row, seed and hash."""

    searches: dict[Place, SearchRecord] = field(default_factory=dict)
    runs: dict[tuple[str, str, int, str], RunRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, claim: Claim, docs: Path = DOCS) -> Self:
        """Read the records of a claim below `docs`. Raises ClaimError."""
        records = Records.read(claim.name, docs)
        hashes = {place: search_hash([job.hash for job in search_jobs(claim, place)]) for place in searches(claim)}
        return cls(
            {
                (each.case, each.row): each
                for each in records.searches
                if hashes.get((each.case, each.row)) == each.hash
            },
            {(each.case, each.row, each.seed, each.hash): each for each in records.runs},
        )

    def rate(self, place: Place) -> float | None:
        """Return the rate that a recorded search has found, the first one if all its runs failed; None without a record."""
        search = self.searches.get(place)
        return None if search is None else search.chosen or float(next(iter(search.rates)))

    def run(self, job: Job) -> RunRecord | None:
        """Return the record of a run with a seed, None without one."""
        return None if job.searched else self.runs.get((job.case, job.row, job.seed, job.hash))

    def seconds_of_rounds(self, row: str, case: str | None) -> Iterator[float]:
        """Yield the core's seconds of a round in each recorded run and search of a row, in a case or (None) in any."""
        for search in self.searches.values():
            if search.core_seconds and search.row == row and case in (None, search.case):
                yield search.core_seconds / (search.rounds * len(search.rates))
        for run in self.runs.values():
            if run.core_seconds and run.rounds and run.row == row and case in (None, run.case):
                yield run.core_seconds / run.rounds
