"""Present the ladder of a device: one line, and a table with a row for each step and each system."""

from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.device_profiles.profile import format_bytes
from piecework.device_profiles.units import format_seconds
from piecework.plans.plan_view import columns

COLUMNS = ("step", "memory", "FLOPs", "disk", "time", "step of the whole model")
LEGEND = (
    "memory: of a step; disk: read and written in a step; time: predicted for a round; *: fits the device. A step that does "
    "not fit is the smallest of its kind. The figures of pieces include making the features between them."
)


def ladder_tables(ladder: dict[str, Any]) -> list[str | Text | Table]:
    """Return what to print, in order."""
    found = columns(*COLUMNS)
    found.columns[-1].no_wrap, found.columns[-1].justify = False, "left"
    for row in ladder["rungs"]:
        disk = format_bytes(row["disk_bytes"]) if row["disk_bytes"] else "-"
        figures = (
            format_bytes(row["bytes"]) + (" *" if row["fits"] else "  "),
            f"{row['flops']:.2f} x",
            disk,
            format_seconds(row["seconds"]),
        )
        said = "; ".join(filter(None, (row["model"], row["how"])))
        found.add_row(row["name"], *figures, said, style="bold" if row["fits"] else "")
    budget = format_bytes(ladder["budget_bytes"])
    return [
        Text(f"How {ladder['device']}, with {budget}, could train the model at batch {ladder['batch_size']}:"),
        found,
        Text(LEGEND),
    ]
