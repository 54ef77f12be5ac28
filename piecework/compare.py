"""Runs side by side. Runs that differ in nothing but the seed are one group: mean, sample standard deviation, extremes.

What a resumed run may change (`CHANGEABLE`) does not part groups, except for the number of rounds: a longer run is no
repetition of a shorter one.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from device_profiles.profile import format_bytes
from piecework import display
from piecework.display import percent
from server_app.records import CheckpointError, RunDir, write_atomically
from server_app.settings import CHANGEABLE, Scalar, Settings, SettingsError

IGNORED = CHANGEABLE - {"num-rounds"} | {"seed"}
LONGEST = 32  # characters of a value in a label


@dataclass(frozen=True)
class Outcome:
    """One run. Bytes of training messages; `curve` has (round, bytes so far, accuracy) of the evaluated rounds."""

    path: Path
    settings: dict[str, Scalar]
    status: str
    rounds: int
    accuracy: float | None
    best_accuracy: float | None
    totals: dict[str, int]
    enforced: bool
    max_peak_over_budget: float | None
    largest_measured_peak: int
    seconds: float
    simulated_seconds: float | None
    curve: list[tuple[int, int, float]]


@dataclass(frozen=True)
class Group:
    """Runs with the same settings; `differs` are the settings that set it apart (of a single group: the strategy)."""

    label: str
    differs: dict[str, Scalar]
    runs: list[Outcome]

    @property
    def seeds(self) -> list[int]:
        """In the order of the runs."""
        return [int(run.settings["seed"]) for run in self.runs]


def read_run(run_dir: RunDir) -> Outcome:
    """What a run came to. Raises CheckpointError for a folder that is not a run, or one of another version."""
    try:
        settings = Settings.from_run_config(run_dir.settings()).to_run_config()
    except SettingsError as error:
        raise CheckpointError(f"{run_dir.path} was written by another version of Piecework: {error}") from error
    rounds = run_dir.rounds()
    evaluated, (status, _, seconds) = display.accuracies(rounds), display.how_it_ended(run_dir, rounds)
    sent = accumulate(r["bytes_down"] + r["bytes_up"] for r in rounds)
    return Outcome(
        path=run_dir.path,
        settings=settings,
        status=status,
        rounds=len(rounds),
        accuracy=evaluated[-1] if evaluated else None,
        best_accuracy=max(evaluated, default=None),
        totals=display.totals(rounds),
        enforced=display.is_enforced(rounds),
        max_peak_over_budget=display.peak_over_budget(rounds),
        largest_measured_peak=max((c["measured_peak"] for r in rounds for c in r["clients"]), default=0),
        seconds=seconds,
        simulated_seconds=display.simulated_seconds(rounds),
        curve=[(r["round"], n, r["accuracy"]) for r, n in zip(rounds, sent, strict=True) if r["accuracy"] is not None],
    )


def group_runs(run_dirs: Iterable[RunDir]) -> list[Group]:
    """The runs by settings, in the order in which they were given. Raises CheckpointError."""
    unique = {run_dir.path: run_dir for run_dir in run_dirs}
    together: dict[str, list[Outcome]] = {}
    for run in map(read_run, unique.values()):
        kept = {key: value for key, value in run.settings.items() if key not in IGNORED}
        together.setdefault(repr(sorted(kept.items())), []).append(run)
    firsts = [runs[0].settings for runs in together.values()]
    keys = [k for k in next(iter(firsts), {}) if k not in IGNORED and len({repr(s[k]) for s in firsts}) > 1]
    groups = []
    for runs in together.values():
        runs.sort(key=lambda run: int(run.settings["seed"]))
        differs = {key: runs[0].settings[key] for key in keys or ["strategy"]}
        groups.append(Group(" ".join(f"{key}={short(value)}" for key, value in differs.items()), differs, runs))
    return groups


def short(value: Scalar) -> str:
    """A value as part of a label: a fleet may be a whole JSON document, of which the digest tells it from another."""
    text = str(value)
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 9]}…#{hashlib.sha256(text.encode()).hexdigest()[:7]}"


def figures(group: Group) -> dict[str, Any]:
    """A group in numbers: means a run unless the name says otherwise, None for what no run has."""
    runs, seeds = group.runs, group.seeds
    final = [run.accuracy for run in runs if run.accuracy is not None]
    peaks = [run.max_peak_over_budget for run in runs if run.max_peak_over_budget is not None]
    enforced, started = all(run.enforced for run in runs), [run for run in runs if run.rounds]
    spread = len(final) > 1 and len(set(seeds)) > 1
    return {
        "seeds": seeds,
        "status": {status: sum(r.status == status for r in runs) for status in sorted({r.status for r in runs})},
        "rounds": [run.rounds for run in runs],
        "accuracy_mean": mean(final),
        "accuracy_std": stdev(final) if spread else None,
        "best_accuracy_mean": mean(run.best_accuracy for run in runs if run.best_accuracy is not None),
        **{
            f"{key}_mean": mean(r.totals[key] for r in started)
            for key in ("bytes_down", "bytes_up", "bytes_evaluation")
        },
        "seconds_mean": mean(run.seconds for run in started),
        "simulated_seconds_mean": mean(r.simulated_seconds for r in started if r.simulated_seconds is not None),
        "enforced": enforced,
        "max_peak_over_budget": max(peaks, default=None) if enforced else None,
        "largest_measured_peak": max(run.largest_measured_peak for run in runs) or None,
        "clients_asked": sum(run.totals["asked"] for run in runs),
        "clients_failed": sum(run.totals["failed"] for run in runs),
    }


def mean(values: Iterable[float]) -> float | None:
    """None of no values."""
    found = list(values)
    return fmean(found) if found else None


def compare_json(groups: Sequence[Group]) -> dict[str, Any]:
    """As plain values: a group's figures, and its runs."""
    return {
        "groups": [
            {
                "label": group.label,
                "differs": group.differs,
                **figures(group),
                "runs": [
                    {"path": str(r.path), "seed": seed, "status": r.status, "rounds": r.rounds, "accuracy": r.accuracy}
                    for r, seed in zip(group.runs, group.seeds, strict=True)
                ],
            }
            for group in groups
        ]
    }


