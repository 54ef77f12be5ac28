"""Merge the results of finished runs into the records of the claims."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.claims.definition import Claim, ClaimError
from benchmarks.claims.jobs import Wanted, folders, possible, reachable_jobs, searches, wanted
from benchmarks.claims.records import Records, RunRecord, SearchRecord, written
from benchmarks.claims.results import run_record
from benchmarks.claims.search import best_or_first, figures_of, search_record
from benchmarks.claims.standings import current_searches
from piecework.server_app.records import CheckpointError, RunDir
from piecework.studies.notes import Note, NoteError, state_of

Say = Callable[[str], None]


@dataclass
class Merge:
    """The records of a claim while others are added to them."""

    claim: Claim
    say: Say
    runs: dict[tuple[str, str, int], RunRecord] = field(default_factory=dict)
    searches: dict[tuple[str, str], SearchRecord] = field(default_factory=dict)

    def tell(self, what: str, *words: object) -> None:
        """Say what is done with a record."""
        self.say(f"{what:9s} {': '.join(map(str, (self.claim.name, *words)))}")

    def add(self, kept: dict[Any, Any], key: Any, record: RunRecord | SearchRecord, name: str) -> None:
        """Keep a record; one of a completed run is not replaced by one of a run that failed."""
        old, where = kept.get(key), (record.case, record.row, name)
        if old is not None and written(old) == written(record):
            return
        if isinstance(record, RunRecord) and record.status == "failed" and old is not None and old.status != "failed":
            return self.tell("left out", *where, "it failed, and the records have a run that has completed")
        self.tell("added" if old is None else "replaced", *where, outcome(record))
        kept[key] = record


def outcome(record: RunRecord | SearchRecord) -> str:
    """Return what a run or a search came to, in words."""
    if isinstance(record, SearchRecord):
        return "all rates failed" if record.chosen is None else f"rate {record.chosen:g}"
    if record.status == "failed":
        return f"failed: {record.reason}"
    return "never evaluated" if record.mean_last is None else f"{record.mean_last:.2%}"


def collect(claim: Claim, out: Path, docs: Path, say: Say) -> Records:
    """Merge what lies below `out` into the claim's records below `docs`, and write them; `say` is told each change.

    Records of another definition are removed: the file has those of the present one. Raises ClaimError.
    """
    old = Records.read(claim.name, docs)
    merge = Merge(
        claim,
        say,
        {(each.case, each.row, each.seed): each for each in old.runs},
        {(each.case, each.row): each for each in old.searches},
    )
    usable = current_searches(claim, old)
    for place in searches(claim):
        try:
            record = search_record(claim, place, out, usable.get(place))
        except CheckpointError as error:
            merge.tell("left out", *place, "search", error)
            continue
        if record is not None:
            merge.add(merge.searches, place, record, "search")
        elif any(state_of(job.folder(out)) != "missing" for job in reachable_jobs(claim, place)):
            merge.tell("left out", *place, "search", "not all of its runs have ended")
    remove_others(merge)
    for folder in folders(out, claim.name):
        add_run(merge, folder)
    found = Records(claim.name, [*merge.runs.values()], [*merge.searches.values()])
    if found != old:
        found.write(claim, docs)
    return found


def remove_others(merge: Merge) -> None:
    """Remove the records of other definitions, and those of runs with another rate than the search has found."""
    kept = current_searches(merge.claim, Records(merge.claim.name, [], [*merge.searches.values()]))
    for place in [each for each in merge.searches if each not in kept]:
        merge.tell("removed", *place, "search", "of another definition")
        del merge.searches[place]
    for key, record in [*merge.runs.items()]:
        if why := wrong(merge, record.case, record.row, record.seed, record.hash):
            merge.tell("removed", record.case, record.row, f"seed {record.seed}", why)
            del merge.runs[key]


def wrong(merge: Merge, case: str, row: str, seed: int, hash: str) -> str:
    """Return why a run is not one of the definition's; empty if it is."""
    wants = [
        each
        for of_seed in wanted(merge.claim)
        for each in of_seed
        if (each.case, each.row, each.seed) == (case, row, seed)
    ]
    if not wants:
        return "of another definition, which had such a run"
    (want,) = wants
    jobs = {job.hash: job for job in possible(merge.claim, want)}
    if hash not in jobs:
        return "of another definition"
    right = rate_of(merge, want)
    return "" if right in (None, jobs[hash].rate) else f"its rate is not the {right:g} that the search has found"


def rate_of(merge: Merge, want: Wanted) -> float | None:
    """Return the rate that the recorded search found for a run; None if there is no such search."""
    if want.source is None or (search := merge.searches.get(want.source)) is None:
        return None
    return best_or_first(merge.claim, want.source, figures_of(merge.claim, want.source, search))


def add_run(merge: Merge, folder: Path) -> None:
    """Add the record of a run in a folder, or say why not."""
    try:
        note = Note.read(folder)
    except NoteError as error:
        return merge.tell("left out", error)
    if note is None:
        return merge.tell("left out", folder, "nothing notes beside it which run it is")
    if note.job["searched"]:
        if note.job["hash"] not in {j.hash for p in searches(merge.claim) for j in reachable_jobs(merge.claim, p)}:
            merge.tell("left out", note.job["case"], note.job["row"], folder.name, "of another definition")
        return None
    where = note.job["case"], note.job["row"], f"seed {note.job['seed']}"
    if why := wrong(merge, note.job["case"], note.job["row"], note.job["seed"], note.job["hash"]):
        return merge.tell("left out", *where, why)
    state = state_of(folder)
    if state == "broken":
        return merge.tell("left out", *where, f"its failure is no result ({note.failed}); `run --retry` tries it again")
    if state not in ("done", "failed"):
        return merge.tell("left out", *where, f"not ended, after round {RunDir(folder).last_complete_round()}")
    try:
        record = run_record(merge.claim, folder, note)
    except (CheckpointError, ClaimError) as error:
        return merge.tell("left out", *where, error)
    merge.add(merge.runs, (note.job["case"], note.job["row"], note.job["seed"]), record, f"seed {note.job['seed']}")
    return None
