"""The search of a row's rate: which rates are tried, what they came to, and its record.

Each row is tried at the same few rates. While the best one is the lowest or the highest of those that were tried, the next one
beyond it is tried too (definition.Search.further), so that a row's figure is that of its best rate and not of an edge.
"""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Place, rates_of, reach_of, reachable_jobs, search_jobs
from benchmarks.claims.records import SearchRecord, rounded
from benchmarks.claims.results import joined, on_a_core
from piecework.server_app.records import CheckpointError, RunDir
from piecework.studies.notes import Note, state_of
from piecework.studies.results import last_accuracy
from piecework.training.settings import Settings

Figures = dict[float, float | None]  # the accuracy of each rate that was tried, None for one whose run failed


def best_rate(figures: Mapping[float, float | None]) -> float | None:
    """Return the rate with the highest accuracy, the lowest of equals; None if no run of the search ended with one."""
    known = {rate: accuracy for rate, accuracy in figures.items() if accuracy is not None}
    return max(sorted(known), key=lambda rate: known[rate], default=None)


def untried(claim: Claim, place: Place, figures: Figures) -> list[float]:
    """Return the rates that a search has still to try, none if it has ended.

    The row's own rates come first, then the neighbours of the best one; if all have failed, those of the lowest.
    """
    row = claim.row(place[1])
    if first := [rate for rate in rates_of(claim, row) if rate not in figures]:
        return first
    reach, best = reach_of(claim, row), best_rate(figures)
    at = reach.index(min(figures) if best is None else best)
    return [rate for rate in reach[max(0, at - 1) : at + 2] if rate not in figures]


def found_rate(claim: Claim, place: Place, figures: Figures) -> float | None:
    """Return the rate that a search has found, None until it has ended.

    Where all its runs failed that is the row's first one, with which its own runs say why it cannot train.
    """
    return None if untried(claim, place, figures) else best_or_first(claim, place, figures)


def best_or_first(claim: Claim, place: Place, figures: Figures) -> float:
    """Return the best rate that was tried, the row's first one if all have failed."""
    return best_rate(figures) or rates_of(claim, claim.row(place[1]))[0]


def search_figures(claim: Claim, place: Place, out: Path, known: Collection[float] = ()) -> Figures:
    """Return the figures of the runs of a search that have ended below `out`, with the digits that the records have.

    Those with the `known` rates are not read. Raises CheckpointError if the records of one of them are damaged.
    """
    found: Figures = {}
    for job in reachable_jobs(claim, place):
        assert job.rate is not None
        folder = job.folder(out)
        if job.rate not in known and (state := state_of(folder)) in ("done", "failed"):
            found[job.rate] = rounded(last_accuracy(folder, claim.measure)) if state == "done" else None
    return found


def figures_so_far(claim: Claim, place: Place, out: Path, recorded: Figures) -> tuple[Figures, str]:
    """Return the figures of a search in the records and below `out`, of which the records' count; and what is damaged.

    Where something is damaged of a search that has not ended in the records, only theirs are known.
    """
    if not untried(claim, place, recorded):
        return recorded, ""
    try:
        return recorded | search_figures(claim, place, out, completed(recorded)), ""
    except CheckpointError as error:
        return recorded, str(error)


def completed(figures: Figures) -> Figures:
    """Return the figures without those of runs that failed."""
    return {rate: figure for rate, figure in figures.items() if figure is not None}


def figures_of(claim: Claim, place: Place, record: SearchRecord | None) -> Figures:
    """Return the figures that a record has of the rates that the definition may try; none without a record."""
    reach = reach_of(claim, claim.row(place[1]))
    return {} if record is None else {rate: figure for rate, figure in record.figures.items() if rate in reach}


def jobs_to_run(claim: Claim, place: Place, figures: Figures) -> list[Job]:
    """Return the runs of a search: those whose figures are known, and those that are still to be tried."""
    return search_jobs(claim, place, sorted([*figures, *untried(claim, place, figures)]))


def search_record(claim: Claim, place: Place, out: Path, old: SearchRecord | None = None) -> SearchRecord | None:
    """Return the record of a search, or None until it has ended: what the `old` one has, and what was tried more below `out`.

    A figure of the old one stays as it is, because on another processor the same run comes to another one; a failure does not.
    To search anew, remove the search's line from the records. Raises CheckpointError.
    """
    kept = figures_of(claim, place, old)
    here = search_figures(claim, place, out, completed(kept))
    if old is not None and all(rate in kept and figure is None for rate, figure in here.items()):
        return old
    figures = dict(sorted({**kept, **here}.items()))
    if untried(claim, place, figures):
        return None
    jobs = search_jobs(claim, place, figures)
    own = [job for job in jobs if job.rate in here]
    notes = [note for job in own if (note := Note.read(job.folder(out))) is not None]
    seconds = [RunDir(job.folder(out)).seconds() for job in own]
    on_core = on_a_core(seconds, [note.share for note in notes])
    commits, machines = ([text for note in notes for text in getattr(note, key)] for key in ("commits", "machines"))
    if old is not None:
        commits, machines = [*old.commit.split("; "), *commits], [*old.machine.split("; "), *machines]
        seconds = [old.seconds, *seconds]
        on_core = None if on_core is None or old.core_seconds is None else old.core_seconds + on_core
    return SearchRecord(
        case=place[0],
        row=place[1],
        hash=search_hash(claim, place, figures),
        commit=joined(commits),
        machine=joined(machines),
        rounds=Settings.from_run_config(jobs[0].settings).num_rounds,
        rates={str(rate): accuracy for rate, accuracy in figures.items()},
        chosen=best_rate(figures),
        seconds=sum(seconds),
        core_seconds=on_core,
    )


def search_hash(claim: Claim, place: Place, rates: Mapping[float, float | None]) -> str:
    """Return eight characters that identify the settings of a search's runs with these rates."""
    hashes = [job.hash for job in search_jobs(claim, place, sorted(rates))]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:8]


def is_current_search(claim: Claim, place: Place, record: SearchRecord) -> bool:
    """Return whether a search has the settings that the definition gives; it may have tried other rates than that would."""
    return record.hash == search_hash(claim, place, record.figures)
