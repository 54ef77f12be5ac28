"""SpaFL in a run's page: densities, thresholds, and which filters of a layer are pruned (the paper's Figure 3)."""

from collections.abc import Sequence

from piecework.strategies.panels import Cells, Curve, Panel, Plot, Record, layer_name

COLUMNS = ("layer", "filters", "density at first", "minimum", "at the end", "mean threshold")
PICTURES = 4  # layers whose filters are shown, the first ones


def panels(rounds: Sequence[Record], _settings: Record) -> list[Panel]:
    """Return a panel of densities and thresholds, and one of the filters that are kept; none if filters had no thresholds."""
    return [density_panel(rounds), pattern_panel(rounds)] if rounds[-1].get("filters") else []


def density_panel(rounds: Sequence[Record]) -> Panel:
    """Return the panel of densities and thresholds over the rounds."""
    density, threshold = (
        [Curve(layer_name(n), [(r["round"], r["filters"][n][key]) for r in rounds]) for n in rounds[-1]["filters"]]
        for key in ("density", "threshold")
    )
    sentence = (
        "Above: filters that the clients of the round keep after training, the mean. Below: the server's thresholds."
    )
    if measured := [r["density"] for r in rounds if r["density"] is not None]:
        sentence += (
            f" Of all clients' models that were evaluated last, the mean density over layers is {measured[-1]:.1%}."
        )
    plots = Plot("fraction of filters", density, top=1.02), Plot("mean threshold", threshold)
    return Panel("Sparsity", sentence, plots, COLUMNS, rows(rounds))


def pattern_panel(rounds: Sequence[Record]) -> Panel:
    """Return the panel with a picture per layer: filters by rounds."""
    pictures = [
        Cells(
            [r["round"] for r in rounds],
            [list(kept) for kept in zip(*(r["filters"][name]["open"] for r in rounds), strict=True)],
            "filter",
            full=100,
            unit="% of clients",
            title=layer_name(name),
        )
        for name in list(rounds[-1]["filters"])[:PICTURES]
    ]
    return Panel(
        "Which filters are kept",
        "A row is a filter of the layer, a column a round. Darker cells are kept by more of the round's clients.",
        pictures,
    )


def rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return the initial, minimum and final density of each layer."""
    found = []
    for name, layer in rounds[-1]["filters"].items():
        measured = [r["filters"][name]["density"] for r in rounds if r["filters"][name]["density"] is not None]
        densities = [f"{value:.1%}" for value in (measured[0], min(measured), measured[-1])] if measured else ["-"] * 3
        found.append((layer_name(name), str(len(layer["open"])), *densities, f"{layer['threshold']:.4g}"))
    return found
