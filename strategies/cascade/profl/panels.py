"""ProFL in a run's page: how blocks moved, and when each was frozen."""

from collections.abc import Sequence
from statistics import fmean

from piecework.strategies.panels import Curve, Panel, Plot, Record, by_stage, from_to

COLUMNS = (
    "part of the run",
    "rounds",
    "clients a round: block, output layer alone",
    "movement",
    "slope",
    "below the threshold",
    "ended",
)


def panels(rounds: Sequence[Record], settings: Record) -> list[Panel]:
    """Return a panel of movements and slopes, and where parts of the run ended; none if no movement was recorded."""
    if "effective_movement" not in rounds[-1]:
        return []
    window, phi, times = (settings[f"profl.movement-{key}"] for key in ("window", "fraction", "times"))
    policy = (
        f"A block is frozen when the slope of the line through its last {window} movements was below {phi:g} of its first "
        f"slope in {times} rounds in a row"
        if settings["profl.freezing"] == "movement"
        else "A block has its rounds by the number of its parameters"
    )
    sentence = (
        f"Over {window} rounds: 1 where all parameters went straight on, 0 where they came back. {policy}; dashed lines are "
        "where a part of the run ended. Maps, in which a block is distilled into a basic layer, have no movement."
    )
    plots = (
        Plot("effective movement", [curve(rounds, "effective_movement", "effective movement")], top=1.02),
        Plot(
            "slope a round",
            [curve(rounds, "slope", "slope, its size"), curve(rounds, "slope_threshold", "threshold")],
        ),
    )
    title = "Effective movement of the block in training"
    return [Panel(title, sentence, plots, COLUMNS, rows(rounds), stages=True)]


def curve(rounds: Sequence[Record], key: str, name: str) -> Curve:
    """Return the sizes of a figure over the rounds, interrupted where a part of the run ended."""
    points: list[tuple[float, float | None]] = []
    for _, records in by_stage(rounds):
        points += [(r["round"], abs(r[key])) for r in records if r.get(key) is not None]
        points.append((records[-1]["round"] + 0.5, None))
    return Curve(name, points)


def rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return a row per part of the run.

    A row has rounds, mean clients a round, last movement and slope, rounds below the threshold, and how it ended.
    """
    words, found = {"frozen": "frozen", "rounds": "its rounds"}, []
    for stage, records in by_stage(rounds):
        last = records[-1]
        numbers = [f"{last[key]:.4g}" if last.get(key) is not None else "-" for key in ("effective_movement", "slope")]
        below = str(last["times_below"]) if last.get("slope_threshold") is not None else "-"
        found.append(
            (
                stage,
                from_to(records[0]["round"], last["round"]),
                clients_a_round(records),
                *numbers,
                below,
                words.get(last["ended"], "-"),
            )
        )
    return found


def clients_a_round(records: Sequence[Record]) -> str:
    """Return how many clients trained the block, and how many the output layer alone, as means over rounds: `4.3, 5.7`."""
    counted = [r for r in records if r.get("block_clients") is not None]
    means = [fmean(r[f"{part}_clients"] for r in counted) for part in ("block", "output_layer")] if counted else []
    return ", ".join(f"{mean:.3g}" for mean in means) or "-"
