"""The search of a row's rate: which rates are tried, what they came to, and its record.

Each row is tried at the same few rates. While the best one is the lowest or the highest of those that were tried, the next one
beyond it is tried too (definition.Search.further), so that a row's figure is that of its best rate and not of an edge.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Place, rates_of, reach_of, reachable_jobs, search_jobs
from benchmarks.claims.records import SearchRecord
from benchmarks.claims.results import joined, on_a_core
from piecework.server_app.records import CheckpointError, RunDir
from piecework.studies.notes import Note, state_of
from piecework.studies.results import last_accuracy
from piecework.training.settings import Settings

Figures = dict[float, float | None]  # the accuracy of each rate that was tried, None for one whose run failed


def best_rate(figures: Mapping[float, float | None]) -> float | None:
    """Return the rate with the highest accuracy, the first of equals; None if no run of the search ended with one."""
    known = {rate: accuracy for rate, accuracy in figures.items() if accuracy is not None}
    return max(known, key=lambda rate: known[rate], default=None)


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


def search_figures(claim: Claim, place: Place, out: Path) -> Figures:
    """Return the figures of the runs of a search that have ended below `out`.

    Raises CheckpointError if the records of one of them are damaged.
    """
    found: Figures = {}
    for job in reachable_jobs(claim, place):
        folder = job.folder(out)
        state = state_of(folder)
        if state in ("done", "failed"):
            assert job.rate is not None
            found[job.rate] = last_accuracy(folder, claim.measure) if state == "done" else None
    return found


def figures_or_damage(claim: Claim, place: Place, out: Path) -> tuple[Figures, str]:
    """Return the figures of a search below `out`; none where a damage leaves its result open, and which one."""
    try:
        return search_figures(claim, place, out), ""
    except CheckpointError as error:
        return {}, str(error)


def search_record(claim: Claim, place: Place, out: Path, old: SearchRecord | None = None) -> SearchRecord | None:
    """Return the record of a search, or None until it has ended: what the `old` one has, and what was tried more below `out`.

    A rate of the old one stays as it is, because on another processor the same run comes to another figure.
    Raises CheckpointError.
    """
    kept, here = {} if old is None else old.figures, search_figures(claim, place, out)
    if old is not None and not here.keys() - kept.keys():
        return old
    figures = dict(sorted({**here, **kept}.items()))
    if untried(claim, place, figures):
        return None
    jobs = search_jobs(claim, place, figures)
    own = [job for job in jobs if job.rate not in kept]
    notes = [note for job in own if (note := Note.read(job.folder(out))) is not None]
    seconds = [RunDir(job.folder(out)).seconds() for job in own]
    on_core = on_a_core(seconds, [note.share for note in notes])
    commits, machines = ([text for note in notes for text in getattr(note, key)] for key in ("commits", "machines"))
    if old is not None:
        commits, machines, seconds = [old.commit, *commits], [old.machine, *machines], [old.seconds, *seconds]
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
    """Return whether a search has the settings that the definition gives. Further rates may still have to be tried."""
    rates = reach_of(claim, claim.row(place[1]))
    return record.figures.keys() <= set(rates) and record.hash == search_hash(claim, place, record.figures)
