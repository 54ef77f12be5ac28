"""Start what a plan is missing, as ordinary runs in processes of their own, and go on with what was interrupted.

A run that is completed is never repeated, and one that another process writes is left to it. Nothing is passed over in
silence: each run that is not started is said once, with the reason.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from subprocess import TimeoutExpired

from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import RunLockedError, require_free, run_lock, writer
from piecework.studies.jobs import Job
from piecework.studies.notes import Note, damage_beside, state_of
from piecework.studies.outcomes import how_it_ended
from piecework.studies.queue import Options, Plan, Queue, Say, close, start

POLL = 0.2  # seconds
PATIENCE = 60.0  # seconds that a run has to stop by itself
DYING = 5.0  # seconds that the run of a killed starter may take to end
LOCKS = ".locks"  # the folder below OUT with a lock of the starter for each run


def carry_out(plan: Plan, options: Options, say: Say, watch: Callable[[Queue], None] = lambda _: None) -> list[str]:
    """Start what is missing until nothing is, or the hours are over; `watch` is called now and then meanwhile.

    Returns the labels of the runs that failed now.
    """
    queue, end = Queue(plan, options, say), time.monotonic() + 3600 * options.hours
    with stopping(queue):
        while True:
            over, halted = time.monotonic() > end, queue.accidents >= options.accidents
            while not (over or halted) and len(queue.children) < options.jobs and (job := next_job(queue)) is not None:
                say(f"{job.label} {'goes on' if state_of(job.folder(options.out)) == 'begun' else 'starts'}")
                queue.children.append(start(job, options))
            if not queue.children:
                if halted:
                    say(
                        f"{queue.accidents} runs in a row failed for reasons that are no results, so nothing more is started: "
                        f"remove the cause, and {options.words.retry_all}"
                    )
                elif over:
                    say(f"the {options.hours:g} hours are over; {options.words.status}")
                return queue.failed
            while not conclude_ended(queue):
                for child in queue.children:
                    child.watch()
                stop_due(queue, over=time.monotonic() > end)
                watch(queue)
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
    for job in queue.plan.jobs(queue):
        folder = job.folder(queue.options.out)
        if str(folder) in queue.tried:
            continue
        if state_of(folder) == "running" and is_left(queue, job):
            continue
        if is_due(queue, job) and is_held(queue, job):
            if is_due(queue, job):  # still: another process may have ended it in between
                queue.tried.add(str(folder))
                return job
            queue.held.pop(folder).close()
    return None


def is_due(queue: Queue, job: Job) -> bool:
    """Return whether a run that no process writes is to be started; say why not, unless it is done."""
    folder = job.folder(queue.options.out)
    state = state_of(folder)
    if queue.plan.is_recorded(job):
        queue.tell(f"{job.label} is in the records")
    elif state == "damaged":
        queue.tell(f"{job.label} is left alone: {damage_beside(folder)}")
    elif state in ("failed", "broken") and state not in queue.options.retry:
        note = Note.read(folder)
        what = "failed before" if state == "failed" else "failed before, which is no result"
        queue.tell(f"{job.label} {what} ({note.failed if note else ''}); {queue.options.words.retry}")
    else:
        return state not in ("done", "running")
    return False


def is_held(queue: Queue, job: Job) -> bool:
    """Keep a run from other starters until its outcome is noted; return False, and say so, if another one has it.

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
    """Return whether a run is left to the process that writes it, and say so; one whose starter was killed ends in a moment."""
    folder = job.folder(queue.options.out)
    try:
        require_free(folder, 0.0 if str(folder) in queue.left else DYING)
    except RunLockedError as error:
        queue.left.add(str(folder))
        queue.tell(f"{job.label} is left to another: {error}")
        return True
    return False


def conclude_ended(queue: Queue) -> bool:
    """Say of the runs that have ended how they did, and note the failure of those that failed; return whether any has."""
    ended = [child for child in queue.children if child.process.poll() is not None]
    for child in ended:
        queue.children.remove(child)
        close(child)
        outcome = how_it_ended(
            child.folder,
            child.process.returncode,
            child.before,
            child.stopped,
            queue.options.words.command,
            keeps_models=queue.options.keeps_models,
        )
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
            child.stop(f"{queue.options.words.starter} was stopped")
        for child in queue.children:
            try:
                child.process.wait(PATIENCE)
            except TimeoutExpired:
                child.process.kill()
                child.process.wait()
        conclude_ended(queue)
