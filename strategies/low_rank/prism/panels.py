"""PriSM in a run's page: how many kernels the layers need, and which kernels were drawn (the paper's Figures 8 and 9)."""

from collections.abc import Sequence
from statistics import fmean

from piecework.strategies.panels import Curve, Panel, Plot, Record, layer_name

COLUMNS = ("layer", "kernels", "needed at first", "needed at the end", "clients per kernel, by tenths of the kernels")


def panels(rounds: Sequence[Record], _settings: Record) -> list[Panel]:
    """Return a panel of ranks over the rounds, and of draws; none if no sub-model was made of kernels."""
    if not rounds[-1].get("keep_ratios"):
        return []
    return [
        Panel(
            "Principal kernels",
            "Above: the fraction of a layer's kernels that it needs, 2 to the entropy of sigma_i / sum. Below: how many "
            "clients per round had a kernel, by tenths of the kernels, the largest singular values first; means over all "
            "rounds.",
            plots(rounds),
            COLUMNS,
            rows(rounds),
        )
    ]


def plots(rounds: Sequence[Record]) -> tuple[Plot, Plot]:
    """Return ranks above draws, with a curve for each layer."""
    names = list(rounds[-1]["layers"])
    ranks = [
        Curve(layer_name(n), [(r["round"], r["layers"][n]["rank"] / r["layers"][n]["kernels"]) for r in rounds])
        for n in names
    ]
    drawn = [Curve(layer_name(n), list(enumerate(draws(rounds, n), start=1))) for n in names]
    return (
        Plot("fraction of kernels needed", ranks, top=1.02),
        Plot("clients per kernel", drawn, x="tenth of the kernels", ends=(0.5, 10.5)),
    )


def draws(rounds: Sequence[Record], name: str) -> list[float]:
    """Return the clients per kernel in a round, for each tenth of a layer's kernels."""
    return [fmean(tenths) for tenths in zip(*(r["layers"][name]["drawn"] for r in rounds), strict=True)]


def rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return each layer's kernels, how many it needed at first and at the end, and how often they were drawn."""
    first, last = rounds[0]["layers"], rounds[-1]["layers"]
    return [
        (
            layer_name(name),
            str(layer["kernels"]),
            f"{first[name]['rank']:.1f}",
            f"{layer['rank']:.1f}",
            " ".join(f"{mean:.2g}" for mean in draws(rounds, name)),
        )
        for name, layer in last.items()
    ]
