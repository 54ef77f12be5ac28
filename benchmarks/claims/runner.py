"""Run what the claims are missing: a plan for the package's queue, with searches, an order of its own, and the records."""

import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Place, Wanted, in_order, job_of, possible, search_jobs
from benchmarks.claims.recorded import Recorded
from benchmarks.claims.records import DOCS
from benchmarks.claims.search import Figures, figures_so_far, found_rate, jobs_to_run
from piecework.server_app.records import RunDir
from piecework.studies import queue, runner
from piecework.studies.notes import this_machine
from piecework.studies.queue import Queue, Say

ROOT = Path(__file__).resolve().parents[2]
ACCIDENTS = 3  # failures in a row that are no results, after which nothing more is started


@dataclass(frozen=True)
class Options:
    """What is run, and how. `first`: rounds after which a run is stopped, 0 = none; see `to_time`."""

    out: Path
    jobs: int = 1
    only: str = ""
    case: str = ""
    hours: float = math.inf
    first: int = 0
    retry: bool = False
    data_dir: str = ""
    records: Path = DOCS


def run(claims: Sequence[Claim], options: Options, say: Say) -> list[str]:
    """Start what is missing until nothing is, or the hours are over. Returns the labels of the runs that failed now."""
    recorded = {claim.name: Recorded.of(claim, options.records) for claim in claims}
    of_runs = queue.Options(
        out=options.out,
        jobs=options.jobs,
        hours=options.hours,
        first=options.first,
        retry=("failed", "broken") if options.retry else (),
        accidents=ACCIDENTS,
        always={"workers": 1},
        at_first={"training.torch-threads": 1} | ({"data-dir": options.data_dir} if options.data_dir else {}),
        commit=this_commit(),
        machine=this_machine(),
    )
    return runner.carry_out(ClaimsPlan(claims, options, recorded), of_runs, say)


@dataclass
class ClaimsPlan:
    """What is missing of the claims. `recorded` is what their records have, `rates` what searches have found."""

    claims: Sequence[Claim]
    options: Options
    recorded: dict[str, Recorded]
    rates: dict[tuple[str, Place], float | None] = field(default_factory=dict)

    def jobs(self, queue: Queue) -> Iterator[Job]:
        """Yield the runs that could be started now, in order."""
        return to_time(self) if self.options.first else to_finish(self, queue)

    def is_recorded(self, job: Job) -> bool:
        """Return whether the records have a run. A failed one is tried again with `--retry`, a search's with `--first`."""
        recorded = self.recorded[job.claim]
        if job.searched:
            return recorded.has(job) and not self.options.first
        run = recorded.run(job)
        return run is not None and not (run.status == "failed" and self.options.retry)


def to_finish(plan: ClaimsPlan, queue: Queue) -> Iterator[Job]:
    """Yield every run of the claims whose rate is known, in order."""
    rates, asked = plan.rates, set[tuple[str, Place]]()
    for claim, found in in_order(plan.claims, plan.options.only, plan.options.case):
        recorded = plan.recorded[claim.name]
        if not isinstance(found, Wanted):
            if (rate := found_rate(claim, found, recorded.figures(found))) is None:
                yield from jobs_of_search(plan, queue, claim, found)
            else:
                queue.tell(f"{claim.name}: {found[0]}: {found[1]}: search is in the records: rate {rate:g}")
        elif found.source is None:
            yield job_of(claim, found, None)
        else:
            key = claim.name, found.source
            if rates.get(key) is None and key not in asked:
                asked.add(key)
                rates[key] = found_rate(claim, found.source, known_figures(plan, queue, claim, found.source))
            if rates[key] is not None:
                yield job_of(claim, found, rates[key])
            elif not searching(queue, claim, found.source):
                case, row = found.source
                label = possible(claim, found)[0].label
                queue.tell(f"{label} waits for the search of {row!r} in {case!r}, which has not ended")


def jobs_of_search(plan: ClaimsPlan, queue: Queue, claim: Claim, place: Place) -> list[Job]:
    """Return the runs of a search that has not ended in the records: those that it has, and those that it has still to try."""
    return jobs_to_run(claim, place, known_figures(plan, queue, claim, place))


def known_figures(plan: ClaimsPlan, queue: Queue, claim: Claim, place: Place) -> Figures:
    """Return the figures of the rates of a search that were tried, here or in the records; say what is damaged of it."""
    figures, damage = figures_so_far(claim, place, plan.options.out, plan.recorded[claim.name].figures(place))
    if damage:
        queue.tell(f"{claim.name}: the search of {place[1]!r} in {place[0]!r} is open: {damage}")
    return figures


def searching(queue: Queue, claim: Claim, place: Place) -> bool:
    """Return whether a run of a search is running here."""
    jobs = [child.job for child in queue.children if isinstance(child.job, Job)]
    return any(job.searched and job.claim == claim.name and job.place == place for job in jobs)


def to_time(plan: ClaimsPlan) -> Iterator[Job]:
    """Yield one run of each row in each case, if none has `Options.first` rounds yet: with the middle one of its rates."""
    seen: set[tuple[str, Place]] = set()
    for claim, found in in_order(plan.claims, plan.options.only, plan.options.case):
        jobs = possible(claim, found) if isinstance(found, Wanted) else search_jobs(claim, found)
        key = claim.name, jobs[0].place
        if key not in seen:
            seen.add(key)
            timed = any(plan.recorded[claim.name].seconds_of_rounds(jobs[0].row, jobs[0].case))
            if not (timed or any(rounds_of(job, plan.options.out) >= plan.options.first for job in jobs)):
                yield jobs[len(jobs) // 2]  # the middle one of the rates


def rounds_of(job: Job, out: Path) -> int:
    """Return how many rounds a run has completed."""
    return RunDir(job.folder(out)).last_complete_round()


def this_commit() -> str:
    """Return the commit of this checkout, `+changes` if code or presets differ from it, `unknown` outside of one."""
    found = _git("rev-parse", "--short=10", "HEAD")
    if found is None:
        return "unknown"
    return f"{found}+changes" if _git("status", "--porcelain", "--", "*.py", "*.toml") else found


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
