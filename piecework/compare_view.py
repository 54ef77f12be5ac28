"""Present runs side by side: a table, and a page with curves."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework import display
from piecework.compare import ACCURACIES, UNDER_ATTACK, Group, figures, short
from piecework.device_profiles.profile import format_bytes
from piecework.display import percent
from piecework.server_app.records import write_atomically


def compare_table(groups: Sequence[Group]) -> Table:
    """Return a table with a column per group, because few groups with many figures fit a terminal best that way."""
    table = Table(show_header=False, caption="accuracy: mean ± sample standard deviation; bytes, time: mean per run")
    heads = [{key: short(value) for key, value in group.differs.items()} for group in groups]
    found = [figures(group) for group in groups]
    attacks, evaluated = attack_names(groups), any(each["largest_evaluation_peak"] for each in found)
    for rows in (heads, [lines(each, attacks, evaluated) for each in found]):
        for name in rows[0] if rows else ():
            table.add_row(name, *(Text(column[name], justify="right") for column in rows))
        table.add_section()
    return table


def attack_names(groups: Sequence[Group]) -> dict[str, str]:
    """Name the attacks that any run has, without steps and images if these differ between runs; the settings show them."""
    names = {}
    for key, general in UNDER_ATTACK.items():
        found = [run.under_attack[key] for group in groups for run in group.runs if key in run.under_attack]
        exact = {f"under {each.attack}, {each.images} images" for each in found}
        if found:
            names[key] = exact.pop() if len(exact) == 1 else f"under {general}"
    return names


def lines(found: dict[str, Any], attacks: dict[str, str], evaluated: bool) -> dict[str, str]:
    """Return the figures of a group as text; figures of attacks and of memory in evaluation only if any group has them."""
    rounds, ended = sorted({min(found["rounds"]), max(found["rounds"])}), found["status"]
    return {
        "seeds": ", ".join(map(str, found["seeds"])),
        "ended": ", ".join(status if set(ended) == {"completed"} else f"{n} {status}" for status, n in ended.items()),
        "rounds": " to ".join(map(str, rounds)) if rounds[-1] else "-",
        "accuracy at the end": with_spread(found["accuracy_mean"], found["accuracy_std"]),
        "in the best round": with_spread(found["best_accuracy_mean"], found["best_accuracy_std"]),
        "best round": ", ".join("end" if number is None else str(number) for number in found["best_rounds"]) or "-",
        **{name: with_spread(found[f"{key}_mean"], found[f"{key}_std"]) for key, name in attacks.items()},
        "bytes down": size(found["bytes_down_mean"]),
        "bytes up": size(found["bytes_up_mean"]),
        "peak / budget": percent(found["max_peak_over_budget"], 1) if found["enforced"] else "not enforced",
        "largest peak": size(found["largest_measured_peak"]),
        **({"in evaluation": size(found["largest_evaluation_peak"])} if evaluated else {}),
        "clients failed": f"{found['clients_failed']} of {found['clients_asked']}" if rounds[-1] else "-",
        "time": duration(found["seconds_mean"]),
        "simulated time": duration(found["simulated_seconds_mean"]),
    }


def with_spread(fraction: float | None, deviation: float | None) -> str:
    """Format as `70.00% ± 10.00%`."""
    return percent(fraction) + (f" ± {percent(deviation)}" if deviation is not None else "")


def duration(seconds: float | None) -> str:
    """Format seconds."""
    return "-" if seconds is None else display.format_seconds(seconds)


def size(amount: float | None) -> str:
    """Format bytes."""
    return "-" if amount is None else format_bytes(round(amount))


def write_curves(groups: Sequence[Group], path: Path) -> Path:
    """Write one page with accuracy over rounds and over bytes. Raises ReportError without plotly."""
    from piecework.page import Section, page, sections_html

    caption = (
        "Line: mean of the runs of a group that were evaluated in the round; band: from the lowest to the highest."
    )
    of_bytes = "The same, over the mean bytes of training messages (down and up, all clients) until the round."
    shown = []
    for key, name in ACCURACIES.items():
        if any(run.curves[key] for group in groups for run in group.runs):
            shown += [
                Section(f"{name} over rounds", caption, curves_figure(groups, key, over_bytes=False)),
                Section(f"{name} over bytes", of_bytes, curves_figure(groups, key, over_bytes=True)),
            ]
    shown = shown or [Section("Accuracy", "No round of these runs was evaluated.")]
    write_atomically(path, page("Piecework: runs compared", f"<h1>Runs compared</h1>{sections_html(shown)}").encode())
    return path


def curves_figure(groups: Sequence[Group], key: str, *, over_bytes: bool) -> Any:
    """Draw a line and a band per group for the record key `key`."""
    from piecework.page import COLOURS, graph_objects, line

    figure = graph_objects().Figure()
    for i, group in enumerate(groups):
        points, name = mean_curve(group, key, over_bytes), escape(group.label).replace(" ", "<br>")
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
    return figure.update_yaxes(title=ACCURACIES[key].lower(), tickformat="~%", rangemode="nonnegative")


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
