"""List the shipped presets: what each is for, the row of a paper's table that it runs, and how long it takes.

A preset begins with a comment of fixed lines: what it is for, the command, `Runs:` and the paper, table and row or our own
comparison, and `Takes:` and its duration (`python -m benchmarks.durations` measures it). Free text follows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.app_folder import PRESETS
from piecework.commands.options import read_preset
from piecework.device_profiles.names import did_you_mean
from piecework.training.settings import Settings, SettingsError


@dataclass(frozen=True)
class Header:
    """The comment at the top of a preset. `about`, `runs` and `takes` are its fixed lines, and `text` is all of it."""

    about: str
    runs: str
    takes: str
    text: str

    def commands(self) -> list[list[str]]:
        """Return the assignments of each variant that the text names: consecutive `--set KEY=VALUE` without a stop between."""
        found: list[list[str]] = [[]]
        words = iter(self.text.split())
        for word in words:
            if word != "--set":
                found.append([])
                continue
            value = next(words)
            found[-1].append(value.rstrip(".,;:)"))
            if value != found[-1][-1]:
                found.append([])
        return [assignments for assignments in found if assignments]


def header(path: Path) -> Header:
    """Return the comment at the top of a preset; a line that it lacks is empty."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    fixed = {key: rest.strip() for key, colon, rest in (line.partition(":") for line in lines[2:4]) if colon}
    return Header(lines[0] if lines else "", fixed.get("Runs", ""), fixed.get("Takes", ""), " ".join(lines))


def preset_rows(word: str = "") -> list[dict[str, Any]]:
    """Return every shipped preset, or those with `word` in their name, strategy, data set, description or paper's row.

    Files without a strategy are there to be extended, and no presets. Raises SettingsError if none has the word.
    """
    rows = []
    for path in sorted(PRESETS.glob("*.toml"), key=lambda path: path.stem):
        values, top = read_preset(path.stem), header(path)
        if "strategy" not in values:
            continue
        settings = Settings.from_run_config(values)
        row = {"preset": path.stem, "strategy": settings.strategy, "dataset": settings.dataset, "about": top.about}
        rows.append(row | {"runs": top.runs, "takes": top.takes})
    found = [row for row in rows if word.lower() in " ".join(row.values()).lower()]
    if not found:
        names = [row["preset"] for row in rows]
        near = did_you_mean(word, [*names, *sorted({part for name in names for part in name.split("-")})])
        raise SettingsError(f"no preset is about {word!r}: piecework presets lists all {len(rows)}{near}")
    return found


def preset_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of presets for a terminal of 80 columns: three lines each, the first with the name and the duration."""
    table = Table(box=None, padding=0, show_header=False)
    table.add_column("preset")
    for row in rows:
        table.add_row(Text.assemble((row["preset"], "bold"), f"  {row['takes']}"))
        table.add_row(Text(f"   {row['about']}"))
        table.add_row(Text(f"   {row['runs']}", style="dim"))
    return table
