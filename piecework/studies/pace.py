"""How long a run will take, from the rounds that there are.

Rounds are taken to be of equal length. Those of a cascade's stages are not, so that its estimate is rough until a run has
completed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from piecework.device_profiles.units import format_seconds
from piecework.report.read_records import Record
from piecework.server_app.records import RunDir
from piecework.server_app.run_folder import has_completed
from piecework.training.settings import Settings


@dataclass(frozen=True)
class Pace:
    """The seconds of a round without and with an evaluation (None: none was seen), and of what a run does besides."""

    plain: float
    evaluated: float | None
    beside: float = 0.0


@dataclass(frozen=True)
class Seen:
    """What was seen of a run: its rounds, and the seconds that it took besides them, None unless it has completed.

    `share` is how much of a core its processes had (notes.py), if seconds on a core of its own are asked for, else 1.
    """

    rounds: Sequence[Record]
    beside: float | None = None
    share: float = 1.0


def look_at(folder: Path, share: float = 1.0) -> Seen:
    """Return what there is of a run: its rounds before any damage."""
    run_dir = RunDir(folder)
    rounds, _ = run_dir.readable_rounds()
    inside = sum(record["seconds"] for record in rounds)
    beside = max(0.0, run_dir.seconds() - inside) if has_completed(run_dir) else None
    return Seen(rounds, beside, share)


def pace_of(runs: Iterable[Seen]) -> Pace | None:
    """Return the pace of runs of one row, times their shares of a core; None without a round.

    Each run's first round, which also traces the model, counts only where there is no other. Where every round was evaluated,
    the others are taken to be as long.
    """
    found = list(runs)
    later = [(run, record) for run in found for record in run.rounds[1:]] or [
        (r, each) for r in found for each in r.rounds
    ]
    plain = [run.share * record["seconds"] for run, record in later if record["accuracy"] is None]
    evaluated = [run.share * record["seconds"] for run, record in later if record["accuracy"] is not None]
    if not later:
        return None
    beside = [run.share * run.beside for run in found if run.beside is not None]
    return Pace(fmean(plain or evaluated), fmean(evaluated) if evaluated else None, fmean(beside) if beside else 0.0)


def seconds_left(settings: Settings, done: int, pace: Pace) -> float:
    """Return the seconds that a run with these settings takes after its first `done` rounds.

    Where no evaluation was seen, rounds with one are counted as others.
    """
    to_come = range(done + 1, settings.num_rounds + 1)
    due = sum(map(settings.evaluation_due, to_come))
    evaluated = pace.plain if pace.evaluated is None else pace.evaluated
    return (len(to_come) - due) * pace.plain + due * evaluated + pace.beside


def in_words(hours: float | None, unknown: int, unevaluated: int) -> str:
    """Return hours, the runs of unknown length, and those whose evaluations are not in the hours, in words."""
    known = [] if hours is None else [f"{format_seconds(3600 * hours)} left"]
    known += [f"without the evaluations of {unevaluated} run{'s' * (unevaluated > 1)}"] if unevaluated else []
    return ", ".join(known + ([f"{unknown} run{'s' * (unknown > 1)} of unknown length"] if unknown else []))
