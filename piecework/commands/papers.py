"""The papers' result tables and figures: which preset runs each row, or why none does.

A preset names the rows that it runs: `paper = "FedProphet, Table 2, row jFAT, CIFAR-10 balanced"`, a text or a list of texts.
What follows a colon is given to the preset for that row: `"ProFL, Table 1, row AllSmall, ResNet18: --set seed=2"`.
conf/papers/rows.toml has the tables in the paper's order, how their other columns are run, and the rows that no preset runs.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.app_folder import PRESETS
from piecework.commands.options import preset_path
from piecework.device_profiles.documents import read_toml
from piecework.device_profiles.names import did_you_mean
from piecework.training.settings import SettingsError

ROWS = PRESETS / "papers" / "rows.toml"
ENTRY = re.compile(r"(?P<paper>[^,]+), (?P<table>(?:Table|Figure) \d+), row (?P<row>.+?)(?:: (?P<given>--set .+))?")


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table or figure: the preset that runs it with what is `given` to it, or the `reason` why none does."""

    paper: str
    table: str
    row: str
    preset: str = ""
    given: str = ""
    reason: str = ""

    @property
    def command(self) -> str:
        """The preset and what it is given, or the reason."""
        return f"{self.preset} {self.given}".strip() or self.reason

    def assignments(self) -> list[str]:
        """Return the settings that the preset is given, as `--set` takes them."""
        return assignments_in(self.given)


@dataclass(frozen=True)
class PaperTable:
    """A table or figure. `columns`: what its rows' presets are given for its other columns. `runs_of`: whose runs it shows."""

    paper: str
    name: str
    about: str
    columns: dict[str, str]
    runs_of: str
    rows: tuple[PaperRow, ...]


def assignments_in(given: str) -> list[str]:
    """Return the settings in `--set KEY=VALUE --set ..`."""
    return [word for word in shlex.split(given) if word != "--set"]


def rows_of_preset(preset: str) -> list[PaperRow]:
    """Return the rows that a preset runs, by its own `paper`; one that it extends may run others. Raises SettingsError."""
    path = preset_path(preset)
    named = read_toml(path.read_text(encoding="utf-8")).get("paper", [])
    entries = [named] if isinstance(named, str) else named
    found = [ENTRY.fullmatch(entry) if isinstance(entry, str) else None for entry in entries]
    for entry, match in zip(entries, found, strict=True):
        if match is None:
            raise SettingsError(
                f"preset {path}: paper = {entry!r}: expected a text, or a list of texts, such as "
                "'FedProphet, Table 2, row jFAT: --set fleet=demo', where the colon and what follows may be left out"
            )
    return [
        PaperRow(preset=path.stem, **{k: v or "" for k, v in match.groupdict().items()}) for match in found if match
    ]


def shipped_rows() -> list[PaperRow]:
    """Return the rows that the shipped presets run, by the presets' names."""
    return [row for path in sorted(PRESETS.glob("*.toml")) for row in rows_of_preset(path.stem)]


def paper_tables(paper: str = "", rows: Path = ROWS) -> list[PaperTable]:
    """Return the tables and figures of all papers, or of one, in the papers' order.

    Raises SettingsError for an unknown paper, and ValueError if a preset runs a row of a table that `rows` does not have.
    """
    run, found = shipped_rows(), []
    for each in read_toml(rows.read_text(encoding="utf-8"))["table"]:
        place = str(each["paper"]), str(each["name"])
        reasons = [PaperRow(*place, row, reason=reason) for row, reason in each.get("without", {}).items()]
        own = [row for row in run if (row.paper, row.table) == place]
        run = [row for row in run if row not in own]
        columns, about, runs_of = each.get("columns", {}), each["about"], each.get("runs-of", "")
        found.append(PaperTable(*place, about, columns, runs_of, (*own, *reasons)))
    if run:
        raise ValueError(f"{rows} has no {run[0].paper}, {run[0].table}, of which preset {run[0].preset} runs a row")
    wanted = [table for table in found if paper.lower() in ("", table.paper.lower())]
    if not wanted:
        papers = list(dict.fromkeys(table.paper.lower() for table in found))
        raise SettingsError(f"--paper {paper}: give one of {', '.join(papers)}{did_you_mean(paper.lower(), papers)}")
    return wanted


def paper_rows(paper: str) -> list[dict[str, Any]]:
    """Return the tables and figures of a paper as `--json` prints them. Raises SettingsError."""
    return [
        {
            "paper": table.paper,
            "table": table.name,
            "about": table.about,
            "runs_of": table.runs_of,
            "columns": table.columns,
            "rows": [
                {"row": row.row, "preset": row.preset, "given": row.given, "reason": row.reason} for row in table.rows
            ],
        }
        for table in paper_tables(paper)
    ]


def paper_list(tables: Iterable[dict[str, Any]]) -> Table:
    """Return the list for a terminal: each table with its rows, and the preset or the reason below each."""
    listed = Table(box=None, padding=0, show_header=False)
    listed.add_column("row")
    for table in tables:
        of = f" (the runs of {table['runs_of']})" if table["runs_of"] else ""
        listed.add_row(Text.assemble((f"{table['paper']}, {table['table']}", "bold"), f": {table['about']}{of}"))
        for row in table["rows"]:
            listed.add_row(Text(f"  {row['row']}"))
            preset = f"{row['preset']} {row['given']}".strip()
            listed.add_row(Text(f"     {preset or 'no preset: ' + row['reason']}", style="dim"))
        for column, given in table["columns"].items():
            listed.add_row(Text(f"  each row, {column}: {given}"))
    return listed
