"""How the process of a run ended, and whether a failure is a result of the run or an accident of the machine.

A failure is a result only if the run itself says so, in a summary that this process wrote: the strategy, the coverage check or
every asked client refused for memory, or what clients sent was not finite or too large (it diverged). All else is no result: an
error before the summary (an unknown setting, a missing data set), a disk that cannot be written, an exception, a crash, clients
that ended or did not answer, a device that ran out of memory although its budget allowed the step.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims.child import PROMPT
from benchmarks.claims.notes import beside
from benchmarks.claims.results import last_accuracy
from piecework.display import format_seconds, percent
from piecework.read_records import Record
from piecework.runs import remove
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.run_folder import STOPPED, has_completed
from piecework.server_app.run_lock import writer

TERMINATED = 143  # exit code after SIGTERM
ENDED_BY_SIGNAL = (130, TERMINATED)
DIVERGED = "it diverged: "  # before the reason of a failure
# What Piecework says of a run that cannot train; tests compare these with the errors that it raises.
NOBODY = re.compile(r"the richest client has [\d,]+\b|no client can train .* keeps? random initial weights")
EMPTY_ROUND = re.compile(r"(?:no client|only \d+ clients) trained\b.* in round (\d+): ")
UNMEASURED = re.compile(r"no client could measure [^:]*: (.*)")
OVER_BUDGET = re.compile(r"needs [\d,]+ bytes .*, the budget allows [\d,]+")
NOT_FINITE = re.compile(
    r"is (?:nan|-?inf): it must be a finite number|non-finite values|logits .* are not finite"
    r"|more than the limit .*update-norm-limit"
)


@dataclass(frozen=True)
class Outcome:
    """How a process ended, in words; if the run failed its reason, and whether that is a result (`final`)."""

    text: str
    failed: str = ""
    final: bool = False


def how_it_ended(folder: Path, code: int, before: tuple[int, int] | None, stopped: str) -> Outcome:
    """Return how the process of a run ended. `stopped` says why the harness ended it, if it did.

    `before` is the version of the summary that an earlier process left.
    """
    run_dir = RunDir(folder)
    if has_completed(run_dir):
        stores = [path for path in (folder / "clients").glob("*") if path.is_dir()]
        remove(stores)  # nothing will resume from them
        return Outcome(f"has completed: {figures(folder)}")
    after = f"after round {run_dir.last_complete_round()}"
    if stopped:
        return Outcome(f"was stopped {after}, because {stopped}; `run` goes on with it")
    if code < 0 or code in ENDED_BY_SIGNAL:
        return Outcome(f"was ended {after} by a signal (exit code {code}); the next `run` goes on with it")
    own = run_dir.summary_version() != before
    if own and (result := result_of(run_dir)):
        return Outcome(f"FAILED: {result}\n  log: {beside(folder, 'log')}", result, final=True)
    reason = (reason_of(run_dir) if own else "") or reason_in_log(folder) or f"exit code {code}"
    if f"{folder} is being written by" in reason or writer(folder) is not None:
        return Outcome(f"is left to another: {reason}")
    return Outcome(f"FAILED, which is no result: {reason}\n  log: {beside(folder, 'log')}", reason)


def result_of(run_dir: RunDir) -> str:
    """Return in a line why a run cannot train, or that it diverged, if its summary and its records say so; else nothing."""
    try:
        summary, rounds = run_dir.summary() or {}, run_dir.rounds()
    except CheckpointError:
        return ""
    if summary.get("status") != "failed":
        return ""
    first = next(iter(str(summary.get("reason")).splitlines()), "")
    if NOBODY.search(first):
        return first
    if (found := UNMEASURED.match(first)) is not None:
        return judged(first, found[1].split("; "))
    found = EMPTY_ROUND.match(first)
    if found is None or not rounds or rounds[-1]["round"] != int(found[1]):
        return ""
    return of_empty_round(first, rounds[-1])


def of_empty_round(reason: str, record: Record) -> str:
    """Return why a round gave no model, if every client that was asked refused for memory or sent what diverged."""
    if record.get("excluded") or record.get("busy"):
        return ""
    failed = [client for client in record["clients"] if client["status"] != "ok"]
    # `needed` is 0 if the device itself ran out of memory
    others = [each for each in failed if each["status"] != "memory" or not each["needed"]]
    if any(each["status"] != "rejected" for each in others):
        return ""
    return judged(reason, [each["reason"] for each in others])


def judged(reason: str, given: Sequence[str]) -> str:
    """Return a reason of a failure by what clients gave as theirs; nothing if one of these is neither memory nor divergence."""
    diverged = [each for each in given if NOT_FINITE.search(each)]
    if any(each not in diverged and not OVER_BUDGET.search(each) for each in given):
        return ""
    return f"{DIVERGED}{diverged[0]}" if diverged else reason


def reason_of(run_dir: RunDir) -> str:
    """Return in a line why a run failed, by its summary; nothing if that does not say."""
    try:
        summary = run_dir.summary() or {}
    except CheckpointError as error:
        return str(error)
    said = str(summary.get("reason") or "") if summary.get("status") != STOPPED else ""
    return next(iter(said.splitlines()), "")


def reason_in_log(folder: Path) -> str:
    """Return in a line why a run failed, by what its last process printed."""
    log = beside(folder, "log").read_text(encoding="utf-8", errors="replace")
    return reason_in(log.rpartition(PROMPT)[2].splitlines())


def reason_in(lines: Sequence[str]) -> str:
    """Return the last line that says that it is an error, else the last line that says anything; empty without one."""
    said = [line for line in lines if line.strip()]
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    return (errors or said or [""])[-1]


def figures(folder: Path) -> str:
    """Return accuracy and time of a completed run in words."""
    try:
        accuracy = last_accuracy(folder, "accuracy")
    except CheckpointError as error:
        return str(error)
    return f"accuracy {percent(accuracy, 1)}, {format_seconds(RunDir(folder).seconds())}"
