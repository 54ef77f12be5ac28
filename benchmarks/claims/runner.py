"""Start what a claim is missing, as ordinary runs in processes of their own, and go on with what was interrupted.

A run that is completed is never repeated, and one that another process writes is left to it. Nothing is passed over in
silence: each run that is not started is said once, with the reason.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen, TimeoutExpired

import tomli_w

from benchmarks.claims.child import spawn
from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Place, Wanted, in_order, job_of, possible, search_jobs
from benchmarks.claims.notes import Note, beside, damage_beside, state_of, this_commit, this_machine
from benchmarks.claims.outcomes import how_it_ended
from benchmarks.claims.results import rate_or_damage
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import RunLockedError, require_free, run_lock, writer
from piecework.training.settings.table import nested

POLL = 0.2  # seconds
PATIENCE = 60.0  # seconds that a run has to stop by itself
DYING = 5.0  # seconds that the run of a killed harness may take to end
LOCKS = ".locks"  # the folder below OUT with a lock of the harness for each run
ACCIDENTS = 3  # failures in a row that are no results, after which nothing more is started
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is run, and how. `first`: rounds after which a run is stopped, 0 = none; see `to_time`."""

    out: Path
    jobs: int = 1
    only: str = ""
    hours: float = math.inf
    first: int = 0
    retry: bool = False
    data_dir: str = ""


@dataclass
class Child:
    """A run in a process. `stopped` says why the harness ended it, if it did.

    `before` is the version of the summary that an earlier process left.
    """

    job: Job
    folder: Path
    process: Popen[bytes]
    before: tuple[int, int] | None
    stopped: str = ""

    def stop(self, why: str) -> None:
        """Ask the run to end, as Ctrl-C would: it keeps its rounds."""
        if not self.stopped:
            self.stopped = why
            self.process.send_signal(signal.SIGTERM)


@dataclass
class Queue:
    """The runs of now: those that are running, and by their folders those that were started, or left to other processes.

    `said` is what was said of others, `failed` the labels of those that failed, `accidents` the failures since the last run
    that gave a result. `held` are the locks of those that are running. `rates` are what searches have found.
    """

    claims: Sequence[Claim]
    options: Options
    say: Say
    children: list[Child] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    accidents: int = 0
    held: dict[Path, ExitStack] = field(default_factory=dict)
    rates: dict[tuple[str, Place], float | None] = field(default_factory=dict)

    def tell(self, text: str) -> None:
        """Say something, unless it was said."""
        if text not in self.said:
            self.said.add(text)
            self.say(text)


def run(claims: Sequence[Claim], options: Options, say: Say) -> list[str]:
    """Start what is missing until nothing is, or the hours are over. Returns the labels of the runs that failed now."""
    queue, end = Queue(claims, options, say), time.monotonic() + 3600 * options.hours
    commit, machine = this_commit(), this_machine()
    with stopping(queue):
        while True:
            over, halted = time.monotonic() > end, queue.accidents >= ACCIDENTS
            while not (over or halted) and len(queue.children) < options.jobs and (job := next_job(queue)) is not None:
                say(f"{job.label} {'goes on' if state_of(job.folder(options.out)) == 'begun' else 'starts'}")
                queue.children.append(start(job, options, commit, machine))
            if not queue.children:
                if halted:
                    say(
                        f"{queue.accidents} runs in a row failed for reasons that are no results, so nothing more is started: "
                        "remove the cause, and `run --retry` tries them again"
                    )
                elif over:
                    say(f"the {options.hours:g} hours are over; `status` says what is missing")
                return queue.failed
            while not conclude_ended(queue):
                stop_due(queue, over=time.monotonic() > end)
                time.sleep(POLL)


def stop_due(queue: Queue, *, over: bool) -> None:
    """Ask runs to end that have enough rounds for now, or all if the hours are over."""
    for child in queue.children:
        if over:
            child.stop(f"the {queue.options.hours:g} hours are over")
        elif queue.options.first and RunDir(child.folder).last_complete_round() >= queue.options.first:
            child.stop(f"it has its first {queue.options.first} rounds")


def next_job(queue: Queue) -> Job | None:
    """Return the next run that can be started now, or None; say of the others before it why they are not."""
    for job in to_time(queue) if queue.options.first else to_finish(queue):
        folder = job.folder(queue.options.out)
        if str(folder) in queue.tried:
            continue
        if state_of(folder) == "running" and is_left(queue, job):
            continue
        if is_due(queue, job) and is_held(queue, job):
            if is_due(queue, job):  # still: another harness may have ended it in between
                queue.tried.add(str(folder))
                return job
            queue.held.pop(folder).close()
    return None


def is_due(queue: Queue, job: Job) -> bool:
    """Return whether a run that no process writes is to be started; say why not, unless it is done."""
    folder = job.folder(queue.options.out)
    state = state_of(folder)
    if state == "damaged":
        queue.tell(f"{job.label} is left alone: {damage_beside(folder)}")
    elif state in ("failed", "broken") and not queue.options.retry:
        note = Note.read(folder)
        what = "failed before" if state == "failed" else "failed before, which is no result"
        queue.tell(f"{job.label} {what} ({note.failed if note else ''}); --retry tries it again")
    else:
        return state not in ("done", "running")
    return False


