"""PriSM in a run's page: how many kernels the layers need, and which kernels were drawn (the paper's Figures 8 and 9)."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from piecework.report.display import Record
from piecework.report.page import Section, line, over_rounds, panels, table

COLUMNS = ("layer", "kernels", "needed at first", "needed at the end", "clients per kernel, by tenths of the kernels")


def has_kernels(rounds: Sequence[Record]) -> bool:
    """Return whether sub-models were made of principal kernels."""
    return bool(rounds[-1].get("keep_ratios"))


def kernel_section(rounds: Sequence[Record]) -> Section:
    """Return the section of ranks over the rounds, and of draws."""
    return Section(
        "Principal kernels",
        "Above: the fraction of a layer's kernels that it needs, 2 to the entropy of sigma_i / sum. Below: how many clients "
        "per round had a kernel, by tenths of the kernels, the largest singular values first; means over all rounds.",
        kernel_figure(rounds),
        f'<div class="stages">{table(layer_rows(rounds), COLUMNS)}</div>',
    )


def kernel_figure(rounds: Sequence[Record]) -> Any:
    """Draw ranks above draws, with a line per layer."""
    figure = panels(2)
    for i, name in enumerate(rounds[-1]["layers"]):
        ranks = [(r["round"], r["layers"][name]["rank"] / r["layers"][name]["kernels"]) for r in rounds]
        figure.add_trace(line(ranks, short(name), i), row=1, col=1)
        drawn = line(list(enumerate(draws(rounds, name), start=1)), short(name), i)
        figure.add_trace(drawn.update(showlegend=False), row=2, col=1)
    figure.update_yaxes(title="fraction of kernels needed", range=[0, 1.02], row=1)
    figure.update_yaxes(title="clients per kernel", rangemode="tozero", row=2)
    over_rounds(figure, rounds)
    return figure.update_xaxes(title="tenth of the kernels", range=[0.5, 10.5], tick0=1, dtick=1, row=2)


def draws(rounds: Sequence[Record], name: str) -> list[float]:
    """Return the clients per kernel in a round, for each tenth of a layer's kernels."""
    return [fmean(tenths) for tenths in zip(*(r["layers"][name]["drawn"] for r in rounds), strict=True)]


def layer_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return each layer's kernels, how many it needed at first and at the end, and how often they were drawn."""
    first, last = rounds[0]["layers"], rounds[-1]["layers"]
    return [
        (
            short(name),
            str(layer["kernels"]),
            f"{first[name]['rank']:.1f}",
            f"{layer['rank']:.1f}",
            " ".join(f"{mean:.2g}" for mean in draws(rounds, name)),
        )
        for name, layer in last.items()
    ]


def short(name: str) -> str:
    """Shorten the name of a weight."""
    return name.removesuffix(".weight")
