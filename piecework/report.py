"""One HTML page a run, readable without a network: tables and figures from the round records.

Figures are aggregated, so the page stays small beside the plotly.js in it, which is there once. Everything that comes
from settings or records is escaped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from device_profiles.profile import format_bytes
from piecework import display
from piecework.display import Record, percent
from server_app.records import RunDir, write_atomically

# Okabe and Ito's colours, which stay apart for colour-blind readers; yellow is too pale on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#8A8A8A")
DASHES = ("solid", "dash", "dot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "pentagon")

STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; background: #fff;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; break-after: avoid; }
h1 small { font-size: .9rem; font-weight: normal; padding: .15rem .6rem; border: 1px solid; border-radius: 1rem; }
.completed { color: #00614a; } .failed { color: #a33d00; } .unfinished { color: #57606a; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem 1rem; border-left: 4px solid #d55e00;
  background: #fdf3ec; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid #e3e6ea; }
th, td:first-child, .memory td { white-space: nowrap; } td { overflow-wrap: anywhere; }
tbody th { font-weight: normal; color: #57606a; }
p { color: #57606a; margin: .2rem 0 .6rem; } section { break-inside: avoid; } summary { cursor: pointer; }
@media print { body { margin: 0; zoom: .74; } details::details-content { content-visibility: visible; } }
"""
LAYOUT = {"template": "plotly_white", "height": 340, "margin": {"t": 25, "r": 10, "b": 50, "l": 70}}
LAYOUT |= {"font": {"family": "system-ui, sans-serif", "size": 13}, "showlegend": True}
# No source but the page itself: a mistake would show as an empty figure, not as a request.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class ReportError(ValueError):
    """A page cannot be made."""


@dataclass(frozen=True)
class Section:
    """A heading, what the figure shows, the figure (None: there is nothing to show), and HTML below it."""

    heading: str
    caption: str
    figure: Any = None
    below: str = ""


def write_report(run_dir: RunDir) -> Path:
    """Write `<run>/report.html`. Raises CheckpointError where there is no run, ReportError without plotly."""
    settings, rounds = run_dir.settings(), run_dir.rounds()
    status, reason, seconds = display.how_it_ended(run_dir, rounds)
    parts = [
        f'<h1>{escape(run_dir.path.name)} <small class="{escape(status)}">{escape(status)}</small></h1>',
        f"<pre>{escape(reason)}</pre>" if reason else "",
        table(overview(settings, rounds, seconds)),
        sections_html(sections(rounds) if rounds else [Section("Rounds", "No round was finished.")]),
        "<h2>Settings</h2><details><summary>all settings of the run</summary>",
        table((key, str(value)) for key, value in settings.items()),
        "</details>",
    ]
    path = run_dir.path / "report.html"
    write_atomically(path, page(f"{run_dir.path.name}: Piecework", "\n".join(parts)).encode())
    return path


def overview(settings: Record, rounds: Sequence[Record], seconds: float) -> list[tuple[str, str]]:
    """The run in a few rows."""
    evaluated, total = display.accuracies(rounds), display.totals(rounds)
    peak = percent(display.peak_over_budget(rounds)) if display.is_enforced(rounds) else "not enforced"
    setting = {key: str(settings.get(key, "-")) for key in ("strategy", "model", "dataset", "num-rounds")}
    clients, a_round = settings.get("clients") or "all", settings.get("clients-per-round") or "all"
    return [
        ("Strategy", setting["strategy"]),
        ("Model", f"{setting['model']}, width {settings.get('model-width', 1.0)}"),
        ("Data set", setting["dataset"]),
        ("Clients", f"{clients}, {a_round} a round"),
        ("Rounds", f"{len(rounds)} of {setting['num-rounds']}"),
        ("Accuracy", f"last {percent(evaluated[-1])}, best {percent(max(evaluated))}" if evaluated else "-"),
        ("Requests", f"{total['asked']} clients asked, {total['answered']} answered, {total['failed']} failed"),
        ("Bytes down / up", f"{format_bytes(total['bytes_down'])} / {format_bytes(total['bytes_up'])}"),
        ("Bytes for evaluation", format_bytes(total["bytes_evaluation"])),
        ("Largest peak / budget", peak),
        ("Time", display.format_seconds(seconds)),
        ("Simulated time", display.simulated_time(rounds)),
    ]


