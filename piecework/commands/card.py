"""The card of a system: what it does, its settings, what to expect of it. Its page on the site and `piecework strategies NAME`
are the same text.

The part that is written by hand lies beside the server's side of the system, as NAME.md. Settings and presets are those that
the program has, and the differences from the paper are the paragraphs of the server's docstring that say so.
"""

import sys
from pathlib import Path

from piecework.commands.settings_list import format_default, setting_rows
from piecework.commands.strategies_list import strategy_rows
from piecework.device_profiles.names import did_you_mean
from piecework.training.methods import METHODS, load
from piecework.training.settings import SettingsError

DIFFERS = "Where it differs from the paper: "  # the paragraph of a docstring that begins so, and those after it


def find_card(name: str) -> Path:
    """Return the file with the part of a system's card that is written by hand.

    Raises SettingsError for a name that no system of this project has, and for a system without a card.
    """
    if name not in METHODS:
        near = did_you_mean(name, METHODS)
        raise SettingsError(
            f"{name!r} is no system of this project, and only those have cards: {', '.join(METHODS)}{near}"
        )
    module = sys.modules[load(METHODS[name].server).__module__]
    path = Path(str(module.__file__)).parent / f"{name}.md"
    if not path.is_file():
        raise SettingsError(f"{name} has no card yet: write {path}, with the headings of another system's")
    return path


def write_card(name: str) -> str:
    """Return the card of a system as Markdown. Raises SettingsError for a name that no system of this project has."""
    by_hand = find_card(name).read_text("utf-8").rstrip()
    (row,) = [each for each in strategy_rows() if each["strategy"] == name]
    parts = [by_hand, differences(name), settings_of(name)]
    if row["presets"]:
        lines = [f"    piecework run --preset {preset}" for preset in row["presets"]]
        parts.append("\n".join(["## Published settings", "", *lines]))
    notes = [f"Needs {row['needs']}." if row["needs"] else "", row["caveat"] and f"Note: {row['caveat']}."]
    if row["not_private"]:
        notes.append(f"Not with `privacy`: {row['not_private']}.")
    parts.append("\n\n".join(filter(None, notes)))
    if row["paper"]:
        parts.append(f"## Reference\n\n{reference(name)}")
    return "\n\n".join(filter(None, parts)) + "\n"


def paragraphs(name: str) -> list[str]:
    """Return the paragraphs of the docstring of the module with the server's side of a system."""
    return (sys.modules[load(METHODS[name].server).__module__].__doc__ or "").strip().split("\n\n")


def differences(name: str) -> str:
    """Return the section on what is not as in the paper, from the docstring; empty if it says nothing of it."""
    said = paragraphs(name)
    first = next((at for at, text in enumerate(said) if text.startswith(DIFFERS)), None)
    if first is None:
        return ""
    said = [said[first].removeprefix(DIFFERS), *said[first + 1 :]]
    return "\n\n".join(["## Where it differs from the paper", *(text[:1].upper() + text[1:] for text in said)])


def reference(name: str) -> str:
    """Return the paper that the docstring names: its first paragraph with a link."""
    return next(" ".join(text.split()) for text in paragraphs(name) if "https://" in text)


def settings_of(name: str) -> str:
    """Return the section with the settings that only some systems use, this one among them."""
    tables = METHODS[name].tables
    rows = [row for row in setting_rows(name) if row["key"].partition(".")[0] in tables]
    if not rows:
        return ""
    lines = [f"| `{row['key']}` | `{format_default(row['default'])}` | {row['meaning']} |" for row in rows]
    return "\n".join(["## Settings of its own", "", "| setting | default | meaning |", "|---|---|---|", *lines])
