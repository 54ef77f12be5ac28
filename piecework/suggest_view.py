"""Present advice: FedAvg's verdict, the simple baselines, the systems, and where accuracies were measured."""

from typing import Any

from rich.table import Table

from piecework.device_profiles.profile import format_bytes
from piecework.plan_view import columns, duration


def advice_tables(advice: dict[str, Any]) -> list[str | Table]:
    """Return what to print, in order."""
    adversarial, simple = advice["adversarial"], advice["simple"]
    training = "adversarial" if adversarial else "clean"
    ask = (
        "Adversarial training. For clean training leave `training.adversarial` and the strategy as they are by default."
        if adversarial
        else "Clean training. For adversarial training ask with --set training.adversarial=true."
    )
    if simple["fits"]:
        return [simple["text"], ask]
    lines: list[str | Table] = [simple["text"], f"The simple baselines, {training} training:", table(advice["rivals"])]
    lines += [f"Systems, {training} training:", table(advice["rows"]), f"{LEGEND}.", advice["order"]]
    if not advice["settings"]:
        lines.append("No accuracy of ours was measured on a model of this kind.")
    for number, setting in advice["settings"].items():
        lines.append(
            f"[{number}] measured on {setting['what']}, not on your model and fleet ({setting['source']}: {setting['command']})"
        )
    lines += [f"{row['strategy']} cannot: {row['reason']}" for row in advice["refused"]]
    return [*lines, ask]


COLUMNS = ("strategy", "take part", "each", "together", "bytes", "time", "measured")
LEGEND = (
    "take part: of the clients; each, together: the part of the model that a client trains, and all of them; bytes and time "
    "are those of a round"
)


def table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with a row per system; at 80 columns only measured results wrap."""
    found = columns(*COLUMNS)
    found.columns[0].no_wrap = True
    found.columns[-1].no_wrap, found.columns[-1].justify = False, "left"
    for row in rows:
        measured = [accuracies(number, entries) for number, entries in row["measured"].items()]
        found.add_row(
            row["strategy"],
            f"{row['participation'] - row['swapping']:.0%}",
            fraction_range([*row["trains"].values()]),
            f"{row['covered']:.0%}",
            format_bytes(int(row["bytes_per_round"])),
            duration(row["round_seconds"]),
            "\n".join(filter(None, [*measured, notes(row)])) or "-",
        )
    return found


def fraction_range(found: list[float]) -> str:
    """Return the range from the device that trains the smallest part of the model to the one that trains the largest."""
    low, high = f"{min(found):.0%}", f"{max(found):.0%}"
    return low if low == high else f"{low} - {high}"


def accuracies(number: int, entries: list[dict[str, Any]]) -> str:
    """Return a system's accuracies in one setting."""
    said = []
    for entry in entries:
        clean = f" (clean {entry['clean']})" if "clean" in entry else ""
        said.append(f"{entry['accuracy']}{clean}" + (f", {entry['variant']}" if "variant" in entry else ""))
    return f"[{number}] {'; '.join(said)}"


def notes(row: dict[str, Any]) -> str:
    """Return remarks on a row."""
    pretends = f"{row['swapping']:.0%} pretend to have the memory" if row["swapping"] else ""
    stages = f"{row['stages']} stages" if row["stages"] > 1 else ""
    return "; ".join(filter(None, [pretends or row["caveat"], stages]))