def sections(rounds: Sequence[Record]) -> list[Section]:
    """The figures of a run with at least one round."""
    by_device = device_figure(rounds)
    failures = [c for r in rounds for c in r["clients"] if c["status"] != "ok"]
    simulated = [r.get("simulated_seconds", 0.0) for r in rounds]
    return [
        Section("Accuracy and loss", "On the central test data; training loss: mean of the clients.", curves(rounds)),
        Section(
            "Validation accuracy by device class",
            "After local training, before averaging, on the clients' own validation shares; over all validation examples of "
            "the clients that a class had in the round."
            if by_device
            else "No client reported a validation accuracy.",
            by_device,
        ),
        Section(
            "Training memory by client",
            "Each client in the round in which its measured peak came closest to its budget."
            + (
                ""
                if display.is_enforced(rounds)
                else " This run's memory-model decides, but its budgets are not enforced."
            ),
            memory_figure(rounds),
            f'<div class="memory">{table(display.memory_rows(rounds), display.MEMORY_COLUMNS)}</div>',
        ),
        Section("Bytes a round", "Training messages of all clients; evaluation messages apart.", bytes_figure(rounds)),
        Section(
            "Failures",
            "Clients that were asked and whose answer did not enter the model." if failures else "No client failed.",
            failure_figure(rounds) if failures else None,
            table(display.reasons(rounds), ("status", "count", "reason (the first of its kind)")) if failures else "",
        ),
        Section(
            "Simulated seconds a round",
            "The slowest client's time by the fleet's speeds and bandwidths, not the time of this emulation."
            if any(simulated)
            else "No simulated times were recorded.",
            bars(rounds, {"seconds": simulated}, "seconds") if any(simulated) else None,
        ),
    ]


def curves(rounds: Sequence[Record]) -> Any:
    """Accuracy and loss side by side; rounds that were not evaluated have no point."""
    from plotly.subplots import make_subplots

    figure = make_subplots(cols=2, horizontal_spacing=0.12)
    lines = (
        ("accuracy", "test accuracy", 1),
        ("client_accuracy", "accuracy on the clients", 1),
        ("loss", "test loss", 2),
        ("train_loss", "training loss", 2),
    )
    for i, (key, name, column) in enumerate(lines):
        points = [(r["round"], r[key]) for r in rounds if r[key] is not None]
        if points:
            figure.add_trace(line(points, name, i), col=column, row=1)
    figure.update_yaxes(title="accuracy", tickformat="~%", rangemode="nonnegative", col=1)
    figure.update_yaxes(title="loss", rangemode="tozero", col=2)
    return over_rounds(figure, rounds)


def device_figure(rounds: Sequence[Record]) -> Any:
    """None where no round has a figure."""
    figure = graph_objects().Figure()
    for i, device in enumerate(devices(rounds)):
        points = [(r["round"], r["accuracy_by_device"][device]) for r in rounds if device in r["accuracy_by_device"]]
        if points:
            figure.add_trace(line(points, device, i))
    figure.update_yaxes(title="validation accuracy", tickformat="~%", rangemode="nonnegative")
    return over_rounds(figure, rounds) if figure.data else None


