"""List the systems with their methods, papers and requirements."""

import re
import sys
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.strategies import find_method
from piecework.training.methods import METHODS

LINK = re.compile(r"https://[^\s,;)]+[^\s,;).]")


def strategy_rows() -> list[dict[str, Any]]:
    """Return every system: its name (`strategy`), its `family`, what it is `about`, the link of its `paper`, what it
    `needs`.
    """
    rows = []
    for name in METHODS:
        strategy = find_method(name)
        can, module = strategy.can, strategy.__module__
        paper = LINK.search(sys.modules[module].__doc__ or "")
        rows.append(
            {
                "strategy": name,
                "family": module.split(".")[2],
                "about": " ".join((strategy.__doc__ or "").split()).partition(". ")[0].removesuffix(".") + ".",
                "paper": paper[0] if paper else "",
                "needs": "images, which it attacks in training" if can.attack == "always" else "",
                "caveat": can.caveat,
            }
        )
    return rows


def strategy_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of systems that fits a terminal of 80 columns."""
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("about")
    for row in rows:
        lines = [row["about"], f"needs {row['needs']}" if row["needs"] else "", row["caveat"], row["paper"]]
        table.add_row(Text(row["strategy"]), Text("\n".join(filter(None, lines))))
    return table
