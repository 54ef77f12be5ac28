"""What the committed records have of the present definition: what was run elsewhere, and is not repeated here."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Place
from benchmarks.claims.records import DOCS, Records, RunRecord, SearchRecord
from benchmarks.claims.search import Figures, figures_of
from benchmarks.claims.standings import current_searches


@dataclass(frozen=True)
class Recorded:
    """The searches of the present definition and their figures by their places, and the runs by case, row, seed and hash."""

    searches: dict[Place, SearchRecord] = field(default_factory=dict)
    tried: dict[Place, Figures] = field(default_factory=dict)
    runs: dict[tuple[str, str, int, str], RunRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, claim: Claim, docs: Path = DOCS) -> Self:
        """Read the records of a claim below `docs`. Raises ClaimError."""
        records = Records.read(claim.name, docs)
        searches = current_searches(claim, records)
        return cls(
            searches,
            {place: figures_of(claim, place, record) for place, record in searches.items()},
            {(each.case, each.row, each.seed, each.hash): each for each in records.runs},
        )

    def figures(self, place: Place) -> Figures:
        """Return the figures of the rates that a recorded search has tried, none without a record."""
        return self.tried.get(place, {})

    def run(self, job: Job) -> RunRecord | None:
        """Return the record of a run with a seed, None without one."""
        return None if job.searched else self.runs.get((job.case, job.row, job.seed, job.hash))

    def has(self, job: Job) -> bool:
        """Return whether a run is recorded, also one of a search."""
        return job.rate in self.figures(job.place) if job.searched else self.run(job) is not None

    def seconds_of_rounds(self, row: str, case: str | None) -> Iterator[float]:
        """Yield the core's seconds of a round in each recorded run and search of a row, in a case or (None) in any."""
        for search in self.searches.values():
            if search.core_seconds and search.row == row and case in (None, search.case):
                yield search.core_seconds / (search.rounds * len(search.rates))
        for run in self.runs.values():
            if run.core_seconds and run.rounds and run.row == row and case in (None, run.case):
                yield run.core_seconds / run.rounds
