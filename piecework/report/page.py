"""Building blocks of HTML pages: sections with a figure each, tables, and a page that is readable without a network.

Figures are aggregated, so a page is hardly larger than its one copy of plotly.js. Everything that comes from settings or
records is escaped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape, unescape
from itertools import pairwise
from textwrap import wrap
from typing import Any

from piecework.report.display import Record
from piecework.report.in_words import in_words

# Okabe and Ito's colours, which colour-blind readers can distinguish. Yellow is too pale on white, and black is nothing on a
# dark page: brown and grey are seen on both.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#966F4A", "#8A8A8A")
MARKS = "#7d858f"  # what is marked on bars, on a light and on a dark page
DASHES = ("solid", "dash", "dot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "pentagon")

# Colours are variables, so that a page follows the system's light or dark mode; paper is always light. What scrolls shows a
# shadow, or fades if it is a drawing, at the edge beyond which there is more: backgrounds that scroll along hide it elsewhere.
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --page: #fff; --panel: #f5f7f9; --line: #dfe3e8;
  --good: #00614a; --bad: #a33d00; --bad-panel: #fdf3ec; --bad-line: #d55e00; --link: #0060a8;
  --full: #0072b2; --on-full: #fff; --on-half: #1b1f24; --empty: #eef2f5; --shade: rgb(27 31 36 / .3); }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #a3adb8; --page: #12161b;
  --panel: #1b2128; --line: #333b45; --good: #4cc9a4; --bad: #ff9d5c; --bad-panel: #2b1d14; --bad-line: #d55e00;
  --link: #6cb6ff; --full: #56b4e9; --on-full: #0b0e11; --on-half: #0b0e11; --empty: #20272f;
  --shade: rgb(228 232 236 / .4); } }
* { box-sizing: border-box; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; break-after: avoid; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1rem 0 0; }
h1 small { font-size: .9rem; font-weight: normal; padding: .15rem .6rem; border: 1px solid; border-radius: 1rem;
  white-space: nowrap; vertical-align: middle; }
.completed { color: var(--good); } .failed { color: var(--bad); } .unfinished, .stopped { color: var(--soft); }
a { color: var(--link); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem 1rem; border-left: 4px solid var(--bad-line);
  background: var(--bad-panel); }
.scroll { overflow-x: auto; } .scroll thead ~ tbody td { overflow-wrap: normal; }
.scroll { background: linear-gradient(to right, var(--page) 1rem, transparent) left / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--page) 1rem, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / 1rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / 1rem 100% no-repeat scroll; }
.drawn { display: flex; align-items: flex-start; background: none; }
.drawn::after { content: ""; position: sticky; right: 0; flex: none; width: 1rem; align-self: stretch;
  background: linear-gradient(to right, transparent, var(--page)); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); }
th, td:first-child, .memory td, .figures td, .stages td:not(:last-child) { white-space: nowrap; }
td { overflow-wrap: anywhere; } .stages td:last-child { min-width: 9rem; }
tbody th { font-weight: normal; color: var(--soft); }
p { color: var(--soft); margin: .2rem 0 .6rem; overflow-wrap: anywhere; }
p strong { color: var(--ink); } p.says { color: var(--ink); font-size: 1.1rem; margin: .2rem 0 1rem; }
section { break-inside: avoid; } summary { cursor: pointer; } figure { margin: 0; }
svg.grid { display: block; height: auto; font-size: 12px; } .grid text { fill: var(--ink); }
.grid .on-full { fill: var(--on-full); } .grid .on-half { fill: var(--on-half); }
.grid .full { fill: var(--full); } .grid .empty { fill: var(--empty); }
.js-plotly-plot text:not(.hoverlayer text) { fill: var(--ink) !important; }
.js-plotly-plot :is(.gridlayer, .zerolinelayer) path { stroke: var(--line) !important; }
@media screen and (max-width: 46rem) { thead th { white-space: normal; } th, td { padding-right: .8rem; }
  .figures td:nth-child(2) { white-space: normal; min-width: 7rem; } }
@media print { body { margin: 0; zoom: .74; } details::details-content { content-visibility: visible; } }
"""
LAYOUT = {"template": "plotly_white", "margin": {"t": 25, "r": 10, "b": 50, "l": 70}, "showlegend": True}
# What lies behind is the page, in its own colour.
LAYOUT |= {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
LAYOUT |= {"font": {"family": "system-ui, sans-serif", "size": 13}}
# Below the panels: beside them, it would leave none of a telephone's width to the curves.
LAYOUT |= {"legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"}}
LAYOUT |= {"hoverlabel": {"namelength": -1}}  # what is folded already
PANEL, LEGEND_LINE = 270, 20  # pixels of the height of a panel, and of a line of the legend
NARROW = 36  # letters of the legend in a telephone's width
# Only the page itself is a source: a mistake would show as an empty figure, not as a request.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class ReportError(ValueError):
    """A page cannot be made."""


