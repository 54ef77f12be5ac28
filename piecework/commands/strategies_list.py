"""List the systems with their methods, papers and requirements."""

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from piecework.commands.options import read_preset
from piecework.commands.papers import shipped_rows
from piecework.device_profiles.plugins import Plugin, PluginError, find_plugin, list_plugins
from piecework.training.capabilities import Capabilities
from piecework.training.methods import METHODS, load

SHOWN = 2  # published presets of a system in the table
LINK = re.compile(r"https://[^\s,;)]+[^\s,;).]")
EXPECT = "## What to expect\n"  # the heading of a card's verdict
SENTENCES = 2  # of a verdict, in lists


def strategy_rows() -> list[dict[str, Any]]:
    """Return every system: its name (`strategy`), its `family`, what it is `about`, the link of its `paper`, what it `needs`,
    the `presets` that run it in a row of a paper's table, and the `verdict` of its card.
    """
    rows, presets = [], published_presets()
    for name, entry in METHODS.items():
        strategy = load(entry.server)  # not by its name, which a plugin may have too
        can, module = strategy.can, strategy.__module__
        paper = LINK.search(sys.modules[module].__doc__ or "")
        card = Path(str(sys.modules[module].__file__)).with_name(f"{name}.md")
        rows.append(
            {
                "strategy": name,
                "family": module.split(".")[2],
                "about": " ".join((strategy.__doc__ or "").split()).partition(". ")[0].removesuffix(".") + ".",
                "paper": paper[0] if paper else "",
                "needs": "images, which it attacks in training" if can.attack == "always" else "",
                "caveat": can.caveat,
                "not_private": "" if can.private else can.why_not_private,
                "presets": presets[name],
                "verdict": verdict_in(card.read_text("utf-8") if card.is_file() else ""),
            }
        )
    return rows + [plugin_row(plugin) for found in list_plugins("methods").values() for plugin in found]


def verdict_in(card: str) -> str:
    """Return the first two sentences of what a card says to expect, as plain text."""
    plain = re.sub(r"\s*\(\[[^\]]*\]\([^)]*\)\)|\[([^\]]*)\]\([^)]*\)", r"\1", card.partition(EXPECT)[2])
    first = " ".join(plain.replace("`", "").replace("**", "").strip().partition("\n\n")[0].split())
    return " ".join(re.split(r"(?<=[.!?]) (?=[A-Z])", first)[:SENTENCES])


def plugin_row(plugin: Plugin) -> dict[str, Any]:
    """Return the row of a system that an installed package registers, without importing it."""
    try:
        find_plugin("methods", plugin.name, METHODS)
        caveat = ""
    except PluginError as error:
        caveat = str(error)
    about = f"Plugin of the package {plugin.package} {plugin.version}{f': {plugin.about}' if plugin.about else ''}"
    row = {"strategy": plugin.name, "family": "plugin", "about": about, "caveat": caveat}
    return row | {"paper": "", "needs": "", "not_private": Capabilities.why_not_private, "presets": [], "verdict": ""}


def published_presets() -> dict[str, list[str]]:
    """Return the presets that run a row of a paper by system: its own presets, or others that are given its name."""
    own, given = defaultdict(list), defaultdict(list)
    for row in shipped_rows():
        own[str(read_preset(row.preset)["strategy"])].append(row.preset)
        for assignment in row.assignments():
            key, _, value = assignment.partition("=")
            if key == "strategy":
                given[value].append(f"{row.preset} --set {assignment}")
    return defaultdict(list, {name: list(dict.fromkeys(own[name] or given[name])) for name in {*own, *given}})


def strategy_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of systems that fits a terminal of 80 columns."""
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("about")
    for row in rows:
        needs, published = f"needs {row['needs']}" if row["needs"] else "", ", ".join(row["presets"][:SHOWN])
        if len(row["presets"]) > SHOWN:
            published += f" and {len(row['presets']) - SHOWN} more"
        presets = f"published settings: {published}" if published else ""
        private = f"not private: {row['not_private']}" if row["not_private"] else ""
        verdict = f"what to expect: {row['verdict']}" if row["verdict"] else ""
        lines = [row["about"], verdict, needs, row["caveat"], private, row["paper"], presets]
        table.add_row(Text(row["strategy"]), Text("\n".join(filter(None, lines))))
    return table
