"""SpaFL in a run's page: densities, thresholds, and which filters of a layer are pruned (the paper's Figure 3)."""

from collections.abc import Sequence
from typing import Any

from piecework.report.display import Record
from piecework.report.page import COLOURS, Section, graph_objects, line, over_rounds, panels, table
from piecework.report.prism_report import short

COLUMNS = ("layer", "filters", "density at first", "minimum", "at the end", "mean threshold")
PICTURES = 4  # layers whose filters are shown, the first ones
ROW = 190  # pixels per layer


def has_thresholds(rounds: Sequence[Record]) -> bool:
    """Return whether filters had thresholds."""
    return bool(rounds[-1].get("filters"))


def density_section(rounds: Sequence[Record]) -> Section:
    """Return the section of densities and thresholds over the rounds."""
    figure = panels(2)
    for i, name in enumerate(rounds[-1]["filters"]):
        for panel, key in ((1, "density"), (2, "threshold")):
            trace = line([(r["round"], r["filters"][name][key]) for r in rounds], short(name), i)
            figure.add_trace(trace.update(showlegend=panel == 1), row=panel, col=1)
    figure.update_yaxes(title="fraction of filters", range=[0, 1.02], row=1)
    figure.update_yaxes(title="mean threshold", rangemode="tozero", row=2)
    densities = [r["density"] for r in rounds if r["density"] is not None]
    caption = (
        "Above: filters that the clients of the round keep after training, the mean. Below: the server's thresholds."
    )
    if densities:
        caption += (
            f" Of all clients' models that were evaluated last, the mean density over layers is {densities[-1]:.1%}."
        )
    return Section(
        "Sparsity", caption, over_rounds(figure, rounds), f'<div class="stages">{table(rows(rounds), COLUMNS)}</div>'
    )


def pattern_section(rounds: Sequence[Record]) -> Section:
    """Return the section with a picture per layer: filters by rounds."""
    return Section(
        "Which filters are kept",
        "A row is a filter of the layer, a column a round. Darker cells are kept by more of the round's clients.",
        pattern_figure(rounds),
    )


def pattern_figure(rounds: Sequence[Record]) -> Any:
    """Draw heat maps below each other."""
    from plotly.subplots import make_subplots

    names = list(rounds[-1]["filters"])[:PICTURES]
    figure = make_subplots(
        rows=len(names), shared_xaxes=True, vertical_spacing=0.06, subplot_titles=[*map(short, names)]
    )
    for row, name in enumerate(names, start=1):
        kept = zip(*(r["filters"][name]["open"] for r in rounds), strict=True)
        picture = graph_objects().Heatmap(
            x=[r["round"] for r in rounds],
            z=[list(each) for each in kept],
            zmin=0,
            zmax=100,
            colorscale=[[0, "#ffffff"], [1, COLOURS[0]]],
            showscale=row == 1,
            colorbar={"title": "% of clients", "len": 0.9 / len(names), "y": 1, "yanchor": "top"},
        )
        figure.add_trace(picture, row=row, col=1)
        figure.update_yaxes(title="filter", row=row, col=1)
    over_rounds(figure, rounds).update_xaxes(title=None)
    return figure.update_xaxes(title="round", row=len(names), col=1).update_layout(height=ROW * len(names) + 60)


def rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return the initial, minimum and final density of each layer."""
    found = []
    for name, layer in rounds[-1]["filters"].items():
        measured = [r["filters"][name]["density"] for r in rounds if r["filters"][name]["density"] is not None]
        densities = [f"{value:.1%}" for value in (measured[0], min(measured), measured[-1])] if measured else ["-"] * 3
        found.append((short(name), str(len(layer["open"])), *densities, f"{layer['threshold']:.4g}"))
    return found