@dataclass(frozen=True)
class Section:
    """A heading, a caption, what draws the figure (None if there is nothing to show), and HTML below it."""

    heading: str
    caption: str
    figure: Callable[[], Any] | None = None
    below: str = ""

    @property
    def drawn(self) -> Any:
        """The figure."""
        return None if self.figure is None else self.figure()


def graph_objects() -> Any:
    """Import plotly, which only the pages need. Raises ReportError."""
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise ReportError(
            "figures need plotly: pip install 'piecework[report]', or leave them out: --without-plotly"
        ) from error
    return plotly.graph_objects


def subplots(count: int, **layout: Any) -> Any:
    """Return a figure with plots below each other, so that they have the whole width. Raises ReportError."""
    graph_objects()
    from plotly.subplots import make_subplots

    return make_subplots(rows=count, **{"vertical_spacing": 0.3 / count} | layout)


def fold(name: str) -> str:
    """Return an escaped name in lines that a telephone's width has room for; plotly cuts off what is longer."""
    lines = [part.strip() for text in name.split("<br>") for part in wrap(unescape(text), NARROW)]
    return "<br>".join(map(escape_label, lines))


def height(figure: Any) -> int:
    """Return the pixels that a figure needs: its panels, and a legend that a telephone folds."""
    names = [fold(str(trace.name)) for trace in figure.data if trace.name and trace.showlegend is not False]
    legend = sum(LEGEND_LINE * (1 + name.count("<br>")) for name in names) if len(figure.data) > 1 else 0
    needed = PANEL * max(1, len(list(figure.select_yaxes()))) + 70 + legend
    return max(needed, 2 * legend + 40)  # a legend that takes more than half is one that scrolls


def dress(figure: Any, **layout: Any) -> Any:
    """Give a figure what all figures of pages have: their layout, height, and names in a legend that a telephone can show."""
    for trace in figure.data:
        if trace.name:
            trace.name = fold(str(trace.name))
    # invisible ticks keep the numbers of both axes apart where these meet
    figure.update_xaxes(ticks="outside", ticklen=4, tickcolor="rgba(0,0,0,0)")
    figure.update_yaxes(ticks="outside", ticklen=4, tickcolor="rgba(0,0,0,0)")
    return figure.update_layout(LAYOUT, height=figure.layout.height or height(figure), **layout)


def escape_label(text: str) -> str:
    """Escape a text for plotly, which reads it as HTML but does not know the entities of quotation marks."""
    return escape(text, quote=False)


def line(points: Sequence[tuple[float, float | None]], name: str, number: int) -> Any:
    """Return a line whose colour and marks differ from its neighbours', as far as they can; gaps where y is None."""
    style = {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)]}
    x, y = zip(*points, strict=True)
    mode = "lines+markers" if len(x) <= 40 else "lines"
    symbol = {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 6}
    return graph_objects().Scatter(x=x, y=y, name=escape_label(name), mode=mode, line=style, marker=symbol)


