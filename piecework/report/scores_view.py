"""Show what a trained model gets right, in tables."""

from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.device_profiles.profile import format_percent

MOST = 20  # classes that are shown


def score_tables(record: dict[str, Any]) -> list[Table | Text]:
    """Return a sentence, and a table of classes, of device classes, and of the models that devices deploy, if there are any."""
    shown: list[Table | Text] = [
        Text(
            f"{format_percent(record['accuracy'])} of {record['examples']} test examples of {record['dataset']} are right "
            f"({record['correct']})"
        )
    ]
    shown += class_table(record["classes"])
    if record["devices"]:
        table = new_table("device", "clients", "examples", "accuracy")
        for row in record["devices"]:
            table.add_row(
                Text(row["device"]), str(row["clients"]), str(row["examples"]), format_percent(row["accuracy"])
            )
        shown += [Text(), Text("test examples of the clients of each device class"), table]
    elif record["devices_note"]:
        shown += [Text(), Text(f"by device class: {record['devices_note']}")]
    if record["models"]:
        table = new_table("model", "clients", "accuracy")
        for name, row in record["models"].items():
            table.add_row(Text(name), str(row["clients"]), format_percent(row["accuracy"]))
        shown += [Text(), Text("models that devices deploy, as evaluated at the end of the run"), table]
    return shown


def class_table(rows: list[dict[str, Any]]) -> list[Table | Text]:
    """Return a table of the classes, or of those that are found least often if there are many."""
    many = len(rows) > MOST
    held = [row for row in rows if row["examples"]] if many else rows
    chosen = sorted(held, key=lambda row: row["recall"])[:MOST] if many else rows
    title = (
        f"the {len(chosen)} classes that are found least often, of {len(rows)}; --json has all" if many else "classes"
    )
    table = new_table("class", "examples", "found", "predicted", "most taken for")
    for row in chosen:
        taken = f"{row['most_taken_for']} ({row['times']})" if row["times"] else ""
        table.add_row(
            Text(row["class"]), str(row["examples"]), format_percent(row["recall"]), str(row["predicted"]), Text(taken)
        )
    return [Text(), Text(title), table]


def new_table(first: str, *columns: str) -> Table:
    """Return an empty table with a column of names and columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table
