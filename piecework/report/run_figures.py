"""The figures of one run's page: curves over rounds, memory by client, bytes, failures."""

from collections.abc import Sequence
from typing import Any

from piecework.device_profiles.profile import is_limit
from piecework.report import display
from piecework.report.display import Record
from piecework.report.page import (
    COLOURS,
    MARKS,
    bars,
    escape_label,
    graph_objects,
    line,
    mark_stages,
    over_rounds,
    subplots,
)


def draw_curves(rounds: Sequence[Record]) -> Any:
    """Draw accuracy above loss; rounds without evaluation have no point."""
    figure = subplots(2)
    lines = (
        ("accuracy", "mean accuracy on own test data" if rounds[-1].get("personal") else "test accuracy", 1),
        ("client_accuracy", "accuracy on the clients", 1),
        ("loss", "test loss", 2),
        ("train_loss", "training loss", 2),
    )
    for i, (key, name, panel) in enumerate(lines):
        points = [(r["round"], r[key]) for r in rounds if r[key] is not None]
        if points:
            figure.add_trace(line(points, name, i), row=panel, col=1)
    figure.update_yaxes(title="accuracy", tickformat="~%", rangemode="nonnegative", maxallowed=1, row=1)
    figure.update_yaxes(title="loss", rangemode="tozero", row=2)
    return mark_stages(over_rounds(figure, rounds), rounds)


def device_figure(rounds: Sequence[Record]) -> Any:
    """Draw validation accuracy by device class."""
    figure = graph_objects().Figure()
    for i, device in enumerate(devices(rounds)):
        points = [(r["round"], r["accuracy_by_device"][device]) for r in rounds if device in r["accuracy_by_device"]]
        if points:
            figure.add_trace(line(points, device, i))
    figure.update_yaxes(title="validation accuracy", tickformat="~%", rangemode="nonnegative")
    return over_rounds(figure, rounds)


def memory_figure(rounds: Sequence[Record]) -> Any:
    """Draw measured peaks as bars, and predictions, budgets and the needs of refused clients as marks."""
    rows = display.closest_to_budget(rounds)
    needed = {row["client"]: 0 for row in rows}
    for row in (row for record in rounds for row in record["clients"]):
        needed[row["client"]] = max(needed[row["client"]], row["needed"])
    figure, width = graph_objects().Figure(), max(4, min(30, 330 // len(rows)))
    for i, device in enumerate(devices(rounds)):
        own = {str(row["client"]): row["measured_peak"] for row in rows if row["device"] == device}
        figure.add_bar(x=[*own], y=[*own.values()], name=escape_label(device), marker_color=COLOURS[i % len(COLOURS)])
    marks = (
        ("budget", "line-ew-open", width, {row["client"]: row["budget"] for row in rows if is_limit(row["budget"])}),
        ("predicted peak", "diamond-open", min(8, width + 1), {row["client"]: row["predicted_peak"] for row in rows}),
        ("in evaluation", "circle-open", min(8, width + 1), {r["client"]: r.get("evaluation_peak", 0) for r in rows}),
        ("needed (refused)", "x-thin-open", min(9, width + 1), needed),
    )
    for name, symbol, size, values in marks:
        seen = {str(client): value for client, value in values.items() if value}
        marker = {"symbol": symbol, "size": size, "color": MARKS, "line": {"width": 2}}
        if seen:
            figure.add_scatter(x=[*seen], y=[*seen.values()], name=name, mode="markers", marker=marker)
    order = [str(row["client"]) for row in rows]
    figure.update_xaxes(title="client", type="category", categoryorder="array", categoryarray=order)
    figure.update_yaxes(title="training memory", tickformat="~s", ticksuffix="B", rangemode="tozero")
    return figure.update_layout(barmode="overlay", bargap=0.3)


def bytes_figure(rounds: Sequence[Record]) -> Any:
    """Draw stacked bytes: down, up, evaluation, and before a stage."""
    names = {"down": "bytes_down", "up": "bytes_up", "evaluation": "bytes_evaluation", "before a stage": "bytes_query"}
    values = {name: [r.get(key, 0) for r in rounds] for name, key in names.items()}
    figure = bars(rounds, {name: v for name, v in values.items() if any(v)}, "bytes")
    return figure.update_yaxes(tickformat="~s", ticksuffix="B")


def failure_figure(rounds: Sequence[Record]) -> Any:
    """Draw failures stacked by status."""
    statuses = sorted({c["status"] for r in rounds for c in r["clients"] if c["status"] != "ok"})
    counts = {s: [sum(c["status"] == s for c in r["clients"]) for r in rounds] for s in statuses}
    return bars(rounds, counts, "clients").update_yaxes(tickformat="d")


def devices(rounds: Sequence[Record]) -> list[str]:
    """List the device classes; the position of a name determines its colour."""
    return sorted({client["device"] for record in rounds for client in record["clients"]})


def rate_figure(rounds: Sequence[Record], points: Sequence[tuple[float, float]]) -> Any:
    """Draw the learning rate over rounds."""
    figure = over_rounds(graph_objects().Figure([line(points, "learning rate", 0)]), rounds)
    figure.update_yaxes(title="learning rate", rangemode="tozero")
    return mark_stages(figure, rounds)


def disk_figure(rounds: Sequence[Record], uses: Sequence[Record]) -> Any:
    """Draw what paged steps read and wrote, all together and by the client that wrote most."""
    names = {"read": "read", "written": "written", "written by one client": "most_written"}
    figure = graph_objects().Figure()
    for i, (name, key) in enumerate(names.items()):
        points = [(record["round"], use.get(key, 0)) for record, use in zip(rounds, uses, strict=True)]
        figure.add_trace(line(points, name, i))
    figure.update_yaxes(title="bytes", tickformat="~s", ticksuffix="B", rangemode="tozero")
    return over_rounds(figure, rounds)
