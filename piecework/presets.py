"""List the shipped presets and the purpose of each."""

from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.app_folder import PRESETS
from piecework.device_profiles.names import did_you_mean
from piecework.options import read_preset
from piecework.training.settings import Settings, SettingsError


def preset_rows(word: str = "") -> list[dict[str, Any]]:
    """Return every shipped preset, or those with `word` in their name, strategy, data set or description.

    `about` is the first line of the file's comment. Files without a strategy are there to be extended, and no presets. Raises
    SettingsError if none has the word.
    """
    rows = []
    for path in sorted(PRESETS.glob("*.toml"), key=lambda path: path.stem):
        values, about = read_preset(path.stem), path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        if "strategy" not in values:
            continue
        settings = Settings.from_run_config(values)
        rows.append({"preset": path.stem, "strategy": settings.strategy, "dataset": settings.dataset, "about": about})
    found = [row for row in rows if word.lower() in " ".join(row.values()).lower()]
    if not found:
        near = did_you_mean(word, [row["preset"] for row in rows])
        raise SettingsError(f"no preset is about {word!r}: piecework presets lists all {len(rows)}{near}")
    return found


def preset_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of presets that fits a terminal of 80 columns."""
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=False)
    table.add_column("preset", no_wrap=True)
    table.add_column("for")
    for row in rows:
        table.add_row(Text(row["preset"]), Text(row["about"]))
    return table
