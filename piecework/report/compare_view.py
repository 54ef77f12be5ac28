"""Present runs side by side: tables with a row for each run, and a page with curves.

How many clients of the fleet trained stands beside what that cost, and a model that nobody trained has no accuracy here.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.client_app.disk import write_atomically
from piecework.device_profiles.profile import format_bytes, format_percent
from piecework.device_profiles.units import format_seconds
from piecework.report.compare import ACCURACIES, UNDER_ATTACK, Group, counted_runs, figures, marks
from piecework.report.compare_legend import legend, some_clients
from piecework.report.compare_pictures import pictures
from piecework.report.page import (
    COLOURS,
    ReportError,
    Section,
    graph_objects,
    line,
    page,
    sections_html,
    table,
    whole_steps,
)
from piecework.report.paired import paired_section
from piecework.report.participation import clients_text

# The tables, and their columns, as they fit a terminal of 80 columns.
TABLES = {
    "accuracy": ("seed", "rounds", "at the end", "best (round)"),
    "under attack": (),  # whatever attacks there are
    "size and memory": ("parameters", "peak / budget", "largest peak", "evaluating"),
    "clients": ("asked", "trained", "of the data", "requests failed"),
    "disks, a round, and the most read / written by one client": ("disk read", "disk written", "disk, by one client"),
    "messages and time": ("bytes down", "bytes up", "time", "simulated time"),
}
NAME = 24  # columns of a terminal that a run's name has at least
SUFFIXES = (".html", ".htm")
LABEL = 64  # letters of a group's settings in the legend of a figure; the page lists them all
UNTRAINED = "untrained"  # in place of an accuracy, where nobody trained
MEAN = "mean"
MEANS = (
    "mean ± sample standard deviation of accuracies; the largest peak; mean bytes and times. Means are those of the runs that "
    "have completed, if any has"
)


def compare_tables(groups: Sequence[Group]) -> list[Table | Text]:
    """Return what distinguishes the groups, and tables with a row for each run and one for the mean of several."""
    rows = compare_rows(groups)
    shown: list[Table | Text] = [Text(sentence) for sentence in legend(groups)]
    for title, chosen in chosen_columns(rows[0]).items():
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("")
        table.add_column("run", overflow="fold", min_width=NAME)
        for name in chosen:
            table.add_column(name, justify="right")
        for row in rows:
            style = "" if row["seed"] else "bold"  # a mean has none
            table.add_row(*(Text(row[name], style=style) for name in ("", "run", *chosen)))
        shown += [Text(), table]
    return shown


def chosen_columns(row: Mapping[str, str]) -> dict[str, list[str]]:
    """Return which columns of a row each of TABLES has, by title; without tables that would have none."""
    known = [name for columns in TABLES.values() for name in columns]
    rest = [name for name in row if name not in (*known, "", "run")]
    found = {title: [name for name in columns or rest if name in row] for title, columns in TABLES.items()}
    return {title: columns for title, columns in found.items() if columns}


def compare_rows(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return the runs with their figures as text, by column, and below the runs of a group their mean."""
    attacks = attack_names(groups)
    runs = [figures(alone) for group in groups for alone in group.alone]
    evaluated, paged = (any(found[key] for found in runs) for key in ("largest_evaluation_peak", "disk_read_mean"))
    rows = []
    for mark, group in zip(marks(groups), groups, strict=True):
        several = [(mean_name(group), group)] if len(group.runs) > 1 else []
        own = [(run.path.name, alone) for run, alone in zip(group.runs, group.alone, strict=True)]
        for name, of in (*own, *several):
            row = {"": mark, "run": name} | lines(figures(of), attacks, evaluated=evaluated, paged=paged)
            rows.append(row)
    return rows


def mean_name(group: Group) -> str:
    """Return the name of the row below a group's runs: `mean of 3 runs`, or `mean of 2 of 3 runs` if one did not complete."""
    counted, total = len(counted_runs(group.runs)), len(group.runs)
    return f"{MEAN} of {total if counted == total else f'{counted} of {total}'} runs"


def attack_names(groups: Sequence[Group]) -> dict[str, str]:
    """Name the attacks that any run has, without steps and images if these differ between runs; the settings show them."""
    names = {}
    for key, general in UNDER_ATTACK.items():
        found = [run.under_attack[key] for group in groups for run in group.runs if key in run.under_attack]
        exact = {f"under {each.attack}, {each.images} images" for each in found}
        if found:
            names[key] = exact.pop() if len(exact) == 1 else f"under {general}"
    return names