def compare_table(groups: Sequence[Group]) -> Table:
    """A column a group, headed by what sets it apart: few groups with many figures fit a terminal best so."""
    table = Table(show_header=False, caption="accuracy: mean ± sample standard deviation; bytes, time: mean of a run")
    heads = [{key: short(value) for key, value in group.differs.items()} for group in groups]
    columns = [lines(figures(group)) for group in groups]
    for rows in (heads, columns):
        for name in rows[0] if rows else ():
            table.add_row(name, *(Text(column[name], justify="right") for column in rows))
        table.add_section()
    return table


def lines(found: dict[str, Any]) -> dict[str, str]:
    """The figures of a group as text."""
    rounds, ended = sorted({min(found["rounds"]), max(found["rounds"])}), found["status"]
    spread = f" ± {percent(found['accuracy_std'])}" if found["accuracy_std"] is not None else ""
    return {
        "seeds": ", ".join(map(str, found["seeds"])),
        "ended": ", ".join(status if set(ended) == {"completed"} else f"{n} {status}" for status, n in ended.items()),
        "rounds": " to ".join(map(str, rounds)) if rounds[-1] else "-",
        "accuracy": percent(found["accuracy_mean"]) + spread,
        "best accuracy": percent(found["best_accuracy_mean"]),
        "bytes down": size(found["bytes_down_mean"]),
        "bytes up": size(found["bytes_up_mean"]),
        "peak / budget": percent(found["max_peak_over_budget"], 1) if found["enforced"] else "not enforced",
        "largest peak": size(found["largest_measured_peak"]),
        "clients failed": f"{found['clients_failed']} of {found['clients_asked']}" if rounds[-1] else "-",
        "time": duration(found["seconds_mean"]),
        "simulated time": duration(found["simulated_seconds_mean"]),
    }


def duration(seconds: float | None) -> str:
    """Seconds for people."""
    return "-" if seconds is None else display.format_seconds(seconds)


def size(amount: float | None) -> str:
    """Bytes for people."""
    return "-" if amount is None else format_bytes(round(amount))


def write_curves(groups: Sequence[Group], path: Path) -> Path:
    """Write one page with accuracy over rounds and over bytes. Raises ReportError without plotly."""
    from piecework.report import Section, page, sections_html

    caption = (
        "Line: mean of the runs of a group that were evaluated in the round; band: from the lowest to the highest."
    )
    of_bytes = "The same, over the mean bytes of training messages (down and up, all clients) until the round."
    shown = [
        Section("Accuracy over rounds", caption, curves_figure(groups, over_bytes=False)),
        Section("Accuracy over bytes", of_bytes, curves_figure(groups, over_bytes=True)),
    ]
    if not any(run.curve for group in groups for run in group.runs):
        shown = [Section("Accuracy", "No round of these runs was evaluated.")]
    write_atomically(path, page("Piecework: runs compared", f"<h1>Runs compared</h1>{sections_html(shown)}").encode())
    return path


def curves_figure(groups: Sequence[Group], *, over_bytes: bool) -> Any:
    """A line and a band a group."""
    from piecework.report import COLOURS, graph_objects, line

    figure = graph_objects().Figure()
    for i, group in enumerate(groups):
        points, name = mean_curve(group, over_bytes), escape(group.label).replace(" ", "<br>")
        if len(group.runs) > 1 and points:
            x = [p[0] for p in points]
            edge = {"x": x, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            colour = COLOURS[i % len(COLOURS)]
            band = {"fill": "tonexty", "fillcolor": f"rgba({','.join(str(c) for c in bytes.fromhex(colour[1:]))},.15)"}
            figure.add_scatter(y=[p[2] for p in points], legendgroup=str(i), **edge)
            figure.add_scatter(y=[p[3] for p in points], legendgroup=str(i), **edge, **band)
        if points:
            figure.add_trace(line([p[:2] for p in points], group.label, i).update(legendgroup=str(i), name=name))
    figure.update_xaxes(title="bytes, down and up" if over_bytes else "round", rangemode="tozero")
    if over_bytes:
        figure.update_xaxes(tickformat="~s", ticksuffix="B")
    return figure.update_yaxes(title="accuracy", tickformat="~%", rangemode="nonnegative")


def mean_curve(group: Group, over_bytes: bool) -> list[tuple[float, float, float, float]]:
    """(round or mean bytes, mean, lowest, highest accuracy) by round."""
    by_round: dict[int, list[tuple[int, float]]] = {}
    for run in group.runs:
        for number, sent, accuracy in run.curve:
            by_round.setdefault(number, []).append((sent, accuracy))
    points = []
    for number, seen in sorted(by_round.items()):
        values = [accuracy for _, accuracy in seen]
        x = fmean(sent for sent, _ in seen) if over_bytes else number
        points.append((x, fmean(values), min(values), max(values)))
    return points
