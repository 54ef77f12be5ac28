"""Draw the panels that a method declares (strategies/panels.py): curves and cells as figures, and tables."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from piecework.report.display import Record
from piecework.report.page import (
    COLOURS,
    Section,
    escape_label,
    graph_objects,
    line,
    mark_stages,
    over_rounds,
    subplots,
    table,
)
from piecework.strategies.panels import Cells, Panel, Plot

PICTURE = 190  # pixels of a picture's height, where rounds are columns
# The paler, the more of the page is seen; cells without a value are the page itself.
BLUES = [[0.0, "rgba(0,114,178,0)"], [1.0, COLOURS[0]]]
SHADES = [[0.0, "rgba(0,114,178,0.1)"], [1.0, COLOURS[0]]]


def section(panel: Panel, rounds: Sequence[Record]) -> Section:
    """Return a panel as a section of the page."""
    figure = partial(figure_of, panel, rounds) if any(map(has_values, panel.plots)) else None
    below = f'<div class="stages">{table(panel.rows, panel.columns)}</div>' if panel.columns else ""
    return Section(panel.title, panel.sentence, figure, below)


def figure_of(panel: Panel, rounds: Sequence[Record]) -> Any:
    """Draw what a panel shows above its table."""
    plots = [plot for plot in panel.plots if isinstance(plot, Plot) and has_values(plot)]
    cells = [each for each in panel.plots if isinstance(each, Cells)]
    if plots:
        figure = draw_curves(plots, rounds)
    elif any(isinstance(x, str) for x in cells[0].x):
        figure = named_cells(cells[0])
    else:
        figure = draw_pictures(cells, rounds)
    return mark_stages(figure, rounds) if panel.stages else figure


def has_values(plot: Plot | Cells) -> bool:
    """Return whether a plot shows anything; cells always do."""
    return isinstance(plot, Cells) or any(y is not None for curve in plot.curves for _, y in curve.points)


def draw_curves(plots: Sequence[Plot], rounds: Sequence[Record]) -> Any:
    """Draw plots below each other. Curves of one name have one colour and one entry in the legend."""
    figure, names = over_rounds(subplots(len(plots)), rounds), dict[str, int]()
    for row, plot in enumerate(plots, start=1):
        for curve in plot.curves:
            known, number = curve.name in names, names.setdefault(curve.name, len(names))
            if all(value is None for _, value in curve.points):
                continue
            trace = line(curve.points, curve.name, number)
            if plot.marked and len(rounds) > 40:
                trace.update(mode="lines+markers", marker_size=3)
            figure.add_trace(trace.update(showlegend=False) if known else trace, row=row, col=1)
        limits = {"rangemode": "tozero"} if plot.top is None else {"range": [0, plot.top]}
        figure.update_yaxes(title=plot.y, **limits, row=row)
        if plot.x:
            figure.update_xaxes(title=plot.x, range=plot.ends, tick0=1, dtick=1, row=row)
    return figure


def draw_pictures(cells: Sequence[Cells], rounds: Sequence[Record]) -> Any:
    """Draw pictures below each other, whose columns are rounds."""
    titles = [escape_label(each.title) for each in cells]
    figure = subplots(len(cells), shared_xaxes=True, vertical_spacing=0.06, subplot_titles=titles)
    for row, each in enumerate(cells, start=1):
        picture = graph_objects().Heatmap(
            x=each.x,
            z=each.rows,
            zmin=0,
            zmax=each.full,
            colorscale=BLUES,
            showscale=row == 1,
            colorbar={"title": each.unit, "len": 0.9 / len(cells), "y": 1, "yanchor": "top"},
        )
        figure.add_trace(picture, row=row, col=1)
        figure.update_yaxes(title=each.y, row=row, col=1)
    over_rounds(figure, rounds).update_xaxes(title=None)
    return figure.update_xaxes(title="round", row=len(cells), col=1).update_layout(height=PICTURE * len(cells) + 60)


def named_cells(cells: Cells) -> Any:
    """Draw fractions as cells, whose columns have names."""
    figure = graph_objects().Figure()
    figure.add_heatmap(
        x=[escape_label(str(name)) for name in cells.x],
        y=list(range(len(cells.rows))),
        z=cells.rows,
        zmin=0,
        zmax=cells.full,
        colorscale=SHADES,
        colorbar={"tickformat": "~%", "thickness": 12},
        xgap=2,
        ygap=1,
        hovertemplate=f"%{{x}}, {cells.y} %{{y}}: %{{z:.1%}}<extra></extra>",
    )
    figure.update_xaxes(type="category", showgrid=False)
    return figure.update_yaxes(title=cells.y, autorange="reversed", tickformat="d", showgrid=False, zeroline=False)
