"""List the shipped presets and the purpose of each."""

import tomllib
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.app_folder import PRESETS
from piecework.training.settings import SettingsError


def preset_rows(word: str = "") -> list[dict[str, Any]]:
    """Return every shipped preset, or those with `word` in their name, strategy, data set or description.

    `about` is the first line of the file's comment. Raises SettingsError if none has it.
    """
    rows = []
    for path in sorted(PRESETS.glob("*.toml"), key=lambda path: path.stem):
        text = path.read_text(encoding="utf-8")
        values, about = tomllib.loads(text), text.splitlines()[0].removeprefix("# ")
        rows.append({"preset": path.stem, **{key: values[key] for key in ("strategy", "dataset")}, "about": about})
    found = [row for row in rows if word.lower() in " ".join(row.values()).lower()]
    if not found:
        raise SettingsError(f"no preset is about {word!r}: piecework presets lists all {len(rows)}")
    return found


def preset_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of presets that fits a terminal of 80 columns."""
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=False)
    table.add_column("preset", no_wrap=True)
    table.add_column("for")
    for row in rows:
        table.add_row(Text(row["preset"]), Text(row["about"]))
    return table