def is_held(queue: Queue, job: Job) -> bool:
    """Keep a run from other harnesses until its outcome is noted; return False, and say so, if another one has it.

    The run's own lock is free as soon as its process has ended, when its failure is not noted yet.
    """
    folder, stack = job.folder(queue.options.out), ExitStack()
    lock = queue.options.out / LOCKS / folder.relative_to(queue.options.out)
    try:
        stack.enter_context(run_lock(lock))
    except RunLockedError:
        queue.tell(f"{job.label} is left to another: {writer(lock) or 'a process that has just ended'} has started it")
        return False
    queue.held[folder] = stack
    return True


def is_left(queue: Queue, job: Job) -> bool:
    """Return whether a run is left to the process that writes it, and say so; one whose harness was killed ends in a moment."""
    folder = job.folder(queue.options.out)
    try:
        require_free(folder, 0.0 if str(folder) in queue.left else DYING)
    except RunLockedError as error:
        queue.left.add(str(folder))
        queue.tell(f"{job.label} is left to another: {error}")
        return True
    return False


def to_finish(queue: Queue) -> Iterator[Job]:
    """Yield every run of the claims whose rate is known, in order."""
    rates, asked = queue.rates, set[tuple[str, Place]]()
    for claim, found in in_order(queue.claims, queue.options.only):
        if not isinstance(found, Wanted):
            yield from search_jobs(claim, found)
        elif found.source is None:
            yield job_of(claim, found, None)
        else:
            key = claim.name, found.source
            if rates.get(key) is None and key not in asked:
                asked.add(key)
                rates[key], damage = rate_or_damage(claim, found.source, queue.options.out)
                if damage:
                    queue.tell(
                        f"{claim.name}: the search of {found.source[1]!r} in {found.source[0]!r} is open: {damage}"
                    )
            if rates[key] is not None:
                yield job_of(claim, found, rates[key])
            elif not searching(queue, claim, found.source):
                case, row = found.source
                label = possible(claim, found)[0].label
                queue.tell(f"{label} waits for the search of {row!r} in {case!r}, which has not ended")


def searching(queue: Queue, claim: Claim, place: Place) -> bool:
    """Return whether a run of a search is running here."""
    return any(c.job.searched and c.job.claim == claim.name and c.job.place == place for c in queue.children)


def to_time(queue: Queue) -> Iterator[Job]:
    """Yield one run of each row in each case, if none has `Options.first` rounds yet: the first, with any rate."""
    seen: set[tuple[str, Place]] = set()
    for claim, found in in_order(queue.claims, queue.options.only):
        jobs = possible(claim, found) if isinstance(found, Wanted) else search_jobs(claim, found)
        key = claim.name, jobs[0].place
        if key not in seen:
            seen.add(key)
            if not any(rounds_of(job, queue.options.out) >= queue.options.first for job in jobs):
                yield jobs[0]


def rounds_of(job: Job, out: Path) -> int:
    """Return how many rounds a run has completed."""
    return RunDir(job.folder(out)).last_complete_round()


def start(job: Job, options: Options, commit: str, machine: str) -> Child:
    """Start a run, or go on with it where it has begun."""
    folder = job.folder(options.out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (Note.read(folder) or Note.of(job)).started(commit, machine).write(folder)
    words = ["run", "--set", "workers=1"]
    if RunDir(folder).has_begun():
        words += ["--set", f"resume-from={folder}"]
    else:
        settings = beside(folder, "toml")
        settings.write_text(tomli_w.dumps(nested(dict(job.settings))), encoding="utf-8")
        own = {"output-dir": folder.parent, "run-name": folder.name, "training.torch-threads": 1}
        own |= {"data-dir": options.data_dir} if options.data_dir else {}
        words += [
            "--preset",
            str(settings),
            *(word for key, value in own.items() for word in ("--set", f"{key}={value}")),
        ]
    before = RunDir(folder).summary_version()
    return Child(job, folder, spawn(words, beside(folder, "log")), before)


def conclude_ended(queue: Queue) -> bool:
    """Say of the runs that have ended how they did, and note the failure of those that failed; return whether any has."""
    ended = [child for child in queue.children if child.process.poll() is not None]
    for child in ended:
        queue.children.remove(child)
        close(child)
        outcome = how_it_ended(child.folder, child.process.returncode, child.before, child.stopped)
        if outcome.failed:
            note = Note.read(child.folder) or Note.of(child.job)
            replace(note, failed=outcome.failed, final=outcome.final).write(child.folder)
            queue.failed.append(child.job.label)
            queue.accidents += not outcome.final
        queue.held.pop(child.folder).close()
        if outcome.final or state_of(child.folder) == "done":
            queue.accidents = 0
        queue.say(f"{child.job.label} {outcome.text}")
    return bool(ended)


@contextmanager
def stopping(queue: Queue) -> Iterator[None]:
    """End all runs when the body ends, in whatever way, wait for them, and say how they ended."""
    try:
        yield
    finally:
        for child in queue.children:
            child.stop("the harness was stopped")
        for child in queue.children:
            try:
                child.process.wait(PATIENCE)
            except TimeoutExpired:
                child.process.kill()
                child.process.wait()
        conclude_ended(queue)


def close(child: Child) -> None:
    """Close the pipe by which a run knows that the harness lives."""
    assert child.process.stdin is not None
    child.process.stdin.close()
