"""A finished round in one line of text."""

from collections.abc import Sequence
from typing import Any

from piecework.device_profiles.profile import format_percent
from piecework.server_app.summary import peak_over_budget

Record = dict[str, Any]


def round_line(record: Record, total_rounds: int) -> str:
    """Return what a finished round came to."""
    parts = [f"round {record['round']}/{total_rounds}"]
    if (stages := record.get("modules") or record.get("blocks") or 1) > 1:
        parts.append(f"{record['stage']} of {stages}")
    parts += filter(None, [accuracy_now(record)])
    if record["loss"] is not None:
        parts.append(f"loss {record['loss']:.3f}")
    parts.append(f"{record['answered']}/{record['asked']} clients ok")
    if private := record.get("privacy"):
        parts.append(f"epsilon {private['epsilon']:.3g}")
    peak = peak_over_budget([record])
    if peak is not None:
        parts.append(f"peak {format_percent(peak, 1)} of budget")
    return "  ".join(parts)


def accuracy_now(record: Record) -> str:
    """Return the accuracy on the test data, else on the clients'; empty if neither was evaluated."""
    for name, clean, attacked in (
        (accuracy_name([record]), "accuracy", "adversarial_accuracy"),
        ("accuracy on the clients", "client_accuracy", "client_adversarial_accuracy"),
    ):
        if record[clean] is not None:
            under = f", under attack {format_percent(record[attacked], 1)}" if record.get(attacked) is not None else ""
            return f"{name} {format_percent(record[clean], 1)}{under}"
    return ""


def accuracy_name(rounds: Sequence[Record]) -> str:
    """Return what `accuracy` means in a run's records."""
    return "personal accuracy" if rounds and rounds[-1].get("personal") else "accuracy"
