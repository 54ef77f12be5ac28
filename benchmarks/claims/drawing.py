"""The pictures of a claim as SVG files, which are the same bytes each time with one version of matplotlib."""

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims.pictures import Line, Panel, Picture, apart

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito's, without the yellow
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
MARKS = ("o", "s", "^")
INK, GREY, PALE = "#24292f", "#6e7781", "#d0d7de"
LINE = 0.155  # inches of a line of text
DOTS = "dot: mean over the seeds; bar: from the lowest to the highest; grey: bound, not realistic here"
PAPER, EMPTY = "; hollow diamond: the paper's figure", "; empty: not a row of this case"
# Letters stay letters, ids do not depend on the time, and every point is kept.
STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "piecework", "path.simplify": False},
    **{"font.size": 8, "font.sans-serif": ["DejaVu Sans"]},
}


def draw(picture: Picture, path: Path) -> None:
    """Write a picture as SVG."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(rect=(0, 0, 0.97, 1))  # letters are wider in some browsers
        figure = Figure(layout=layout, facecolor="white")
        (draw_curves if picture.kind == "curves" else draw_dots)(figure, picture)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None, "Title": picture.title})
    path.write_text(short(drawn.getvalue()), encoding="utf-8")


def short(text: str) -> str:
    """Return a picture's text with two decimal places, each path in a line, no indentation and no turns by nothing."""
    text = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text)
    return re.sub(r"\n +", "\n", re.sub(r" ?\n(?=[LCQz\"])", " ", text))


def look(line: Line) -> dict[str, Any]:
    """Return the colour, the dashes and the mark of a row."""
    if line.bound:
        return {"color": GREY, "linestyle": DASHES[line.style % len(DASHES)], "marker": "D"}
    turn = (line.style // len(COLOURS) + line.variant) % len(DASHES)
    return {"color": COLOURS[line.style % len(COLOURS)], "linestyle": DASHES[turn], "marker": MARKS[turn]}


def prepare(axes: Any, panel: Panel, number: int) -> None:
    """Give axes the panel's ranges and labels. The ids let a reader of the file find the axes' box and the curves."""
    axes.set(xlabel=panel.label, xlim=panel.x, ylim=panel.y)
    axes.set_title(panel.title, fontsize=9)
    axes.patch.set_gid(f"panel-{number}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=PALE, linewidth=0.5)
    axes.set_axisbelow(True)


def draw_curves(figure: Any, picture: Picture) -> None:
    """Draw panels of curves beside and below each other, with the rows' names to the right of the last one."""
    panels = picture.panels
    across = across_of(panels)
    down = -(-len(panels) // across)
    height = max(3.4 if down == 1 else 2.7, 0.9 + LINE * len(panels[-1].lines))
    figure.set_size_inches(2.4 * across + 1.8 if len(panels) > 1 else 5.6, height * down)
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for number, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
        axes.set_xscale("log")
        prepare(axes, panel, number)
        axes.set_xticks(places := ticks(*panel.x), labels=[f"{place:,g}" for place in places])
        axes.minorticks_off()
        axes.tick_params(labelleft=number % across == 0)
        for line in panel.lines:
            end = {"markevery": [-1], "markersize": 4, "gid": f"panel-{number}-{line.id}", "clip_on": False}
            axes.plot(*zip(*line.points, strict=True), **look(line), linewidth=1.3, **end)
        axes.text(0.98, 0.02, panel.note, color=GREY, fontsize=7, ha="right", va="bottom", transform=axes.transAxes)
        if number % across == 0:
            axes.set_ylabel(picture.y_label)
    name_curves(axes, panels[-1], (0.01 if len(panels) > 1 else 0.006, LINE / (height - 0.7)))


def across_of(panels: Sequence[Panel]) -> int:
    """Return how many panels stand beside each other: at most three."""
    return 2 if len(panels) == 4 else min(3, len(panels))


def ticks(low: float, high: float) -> list[float]:
    """Return the ticks of a logarithmic axis: 1, 10, 100, ...; over two decades also 3, 30, ...; within one 1, 2, 5, 10, ..."""
    decades = math.log10(high / low)
    steps = (1, 2, 5) if decades <= 1.2 else (1, 3) if decades <= 2.4 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [place for power in powers for step in steps if low <= (place := step * 10.0**power) <= high]


def name_curves(axes: Any, panel: Panel, units: tuple[float, float]) -> None:
    """Write the rows' names to the right of the axes, each joined to the height at which its curve ends.

    `units` are a small fraction of the axes' width, and a line's height as a fraction of theirs.
    """
    ends = [panel.place(line.points[-1])[1] for line in panel.lines]
    unit, gap = units
    place = {"transform": axes.transAxes, "clip_on": False}
    for line, end, height in zip(panel.lines, ends, apart(ends, gap, 1.0), strict=True):
        style = look(line) | {"linewidth": 1.3, "markevery": [1], "markersize": 4}
        left, *path, right = (1 + unit * at for at in (0, 3, 7, 10, 22))
        axes.plot([left, *path], [end, end, height, height], color=style["color"], linewidth=0.6, **place)
        axes.plot([path[-1], right], [height, height], **style, **place)
        axes.text(right + 3 * unit, height, line.name, color=GREY if line.bound else INK, va="center", **place)


def draw_dots(figure: Any, picture: Picture) -> None:
    """Draw a panel of dots for each case, with a row's dots at the same height in all panels of a line."""
    panels = picture.panels
    across = across_of(panels)
    down = -(-len(panels) // across)
    names = {line.height: line.name for panel in panels for line in panel.lines}
    figure.set_size_inches(2.3 * across + 1.8, down * (0.7 + LINE * len(names)) + 0.2)
    lines = [line for panel in panels for line in panel.lines]
    papers, empty = any(line.paper is not None for line in lines), len(lines) < len(names) * len(panels)
    figure.supxlabel(DOTS + PAPER * papers + EMPTY * empty, fontsize=6, color=GREY)
    grid = figure.subplots(down, across, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_visible(False)
            continue
        prepare(axes, panels[number], number)
        axes.set_yticks(list(names), labels=names.values() if number % across == 0 else [""] * len(names))
        axes.tick_params(axis="y", left=False)
        axes.grid(visible=False, axis="y")
        guides = [point for y in names for point in ((panels[number].x[0], y), (panels[number].x[1], y), (math.nan, y))]
        axes.plot(*zip(*guides, strict=True), color=PALE, linewidth=0.5, zorder=1)
        for line in panels[number].lines:
            draw_dot(axes, line, f"panel-{number}-{line.id}")


def draw_dot(axes: Any, line: Line, gid: str) -> None:
    """Draw a row's dot with the range of its seeds, and the paper's figure as a hollow diamond."""
    colour = GREY if line.bound else COLOURS[0]
    for x, y in line.points:
        if line.low != line.high:
            axes.plot([line.low, line.high], [y, y], color=colour, linewidth=1.5, clip_on=False)
        axes.plot(x, y, "D" if line.bound else "o", color=colour, markersize=4, gid=gid, clip_on=False)
    if line.paper is not None:
        hollow = {"color": COLOURS[1], "markerfacecolor": "none", "linestyle": ""}
        axes.plot(line.paper, line.height, marker="d", markersize=5, **hollow, gid=f"{gid}-paper", clip_on=False)
    if line.note:
        axes.text(
            0.02, line.height, line.note, transform=axes.get_yaxis_transform(), color=GREY, va="center", fontsize=7
        )
