"""Start what a claim is missing, as ordinary runs in processes of their own, and go on with what was interrupted.

A run that is completed is never repeated, and one that another process writes is left to it. Nothing is passed over in
silence: each run that is not started is said once, with the reason.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired

from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Place, Wanted, in_order, job_of, possible, search_jobs
from benchmarks.claims.notes import Note, damage_beside, state_of, this_commit, this_machine
from benchmarks.claims.outcomes import how_it_ended
from benchmarks.claims.queue import Options, Queue, Say, close, start
from benchmarks.claims.recorded import Recorded
from benchmarks.claims.results import rate_or_damage
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import RunLockedError, require_free, run_lock, writer

POLL = 0.2  # seconds
PATIENCE = 60.0  # seconds that a run has to stop by itself
DYING = 5.0  # seconds that the run of a killed harness may take to end
LOCKS = ".locks"  # the folder below OUT with a lock of the harness for each run
ACCIDENTS = 3  # failures in a row that are no results, after which nothing more is started


def run(claims: Sequence[Claim], options: Options, say: Say) -> list[str]:
    """Start what is missing until nothing is, or the hours are over. Returns the labels of the runs that failed now."""
    queue, end = Queue(claims, options, say), time.monotonic() + 3600 * options.hours
    queue.recorded = {claim.name: Recorded.of(claim, options.records) for claim in claims}
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
                for child in queue.children:
                    child.watch()
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
    folder, recorded = job.folder(queue.options.out), queue.recorded[job.claim].run(job)
    state = state_of(folder)
    if recorded is not None and not (recorded.status == "failed" and queue.options.retry):
        queue.tell(f"{job.label} is in the records")
    elif state == "damaged":
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
        recorded = queue.recorded[claim.name]
        if not isinstance(found, Wanted):
            if recorded.rate(found) is None:
                yield from search_jobs(claim, found)
            else:
                queue.tell(
                    f"{claim.name}: {found[0]}: {found[1]}: search is in the records: rate {recorded.rate(found):g}"
                )
        elif found.source is None or (rate := recorded.rate(found.source)) is not None:
            yield job_of(claim, found, None if found.source is None else rate)
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
            timed = any(queue.recorded[claim.name].seconds_of_rounds(jobs[0].row, jobs[0].case))
            if not (timed or any(rounds_of(job, queue.options.out) >= queue.options.first for job in jobs)):
                yield jobs[0]


def rounds_of(job: Job, out: Path) -> int:
    """Return how many rounds a run has completed."""
    return RunDir(job.folder(out)).last_complete_round()


def conclude_ended(queue: Queue) -> bool:
    """Say of the runs that have ended how they did, and note the failure of those that failed; return whether any has."""
    ended = [child for child in queue.children if child.process.poll() is not None]
    for child in ended:
        queue.children.remove(child)
        close(child)
        outcome = how_it_ended(child.folder, child.process.returncode, child.before, child.stopped)
        note = Note.read(child.folder) or Note.of(child.job)
        note = replace(note, watched=note.watched + child.watched, core=note.core + child.core)
        replace(note, failed=outcome.failed, final=outcome.final).write(child.folder)
        if outcome.failed:
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