def lines(found: dict[str, Any], attacks: dict[str, str], *, evaluated: bool, paged: bool) -> dict[str, str]:
    """Return the figures of a group as text, by column; of memory in evaluation and of disks only if any group has them."""
    alone, rounds = len(found["seeds"]) == 1, sorted({min(found["rounds"]), max(found["rounds"])})
    best = with_spread(found["best_accuracy_mean"], found["best_accuracy_std"])
    if alone and found["best_rounds"]:
        best += f" ({'end' if found['best_rounds'][0] is None else found['best_rounds'][0]})"
    final = with_spread(found["accuracy_mean"], found["accuracy_std"])
    ended = [status for status in found["status"] if alone and status != "completed"]
    return {
        "seed": str(found["seeds"][0]) if alone else "",
        "rounds": ", ".join([" to ".join(map(str, rounds)), *ended]),
        "at the end": UNTRAINED if alone and found["untrained_runs"] else final,
        "best (round)": best,
        **{name: with_spread(found[f"{key}_mean"], found[f"{key}_std"]) for key, name in attacks.items()},
        "parameters": "-" if found["parameters_mean"] is None else f"{found['parameters_mean']:,.0f}",
        "peak / budget": format_percent(found["max_peak_over_budget"], 1) if found["enforced"] else "not enforced",
        "largest peak": format_size(found["largest_measured_peak"]),
        **({"evaluating": format_size(found["largest_evaluation_peak"])} if evaluated else {}),
        "asked": clients_text(found["clients_ever_asked"], []),
        "trained": clients_text(found["clients_trained"], found["clients_of_fleet"]),
        "of the data": format_percent(found["data_trained_mean"], 1),
        "requests failed": f"{found['clients_failed']} of {found['clients_asked']}" if rounds[-1] else "-",
        **(disk_lines(found) if paged else {}),
        "bytes down": format_size(found["bytes_down_mean"]),
        "bytes up": format_size(found["bytes_up_mean"]),
        "time": format_duration(found["seconds_mean"]),
        "simulated time": format_duration(found["simulated_seconds_mean"]),
    }


def disk_lines(found: dict[str, Any]) -> dict[str, str]:
    """Return what paged steps read and wrote a round as text, by column."""
    most = found["disk_most_read"], found["disk_most_written"]
    return {
        "disk read": format_size(found["disk_read_mean"]),
        "disk written": format_size(found["disk_written_mean"]),
        "disk, by one client": "-" if None in most else " / ".join(map(format_size, most)),
    }


def with_spread(fraction: float | None, deviation: float | None) -> str:
    """Format as `70.00% ± 10.00%`."""
    return format_percent(fraction) + (f" ± {format_percent(deviation)}" if deviation is not None else "")


def format_duration(seconds: float | None) -> str:
    """Format seconds."""
    return "-" if seconds is None else format_seconds(seconds)


def format_size(amount: float | None) -> str:
    """Format bytes."""
    return "-" if amount is None else format_bytes(round(amount))


def page_file(path: Path) -> Path:
    """Return the file of a page. Raises ReportError unless its name ends as that of a page does."""
    if path.suffix.lower() not in SUFFIXES:
        raise ReportError(f"{str(path)!r}: what is written is a web page: give a file whose name ends in .html or .htm")
    return path


def write_curves(groups: Sequence[Group], path: Path, *, plotly: bool = True) -> Path:
    """Write one page: the runs in tables, accuracy over rounds and bytes, and what it cost; without `plotly` the tables.

    Raises ReportError for a file of another kind, or if plotly is wanted and missing.
    """
    write_atomically(page_file(path), curves_html(groups, plotly=plotly).encode())
    return path


def curves_html(
    groups: Sequence[Group],
    above: str = "",
    *,
    heading: str = "Runs compared",
    says: str = "",
    others: Sequence[Section] = (),
    plotly: bool = True,
) -> str:
    """Return that page under a heading, with the HTML `above` before it, the sentence `says` below it, and sections `others`.

    Without groups it has these alone. Raises ReportError without plotly, if that is wanted.
    """
    names = [curve_name(mark, group) for mark, group in zip(marks(groups), groups, strict=True)]
    paired = paired_section(groups)
    shown = [*tables_section(groups), *others, *([paired] if paired is not None else [])]
    shown += [*curves_sections(groups), *pictures(groups, names)]
    settings = "".join(f"<p>{escape(sentence)}</p>" for sentence in legend(groups))
    first = f'<p class="says">{escape(says)}</p>' if says else ""
    body = f"{above}<h1>{escape(heading)}</h1>{first}{settings}{sections_html(shown, plotly=plotly)}"
    return page(f"{heading}: Piecework", body)


