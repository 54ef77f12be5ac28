"""Write the pages of the site that the program knows: a page a system, all commands, all settings.

    python -m benchmarks.site docs

`make docs` does so before it builds the site.
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from piecework.cli import app
from piecework.commands.card import find_card, write_card
from piecework.commands.settings_list import format_default, setting_rows
from piecework.commands.strategies_list import strategy_rows
from piecework.training.methods import METHODS

# the families of strategies/, in the order of the site
FAMILIES = {
    "cascade": "Pieces of the depth",
    "width": "Narrower models",
    "low_rank": "Low-rank models",
    "sparse": "Masks and thresholds",
    "distillation": "Models of several architectures",
    "whole": "The whole model",
}
INTRODUCTION = """Each page has the idea in a picture, the equations, settings to begin with, what to expect, and where the
system differs from its paper. `piecework strategies NAME` prints the same. Which system suits your devices is what
[`piecework plan --suggest`](../howto/plan.md) says."""
OF_CODE = re.compile(r"\]\((\.\./)+docs/")  # a card's links to documents, from the folder of its code
HINT = "<!-- Written by `python -m benchmarks.site docs`. -->\n\n"


def write_pages(docs: Path) -> None:
    """Write the pages into the folder of the documents. One that is as it was keeps its time, and is not built again."""
    pages = {f"systems/{name}.md": system_page(name, docs) for name in METHODS}
    pages["systems/index.md"] = index_page()
    pages["reference/commands.md"] = commands_page()
    pages["reference/settings.md"] = settings_page()
    for name, text in pages.items():
        path = docs / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text("utf-8") != HINT + text:
            path.write_text(HINT + text, encoding="utf-8")


def index_page() -> str:
    """Return the list of the systems by family, which is also the site's menu of them."""
    about = {row["strategy"]: row["about"] for row in strategy_rows()}
    menu: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name in METHODS:
        menu[find_card(name).parts[-2 - (find_card(name).parent.name not in FAMILIES)]].append(name)
    lines = ["# The systems", "", INTRODUCTION]
    for family, names in menu.items():
        lines += ["", f"## {FAMILIES[family]}", "", *(f"- [{name}]({name}.md): {about[name]}" for name in names)]
        lines += ["", "```{toctree}", ":hidden:", "", *names, "```"]
    return "\n".join(lines) + "\n"


def system_page(name: str, docs: Path) -> str:
    """Return the page of a system: its card, with its picture after the first section."""
    title, _, rest = OF_CODE.sub("](../", write_card(name)).partition("\n\n")
    picture = f"pictures/systems/{name}.svg"
    if not (docs / picture).is_file():
        return f"{title}\n\n{rest}"
    idea, mark, rest = rest.partition("\n## ")
    return f"{title}\n\n{idea}\n![What boards of different memory train with {name}](../{picture})\n{mark}{rest}"


def commands_page() -> str:
    """Return the page of all commands, with their arguments and options."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    lines = ["# Commands", ""]
    for name, command in sorted(group.commands.items()):
        shown = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
        lines += [f"## `piecework {name}`", "", command.help or "", "", *table(map(parameter_row, shown)), ""]
    return "\n".join(lines)


def parameter_row(parameter: Any) -> tuple[str, str]:
    """Return the names of an argument or option, and its help."""
    arguments = parameter.param_type_name == "argument"
    names = parameter.human_readable_name if arguments else ", ".join([*parameter.opts, *parameter.secondary_opts])
    return f"`{names}`", " ".join((parameter.help or "").split())


def settings_page() -> str:
    """Return the page of all settings, by table."""
    by_table: dict[str, list[dict[str, Any]]] = {}
    for row in setting_rows():
        by_table.setdefault(row["key"].rpartition(".")[0] or "run", []).append(row)
    lines = [
        "# Settings",
        "",
        "`--set KEY=VALUE` changes a setting; `piecework settings WORD` prints those about a word.",
        "",
    ]
    for name, rows in by_table.items():
        lines += [f"## {name}", "", *table(map(setting_row, rows), "default, allowed values and meaning"), ""]
    return "\n".join(lines)


def setting_row(row: dict[str, Any]) -> tuple[str, str]:
    """Return a setting's key, and what is said of it."""
    only = f" Only with {row['belongs']}." if row["belongs"] else ""
    return f"`{row['key']}`", f"`{format_default(row['default'])}`; {row['allowed']}. {row['meaning']}.{only}"


def table(rows: Iterable[tuple[str, str]], second: str = "meaning") -> list[str]:
    """Return the lines of a table in Markdown; none without rows."""
    cells = [[each.replace("|", "\\|") for each in row] for row in rows]
    return [f"| | {second} |", "|---|---|", *(f"| {first} | {text} |" for first, text in cells)] if cells else []


def main() -> None:
    """Write the pages into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("docs", type=Path)
    write_pages(parser.parse_args().docs)


if __name__ == "__main__":
    main()
