"""The definition of a claim: its file `NAME.toml` in this folder, which reading.py reads and checks.

    title = "..."                  # one line
    question = "..."               # what the claim asks
    paper = "..."                  # what the paper or others say
    gap = "..."                    # how the setting differs from the paper's
    seeds = [1, 2, 3]              # of all rows in all cases, unless the case or the row has its own
    measure = "accuracy"           # or "adversarial_accuracy": by what rows are ordered
    last = 3                       # evaluations whose mean counts
    [search]
    rates = [0.02, 0.05, 0.1]      # of every row, unless it has its own
    fraction = 3                   # a search's run has num-rounds / fraction rounds, rounded
    further = 2                    # while the best rate is the lowest or the highest, the next is tried too; at most so many
    [settings]                     # of all runs, by their full keys
    "num-rounds" = 60
    [[case]]                       # what rows are repeated over
    name = "weak"
    settings = { model = "preresnet20", fleet = "fleets/weak.toml" }  # beside the definition, or a shipped fleet
    rates-from = "other case"      # optional: each row uses the rate that was found for it in that case
    seeds = [1, 2, 3]              # optional: of all rows there, unless a row has its own
    seeds-for = ["FeDepth"]        # optional: of these rows only; the others have the claim's
    search-rounds = 13             # optional: of a search's runs there, instead of that fraction
    [[row]]
    name = "FeDepth"
    settings = { strategy = "fedepth" }
    cases = ["weak"]               # optional: only these
    seeds = [1]                    # optional
    rates = [0.01, 0.02]           # optional
    rates-from = "other row"       # optional: the rate found for that row is used; or `rate = 0.05`: none is searched
    rate-in = { "weak" = 0.05 }   # optional: the rate in some cases, where longer runs have decided what a search could not
    search = { "profl.stage-rounds" = 5 }  # optional: further settings of the search's runs
    role = "bound"                 # optional: not realistic here; or "experiment": it shows a cause; else it is a candidate
    paper = { "weak" = 71.2 }      # optional: the paper's figures in percent, by case
    advice = { "memory.fit" = "auto" }     # optional: settings that advice gives with the system
    [[order]]                      # an order that is claimed
    text = "FeDepth is ahead of HeteroFL"
    ahead = "FeDepth"
    behind = ["HeteroFL"]
    cases = ["weak"]               # optional
    by = 4.0                       # optional: at least so many points ahead; below 0: at most so many behind
    cause = "..."                  # optional: why it does not hold, with the figures of the experiments that show it
    [headline]                     # optional: a picture of a few rows, accuracy against simulated time, a panel for each case
    storage = "sd"                 # or "emmc", or "nvme"
    rows = { "FeDepth" = "FeDepth" }           # with what they are called there; rows of different cases may share a name
    cases = { "weak" = "every device is weak" }

Settings are merged: those of all runs, then the case's, then the row's; a run's seed and rate come last.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from piecework.device_profiles.documents import abbreviate
from piecework.training.settings import Scalar

Name = Annotated[str, Field(min_length=1, max_length=80)]
Names = Annotated[tuple[Name, ...], Field(strict=False)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(strict=False)]
Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Rates = Annotated[tuple[Rate, ...], Field(strict=False)]
Given = dict[str, Scalar]


class ClaimError(ValueError):
    """A definition cannot be used, or there is none. The message names the file and the entry."""


class _Table(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )


class Search(_Table):
    """The rates that are tried for each row, and by what a search's number of rounds is divided.

    `further`: while the best rate is the lowest or the highest that was tried, the next one beyond it is tried too, as far away
    as its neighbour (as a factor); at most so many on each side.
    """

    rates: Rates
    fraction: Annotated[int, Field(ge=1, le=1000)] = 3
    further: Annotated[int, Field(ge=0, le=10)] = 2


class Case(_Table):
    """A setting in which rows are run: a model and a fleet, or a partition of the data."""

    name: Name
    settings: Given = {}
    rates_from: str = ""
    seeds: Seeds = ()
    seeds_for: Annotated[Names, Field(min_length=1)] = ()
    search_rounds: Annotated[int, Field(ge=1)] | None = None


class Row(_Table):
    """A system with its settings. `cases` is empty for all, `rates` for the claim's, `seeds` for the case's rates and seeds."""

    name: Name
    settings: Given = {}
    cases: Names = ()
    seeds: Seeds = ()
    rates: Rates = ()
    rate: Rate | None = None
    rate_in: dict[str, Rate] = {}
    rates_from: str = ""
    search: Given = {}
    role: Literal["candidate", "bound", "experiment"] = "candidate"
    paper: dict[str, Annotated[float, Field(ge=0, le=100)]] = {}
    advice: Given = {}


class Order(_Table):
    """An order that is claimed: the row `ahead` has a higher accuracy than each of those `behind`, in `cases` (none = all).

    `by`: by at least so many points; below 0: it is behind by at most so many. `cause`: why it does not hold.
    """

    text: str
    ahead: Name
    behind: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
    cases: Names = ()
    by: Annotated[float, Field(ge=-100, le=100)] | None = None
    cause: str = ""


class Headline(_Table):
    """The picture that decides: a few rows in some cases, with their names there, which the last case has all of.

    Rows of one case have different names; those of different cases may share one. One colour is for names that are the same up
    to a comma.
    """

    storage: Literal["sd", "emmc", "nvme"] = "sd"
    rows: Annotated[dict[Name, Name], Field(min_length=1)]
    cases: Annotated[dict[Name, Name], Field(min_length=1)]


class Claim(_Table):
    """A claim; see the module's docstring. `name` and `path` are those of its file."""

    name: str
    path: Path
    title: str
    question: str
    paper: str
    gap: str
    seeds: Annotated[Seeds, Field(min_length=1)]
    measure: Literal["accuracy", "adversarial_accuracy"] = "accuracy"
    last: Annotated[int, Field(ge=1, le=1000)] = 3
    search: Search | None = None
    settings: Given
    cases: Annotated[tuple[Case, ...], Field(strict=False, min_length=1, alias="case")]
    rows: Annotated[tuple[Row, ...], Field(strict=False, min_length=1, alias="row")]
    orders: Annotated[tuple[Order, ...], Field(strict=False, alias="order")] = ()
    headline: Headline | None = None

    def case(self, name: str) -> Case:
        """Return the case of this name. Raises ClaimError."""
        found: Case = named(self.cases, name, f"{self.path}: case")
        return found

    def row(self, name: str) -> Row:
        """Return the row of this name. Raises ClaimError."""
        found: Row = named(self.rows, name, f"{self.path}: row")
        return found

    def places(self) -> list[tuple[Case, Row]]:
        """List the cases and the rows that are run in them, case by case."""
        return [(case, row) for case in self.cases for row in self.rows if case in self.cases_of(row)]

    def cases_of(self, row: Row) -> list[Case]:
        """Return the cases in which a row is run, in the claim's order."""
        return [case for case in self.cases if not row.cases or case.name in row.cases]

    def seeds_of(self, case: Case, row: Row) -> tuple[int, ...]:
        """Return the seeds of a row in a case."""
        own = case.seeds if row.name in case.seeds_for or not case.seeds_for else ()
        return row.seeds or own or self.seeds


def named(entries: Sequence[Any], name: str, where: str) -> Any:
    """Return the entry of this name. Raises ClaimError, which begins with `where` and lists the names that there are."""
    for entry in entries:
        if entry.name == name:
            return entry
    there = ", ".join(repr(entry.name) for entry in entries)
    raise ClaimError(f"{where} {abbreviate(name)}: there is none of this name; there are {there}")
