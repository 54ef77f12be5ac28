"""Pictures of what accuracy costs: of each run at its end, against the largest measured peak and against simulated time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from piecework.report.compare import UNDER_ATTACK, Group, RunResult
from piecework.report.participation import clients_text

Cost = Callable[[RunResult], float | None]
CAPTION = "Each run at its end; the further to the upper left, the more accuracy for less."
PARTLY = " Where not all clients trained, the name says how many did; memory and time are those of these alone."
ATTACKED = " Filled marks are on the test data, open ones under attack."
MEMORY = (
    "Memory is the largest measured peak of any client in training, which has to fit the budgets of the clients that train; "
    "the share of the budget is in the table above."
)
TIME = "Simulated time is that of all rounds on the fleet's devices, by their speeds and bandwidths."


def peak(run: RunResult) -> float | None:
    """Return the largest measured peak of training, in bytes; None if nothing was measured."""
    return run.largest_measured_peak or None


def seconds(run: RunResult) -> float | None:
    """Return the simulated seconds; None if they were not recorded, or nothing takes time."""
    return run.simulated_seconds or None


def pictures(groups: Sequence[Group], names: Sequence[str]) -> list[Any]:
    """Return the sections of both pictures, `names` being those of the groups; only of what the runs have."""
    from piecework.report.page import Section

    runs = [run for group in groups for run in group.runs]
    shown, attacked = [], any(run.under_attack for run in runs)
    partly = any(run.participation.partial for run in runs)
    for heading, caption, cost, axis in (
        (
            "Accuracy against memory",
            MEMORY,
            peak,
            {"title": "largest measured peak", "tickformat": "~s", "ticksuffix": "B"},
        ),
        ("Accuracy against simulated time", TIME, seconds, {"title": "simulated seconds"}),
    ):
        if any(cost(run) is not None and run.accuracy is not None for run in runs):
            said = f"{CAPTION}{ATTACKED if attacked else ''}{PARTLY if partly else ''} {caption}"
            shown.append(Section(heading, said, partial(costs_figure, groups, names, cost, axis)))
    return shown


def costs_figure(groups: Sequence[Group], names: Sequence[str], cost: Cost, axis: dict[str, Any]) -> Any:
    """Draw a mark for each run that has both figures, in its group's colour."""
    from piecework.report.page import COLOURS, SYMBOLS, escape_label, graph_objects

    figure = graph_objects().Figure()
    for i, (name, group) in enumerate(zip(names, groups, strict=True)):
        colour, symbol = COLOURS[i % len(COLOURS)], SYMBOLS[i % len(SYMBOLS)]
        own = [(cost(run), run) for run in group.runs]
        clean = [(x, run.accuracy, run_text(run)) for x, run in own if x is not None and run.accuracy is not None]
        attacked = [
            (x, run.under_attack[key].accuracy, f"{run_text(run)} under {run.under_attack[key].attack}")
            for x, run in own
            for key in UNDER_ATTACK
            if x is not None and key in run.under_attack
        ]
        for points, mark, shown in ((clean, symbol, name), (attacked, f"{symbol}-open", f"{name}, under attack")):
            if points:
                marker = {"color": colour, "symbol": mark, "size": 11, "line": {"width": 2, "color": colour}}
                x, y, texts = zip(*points, strict=True)
                figure.add_scatter(
                    x=x, y=y, name=escape_label(shown), mode="markers", marker=marker, text=[*map(escape_label, texts)]
                )
    figure.update_traces(cliponaxis=False)  # a mark at an end of an axis is seen whole
    figure.update_xaxes(rangemode="tozero", **axis)
    return figure.update_yaxes(title="accuracy", tickformat="~%", rangemode="tozero")


def run_text(run: RunResult) -> str:
    """Return the name of a run for a mark, and how many clients trained if some did not: `NAME (12 of 20 clients trained)`."""
    of = run.participation
    return (
        f"{run.path.name} ({clients_text([of.trained], [of.clients])} clients trained)" if of.partial else run.path.name
    )
