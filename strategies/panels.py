"""Panels of a run's page, which a method declares as data: a title, a sentence, curves or cells, and a table.

A method in a folder may have a module `panels.py` there, and one of a single file `NAME.py` a module `NAME_panels.py`, with
a function `panels(rounds, settings) -> list[Panel]`; `rounds` are the run's records, at least one, and `settings` its settings
by key.
`piecework.report.draw_panels` draws them. Neither these modules nor this one imports torch or Flower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from piecework.training.methods import METHODS, find_entry

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """Points (x, y) by a name; y = None interrupts the curve. A panel's curves of one name look alike, also on other plots."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Plot:
    """Curves above one x axis; `y` says what the values are. The y axis begins at 0."""

    y: str
    curves: Sequence[Curve]
    top: float | None = None  # the end of the y axis; None = the largest value
    x: str = ""  # what the x axis has, in whole numbers; "" = rounds
    ends: tuple[float, float] | None = None  # of an x axis that does not have rounds
    marked: bool = False  # shows each point, however many there are: a curve may have a single one


@dataclass(frozen=True)
class Cells:
    """Coloured cells, a column for each x. Cells of value `full` are the darkest, None is left white.

    With numbers as x, the rounds, rows are counted from below; with names, from above.
    """

    x: Sequence[int] | Sequence[str]
    rows: Sequence[Sequence[float | None]]
    y: str  # what a row is
    full: float = 1.0
    unit: str = ""  # of the values; "" = fractions
    title: str = ""


@dataclass(frozen=True)
class Panel:
    """A section of the page: its title, what it shows, plots or pictures below each other, and a table."""

    title: str
    sentence: str
    plots: Sequence[Plot] | Sequence[Cells]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    stages: bool = False  # marks where one stage ended and the next began


def panels_of(strategy: str, rounds: Sequence[Record], settings: Record) -> list[Panel]:
    """Return the panels of a run by the method of this name; none if it has no module of panels, or is not registered here."""
    if strategy not in METHODS:
        return []
    module, beside = find_entry(strategy).server.partition(":")[0], "_panels"
    module = f"{module}{beside}" if not module.endswith(".server") else f"{module.removesuffix('server')}panels"
    if find_spec(module) is None:
        return []
    found: list[Panel] = import_module(module).panels(rounds, settings)
    return found


def by_stage(rounds: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Return the rounds of each stage."""
    return [(stage, list(records)) for stage, records in groupby(rounds, key=lambda record: str(record["stage"]))]


def layer_name(weight: str) -> str:
    """Return the name of the layer that has a weight."""
    return weight.removesuffix(".weight")


def from_to(first: object, last: object) -> str:
    """Format as `4 to 9`, or as `4` if both are the same."""
    return " to ".join(dict.fromkeys((str(first), str(last))))


def atom_range(atoms: Sequence[int]) -> str:
    """Format atoms as `atom 3` or `atoms 0 to 2`; those of a cascade are consecutive."""
    return f"atom {atoms[0]}" if len(atoms) == 1 else f"atoms {atoms[0]} to {atoms[-1]}"
