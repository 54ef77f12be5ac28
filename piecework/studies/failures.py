"""Which failures of runs are results, and which are accidents of the machine.

A failure is a result only if the run itself says so, in the summary that its process wrote: the strategy, the coverage check or
every asked client refused for memory, or what clients sent was not finite or too large (it diverged). All else is no result: an
error before the summary (an unknown setting, a missing data set), a disk that cannot be written, an exception, a crash, clients
that ended or did not answer, a device that ran out of memory although its budget allowed the step.
"""

import re
from collections.abc import Sequence

from piecework.report.read_records import Record
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.run_folder import STOPPED

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