def memory_figure(rounds: Sequence[Record]) -> Any:
    """Bars for measured peaks, marks for predictions and budgets; what a refused client would have needed."""
    rows = display.closest_to_budget(rounds)
    needed = {row["client"]: 0 for row in rows}
    for row in (row for record in rounds for row in record["clients"]):
        needed[row["client"]] = max(needed[row["client"]], row["needed"])
    figure, width = graph_objects().Figure(), max(4, min(30, 330 // len(rows)))
    for i, device in enumerate(devices(rounds)):
        own = {str(row["client"]): row["measured_peak"] for row in rows if row["device"] == device}
        figure.add_bar(x=[*own], y=[*own.values()], name=escape(device), marker_color=COLOURS[i % len(COLOURS)])
    marks = (
        ("budget", "line-ew-open", width, {row["client"]: row["budget"] for row in rows}),
        ("predicted peak", "diamond-open", min(8, width + 1), {row["client"]: row["predicted_peak"] for row in rows}),
        ("needed (refused)", "x-thin-open", min(9, width + 1), needed),
    )
    for name, symbol, size, values in marks:
        seen = {str(client): value for client, value in values.items() if value}
        marker = {"symbol": symbol, "size": size, "color": "#1b1f24", "line": {"width": 2}}
        if seen:
            figure.add_scatter(x=[*seen], y=[*seen.values()], name=name, mode="markers", marker=marker)
    order = [str(row["client"]) for row in rows]
    figure.update_xaxes(title="client", type="category", categoryorder="array", categoryarray=order, nticks=25)
    figure.update_yaxes(title="training memory", tickformat="~s", ticksuffix="B", rangemode="tozero")
    return figure.update_layout(barmode="overlay", bargap=0.3)


def bytes_figure(rounds: Sequence[Record]) -> Any:
    """Stacked: down, up, evaluation."""
    names = {"down": "bytes_down", "up": "bytes_up", "evaluation": "bytes_evaluation"}
    values = {name: [r[key] for r in rounds] for name, key in names.items()}
    figure = bars(rounds, {name: v for name, v in values.items() if any(v)}, "bytes")
    return figure.update_yaxes(tickformat="~s", ticksuffix="B")


def failure_figure(rounds: Sequence[Record]) -> Any:
    """Stacked by status."""
    statuses = sorted({c["status"] for r in rounds for c in r["clients"] if c["status"] != "ok"})
    counts = {s: [sum(c["status"] == s for c in r["clients"]) for r in rounds] for s in statuses}
    return bars(rounds, counts, "clients").update_yaxes(tickformat="d")


def graph_objects() -> Any:
    """plotly, of which only the pages know. Raises ReportError."""
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise ReportError("figures need plotly: pip install 'piecework[report]'") from error
    return plotly.graph_objects


def devices(rounds: Sequence[Record]) -> list[str]:
    """Names of the device classes; the place of one is its colour."""
    return sorted({client["device"] for record in rounds for client in record["clients"]})


def line(points: Sequence[tuple[float, float]], name: str, number: int) -> Any:
    """A line that differs from its neighbours in colour and in marks, while those can be told apart."""
    style = {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)]}
    x, y = zip(*points, strict=True)
    mode = "lines+markers" if len(x) <= 40 else "lines"
    symbol = {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 6}
    return graph_objects().Scatter(x=x, y=y, name=escape(name), mode=mode, line=style, marker=symbol)


def bars(rounds: Sequence[Record], stacks: dict[str, list[Any]], title: str) -> Any:
    """Stacked bars over rounds."""
    figure = graph_objects().Figure()
    for i, (name, values) in enumerate(stacks.items()):
        figure.add_bar(x=[r["round"] for r in rounds], y=values, name=escape(name), marker_color=COLOURS[i])
    figure.update_yaxes(title=title, rangemode="tozero")
    figure.update_traces(marker_line_width=0)  # white edges would be all that is seen of thin bars
    return over_rounds(figure, rounds).update_layout(barmode="stack", bargap=0.3 if len(rounds) <= 60 else 0)


def over_rounds(figure: Any, rounds: Sequence[Record]) -> Any:
    """Whole rounds on the x axis, of which there may be one."""
    last = rounds[-1]["round"]
    step = next(s * 10**k for k in range(9) for s in (1, 2, 5) if s * 10**k * 10 >= last)
    return figure.update_xaxes(title="round", range=[0.5, last + 0.5], tick0=step, dtick=step)


def sections_html(sections: Iterable[Section]) -> str:
    """The sections below each other; plotly.js goes with the first figure."""
    parts, script = [], True
    for number, section in enumerate(sections):
        parts.append(f"<section><h2>{escape(section.heading)}</h2><p>{escape(section.caption)}</p>")
        if section.figure is not None:
            section.figure.update_layout(LAYOUT)
            options = {"full_html": False, "include_plotlyjs": script, "div_id": f"figure-{number}"}
            parts.append(section.figure.to_html(**options, config={"displayModeBar": False, "responsive": True}))
            script = False
        parts.append(f"{section.below}</section>")
    return "\n".join(parts)


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """With a head row, or with the first cell of each row as its head."""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    tag = "td" if head else "th"
    body = (f"<tr><{tag}>{escape(a)}</{tag}>{''.join(f'<td>{escape(c)}</td>' for c in rest)}</tr>" for a, *rest in rows)
    return f"<table>{top}<tbody>{''.join(body)}</tbody></table>"


def page(title: str, body: str) -> str:
    """A page that needs nothing but itself."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )
