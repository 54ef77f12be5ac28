"""What distinguishes groups of runs, in a sentence each: their settings, who failed and why, and whom they left out."""

from collections import Counter
from collections.abc import Sequence

from piecework.device_profiles.profile import format_percent
from piecework.report.compare import Group, RunResult, marks
from piecework.report.participation import clients_text, span

FAILED = "failed"
MOST = 2  # reasons of a group that are told


def legend(groups: Sequence[Group]) -> list[str]:
    """Return a sentence for each group: its mark, its settings, whether runs repeat a seed or failed, and whom it left out."""
    found = []
    for name, group in zip(marks(groups), groups, strict=True):
        twice = " and ".join(f"{count} runs have seed {seed}" for seed, count in group.repeated.items())
        notes = [f"{twice}, so they are repetitions"] if twice else []
        notes += [*failures(group), *left_out(group)]
        found.append(f"{name}: {group.label}" + (f" ({'; '.join(notes)})" if notes else ""))
    return found


def failures(group: Group) -> list[str]:
    """Return how many runs of a group failed, and why, as their summaries say it; empty if none did."""
    failed, total = [run for run in group.runs if run.status == FAILED], len(group.runs)
    if not failed:
        return []
    reasons = list(dict.fromkeys(run.reason for run in failed if run.reason))
    rest = f", and {len(reasons) - MOST} more reasons" if len(reasons) > MOST else ""
    why = f": {', '.join(reasons[:MOST])}{rest}" if reasons else ""
    which = "it" if total == 1 else f"all {total} runs" if len(failed) == total else f"{len(failed)} of {total} runs"
    return [f"{which} failed{why}"]


def left_out(group: Group) -> list[str]:
    """Return whom the runs of a group left out: clients and device classes that never trained, or all; empty if nobody."""
    started = [run for run in group.runs if run.rounds]
    idle, notes = [run for run in started if not run.participation.trained], list[str]()
    if len(idle) < len(started):
        notes += [f"{text} trained{never_asked(started)}"] if (text := some_clients(group)) else []
        counts = Counter(device for run in started for device in run.participation.excluded)
        for count in sorted(set(counts.values()), reverse=True):
            devices = ", ".join(sorted(device for device, times in counts.items() if times == count))
            notes.append(f"no client of {devices} ever trained{of_runs(count, len(started))}")
    if idle:
        known = sorted({format_percent(run.untrained_accuracy) for run in idle if run.untrained_accuracy is not None})
        said = f": the untrained model gets {' and '.join(known)} right, which is no result" if known else ""
        notes.append(f"nobody trained{of_runs(len(idle), len(started))}{said}")
    return notes


def of_runs(some: int, total: int) -> str:
    """Return ` in 1 of 3 runs`; nothing for all of them."""
    return "" if some == total else f" in {some} of {total} runs"


def some_clients(group: Group) -> str:
    """Return how many clients trained, as in `12 of 20 clients`, if not all did in each run of a group; else nothing."""
    found = [run.participation for run in group.runs if run.rounds]
    if not any(each.partial for each in found):
        return ""
    return f"{clients_text([each.trained for each in found], [each.clients for each in found])} clients"


def never_asked(started: Sequence[RunResult]) -> str:
    """Return `, 2 were never asked`; nothing if all clients were, in each run."""
    left = [of.clients - of.asked for of in (run.participation for run in started) if of.clients is not None]
    return f", {span(left)} {'was' if {*left} == {1} else 'were'} never asked" if any(left) else ""
