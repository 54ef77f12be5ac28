"""What a private run has spent, and how much of each part's movement was noise, for tables and pages."""

from collections.abc import Mapping, Sequence
from typing import Any

from piecework.strategies.panels import Curve, Panel, Plot

Record = Mapping[str, Any]
KNOWN_SEED = "nothing is private: the noise has a known seed (privacy.seed)"
COLUMNS = ("part of the model", "signal over noise in the last round", "mean over the rounds")


def privacy_rows(rounds: Sequence[Record]) -> list[tuple[str, str]]:
    """Return a row with what the run has spent, none of a run that is not private."""
    private = [record["privacy"] for record in rounds if record.get("privacy")]
    if not private:
        return []
    last = private[-1]
    limit = f" of {last['limit']:g}" if last["limit"] else ""
    spent = f"epsilon {last['epsilon']:.3g}{limit} with delta {last['delta']:.2g}"
    noise = f"noise {last['noise_multiplier']:.3g} x clip {last['clip']:g}, rate {last['sampling_rate']:.3g}"
    return [("privacy", f"{spent} ({noise})" if last["secret"] else f"{KNOWN_SEED}; else {spent}")]


def privacy_panels(rounds: Sequence[Record]) -> list[Panel]:
    """Return the panel of a private run, none of another."""
    private = [record for record in rounds if record.get("privacy")]
    if not private:
        return []
    points = [(float(record["round"]), float(record["privacy"]["epsilon"])) for record in private]
    names = [row["part"] for row in private[-1]["trained"]]
    ratios: dict[str, list[float]] = {}
    for record in private:
        for unit, ratio in record["privacy"]["signal_to_noise"].items():
            ratios.setdefault(part_name(unit, names), []).append(ratio)
    last = {part_name(unit, names): r for unit, r in private[-1]["privacy"]["signal_to_noise"].items()}
    return [
        Panel(
            "Privacy",
            "Epsilon that the models so far have spent, for a client and all its data. Below, how far clients move each part "
            "together over the noise on it, estimated from the noisy sum itself: below 1 most of a step is noise.",
            [Plot("epsilon", [Curve("spent", points)])],
            COLUMNS,
            [
                (name, f"{last[name]:.2f}" if name in last else "-", f"{sum(each) / len(each):.2f}")
                for name, each in ratios.items()
            ],
        )
    ]


def part_name(unit: str, names: Sequence[str]) -> str:
    """Return the display name of a unit of the model: of an atom, that of the part with its number."""
    kind, _, number = unit.partition(".")
    return names[int(number)] if kind == "atoms" and number.isdigit() and int(number) < len(names) else unit