def tables_section(groups: Sequence[Group]) -> list[Section]:
    """Return the section of the runs with their figures, in tables; none without runs."""
    if not (rows := compare_rows(groups)):
        return []
    tables = []
    for title, columns in chosen_columns(rows[0]).items():
        names = ["", "run", *columns]
        tables.append(f"<h3>{escape(title)}</h3>{table(([row[name] for name in names] for row in rows), names)}")
    listed = f'<div class="figures">{"".join(tables)}</div>'
    return [Section("Runs", f"{MEANS[0].upper()}{MEANS[1:]}.", below=listed)]


def curves_sections(groups: Sequence[Group]) -> list[Section]:
    """Return the sections of accuracy over rounds and over bytes."""
    caption = (
        "Line: mean of the runs of a group that were evaluated in the round; band: from the lowest to the highest."
    )
    of_bytes = "The same, over the mean bytes of training messages (down and up, all clients) until the round."
    shown = []
    for key, name in ACCURACIES.items():
        if any(run.curves[key] for group in groups for run in group.runs):
            shown += [
                Section(f"{name} over rounds", caption, partial(curves_figure, groups, key, over_bytes=False)),
                Section(f"{name} over bytes", of_bytes, partial(curves_figure, groups, key, over_bytes=True)),
            ]
    if groups and not shown:
        idle = any(run.untrained_accuracy is not None for group in groups for run in group.runs)
        after = " after clients had trained" if idle else ""
        shown.append(Section("Accuracy", f"No round of these runs was evaluated{after}."))
    return shown


def curves_figure(groups: Sequence[Group], key: str, *, over_bytes: bool) -> Any:
    """Draw a line and a band per group for the record key `key`."""
    figure = graph_objects().Figure()
    for i, (mark, group) in enumerate(zip(marks(groups), groups, strict=True)):
        points, name = mean_curve(group, key, over_bytes), curve_name(mark, group)
        if len(group.runs) > 1 and points:
            x = [p[0] for p in points]
            edge = {"x": x, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            colour = COLOURS[i % len(COLOURS)]
            band = {"fill": "tonexty", "fillcolor": f"rgba({','.join(str(c) for c in bytes.fromhex(colour[1:]))},.15)"}
            figure.add_scatter(y=[p[2] for p in points], legendgroup=str(i), **edge)
            figure.add_scatter(y=[p[3] for p in points], legendgroup=str(i), **edge, **band)
        if points:
            figure.add_trace(line([p[:2] for p in points], name, i).update(legendgroup=str(i)))
    figure.update_xaxes(title="bytes, down and up" if over_bytes else "round", rangemode="tozero")
    if over_bytes:
        figure.update_xaxes(tickformat="~s", ticksuffix="B")
    else:
        last = max((run.curves[key][-1][0] for group in groups for run in group.runs if run.curves[key]), default=1)
        figure.update_xaxes(**whole_steps(last))
    return figure.update_yaxes(title=ACCURACIES[key].lower(), tickformat="~%", rangemode="nonnegative")


def curve_name(mark: str, group: Group) -> str:
    """Return the name of a group's curve: its mark, first settings, how many clients trained if not all did, and its runs."""
    runs = group.runs[0].path.name if len(group.runs) == 1 else f"{len(group.runs)} runs"
    partly = f", {text}" if (text := some_clients(group)) else ""
    label = group.label if len(group.label) <= LABEL else f"{group.label[:LABEL].rpartition(' ')[0]} …"
    return f"{mark}: {label}{partly} ({runs})"


def mean_curve(group: Group, key: str, over_bytes: bool) -> list[tuple[float, float, float, float]]:
    """Return (round or mean bytes, mean, lowest, highest accuracy) by round."""
    by_round: dict[int, list[tuple[int, float]]] = {}
    for run in group.runs:
        for number, sent, accuracy in run.curves[key]:
            by_round.setdefault(number, []).append((sent, accuracy))
    points = []
    for number, seen in sorted(by_round.items()):
        values = [accuracy for _, accuracy in seen]
        x = fmean(sent for sent, _ in seen) if over_bytes else number
        points.append((x, fmean(values), min(values), max(values)))
    return points