def bars(rounds: Sequence[Record], stacks: dict[str, list[Any]], title: str) -> Any:
    """Return stacked bars over rounds."""
    figure = graph_objects().Figure()
    for i, (name, values) in enumerate(stacks.items()):
        figure.add_bar(x=[r["round"] for r in rounds], y=values, name=escape_label(name), marker_color=COLOURS[i])
    figure.update_yaxes(title=title, rangemode="tozero")
    figure.update_traces(marker_line_width=0)  # thin bars would show only their white edges
    return over_rounds(figure, rounds).update_layout(barmode="stack", bargap=0.3 if len(rounds) <= 60 else 0)


def over_rounds(figure: Any, rounds: Sequence[Record]) -> Any:
    """Show whole rounds on the x axis, even if there is only one."""
    last = rounds[-1]["round"]
    return figure.update_xaxes(title="round", range=[0.5, last + 0.5], **whole_steps(last))


def whole_steps(last: int) -> dict[str, int]:
    """Return what an axis needs to have some ten whole numbers up to the last round."""
    step = next(s * 10**k for k in range(9) for s in (1, 2, 5) if s * 10**k * 10 >= last)
    return {"tick0": step, "dtick": step}


def mark_stages(figure: Any, rounds: Sequence[Record]) -> Any:
    """Draw a dashed line in every panel where one stage ended and the next began."""
    ends = [(a["round"] + b["round"]) / 2 for a, b in pairwise(rounds) if a["stage"] != b["stage"]]
    style = {
        "type": "line",
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"color": COLOURS[1], "dash": "dash", "width": 1.5},
    }
    axes = [axis.plotly_name.removeprefix("xaxis") for axis in figure.select_xaxes()]
    # all at once: plotly's add_vline takes about 20 ms each
    lines = [style | {"xref": f"x{n}", "yref": f"y{n} domain", "x0": at, "x1": at} for n in axes for at in ends]
    return figure.update_layout(shapes=lines)


def sections_html(sections: Iterable[Section], *, plotly: bool = True) -> str:
    """Return the sections below each other; the first figure includes plotly.js.

    Without `plotly` no figure is drawn: sections that have nothing else are named in a sentence.
    """
    parts, script, left_out = [], True, []
    for number, section in enumerate(sections):
        if section.figure is not None and not plotly:
            left_out.append(section.heading)
            if not section.below:
                continue
        parts.append(f"<section><h2>{escape(section.heading)}</h2><p>{escape(section.caption)}</p>")
        if section.figure is not None and plotly:
            parts.append(figure_html(section.drawn, section.heading, number, script))
            script = False
        parts.append(f"{section.below}</section>")
    if left_out:
        parts.append(f"<p>Figures that this page leaves out (--without-plotly): {escape(', '.join(left_out))}.</p>")
    return "\n".join(parts)


def figure_html(figure: Any, heading: str, number: int, script: bool) -> str:
    """Return a figure with its text alternative, and with plotly.js if that is asked for."""
    said = in_words(figure, heading)
    dress(figure, showlegend=len(figure.data) > 1)
    options = {"full_html": False, "include_plotlyjs": script, "div_id": f"figure-{number}"}
    drawn = figure.to_html(**options, config={"displayModeBar": False, "responsive": True})
    return f'<figure role="img" aria-label="{escape(said)}">{drawn}</figure>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table with a head row, or with the first cell of each row as its head; a wide one scrolls by itself."""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    tag = "td" if head else "th"
    body = (f"<tr><{tag}>{escape(a)}</{tag}>{''.join(f'<td>{escape(c)}</td>' for c in rest)}</tr>" for a, *rest in rows)
    return f'<div class="scroll"><table>{top}<tbody>{"".join(body)}</tbody></table></div>'


def page(title: str, body: str) -> str:
    """Return a self-contained page."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )
