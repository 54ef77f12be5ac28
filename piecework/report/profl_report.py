"""ProFL in a run's page: how blocks moved, and when each was frozen."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from piecework.report.display import Record
from piecework.report.page import Section, line, mark_stages, over_rounds, panels, table
from piecework.report.robust_report import by_stage, span

COLUMNS = (
    "part of the run",
    "rounds",
    "clients a round: block, output layer alone",
    "movement",
    "slope",
    "below the threshold",
    "ended",
)


def is_progressive(rounds: Sequence[Record]) -> bool:
    """Return whether blocks were frozen one after another."""
    return "effective_movement" in rounds[-1]


def movement_section(rounds: Sequence[Record], settings: Record) -> Section:
    """Return the section of movements, slopes, and where parts of the run ended."""
    window, phi, times = (settings[f"profl.movement-{key}"] for key in ("window", "fraction", "times"))
    policy = (
        f"A block is frozen when the slope of the line through its last {window} movements was below {phi:g} of its first "
        f"slope in {times} rounds in a row"
        if settings["profl.freezing"] == "movement"
        else "A block has its rounds by the number of its parameters"
    )
    return Section(
        "Effective movement of the block in training",
        f"Over {window} rounds: 1 where all parameters went straight on, 0 where they came back. {policy}; dashed lines are "
        "where a part of the run ended. Maps, in which a block is distilled into a basic layer, have no movement.",
        movement_figure(rounds),
        f'<div class="stages">{table(phase_rows(rounds), COLUMNS)}</div>',
    )


def movement_figure(rounds: Sequence[Record]) -> Any:
    """Draw movements, and below them the size of slopes with their threshold."""
    figure = panels(2)
    lines = (
        ("effective_movement", "effective movement", 1),
        ("slope", "slope, its size", 2),
        ("slope_threshold", "threshold", 2),
    )
    for i, (key, name, panel) in enumerate(lines):
        points: list[tuple[float, float | None]] = []
        for _, records in by_stage(rounds):
            found = [(r["round"], abs(r[key])) for r in records if r.get(key) is not None]
            points += [*found, (records[-1]["round"] + 0.5, None)]  # a line ends where its part of the run does
        if any(value is not None for _, value in points):
            figure.add_trace(line(points, name, i), row=panel, col=1)
    figure.update_yaxes(title="effective movement", range=[0, 1.02], row=1)
    figure.update_yaxes(title="slope a round", rangemode="tozero", row=2)
    return mark_stages(over_rounds(figure, rounds), rounds)


def phase_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return a row per part of the run.

    A row has rounds, mean clients a round, last movement and slope, rounds below the threshold, and how it ended.
    """
    words, rows = {"frozen": "frozen", "rounds": "its rounds"}, []
    for stage, records in by_stage(rounds):
        last = records[-1]
        numbers = [f"{last[key]:.4g}" if last.get(key) is not None else "-" for key in ("effective_movement", "slope")]
        below = str(last["times_below"]) if last.get("slope_threshold") is not None else "-"
        rows.append(
            (
                stage,
                span([r["round"] for r in records]),
                clients_a_round(records),
                *numbers,
                below,
                words.get(last["ended"], "-"),
            )
        )
    return rows


def clients_a_round(records: Sequence[Record]) -> str:
    """Return how many clients trained the block, and how many the output layer alone, as means over rounds: `4.3, 5.7`."""
    counted = [r for r in records if r.get("block_clients") is not None]
    means = [fmean(r[f"{part}_clients"] for r in counted) for part in ("block", "output_layer")] if counted else []
    return ", ".join(f"{mean:.3g}" for mean in means) or "-"
