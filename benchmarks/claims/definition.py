"""The definition of a claim: its file `NAME.toml` in this folder, read and checked.

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
    rows = { "FeDepth" = "FeDepth" }           # with what they are called there; the last case has all of them
    cases = { "weak" = "every device is weak" }

Settings are merged: those of all runs, then the case's, then the row's; a run's seed and rate come last.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piecework.device_profiles.documents import abbreviate, read_toml
from piecework.studies.jobs import slug
from piecework.training.settings import Scalar

FOLDER = Path(__file__).parent
# What the harness decides about a run, by setting; `training.lr` may be given where no rate is searched.
OWN = (
    *("seed", "output-dir", "run-name", "resume-from", "state-dir", "data-dir", "engine", "workers"),
    "training.torch-threads",
)
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
    """The picture that decides: a few rows in some cases, with their names there; the last case has all of them."""

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
        found: Case = _named(self.cases, name, f"{self.path}: case")
        return found

    def row(self, name: str) -> Row:
        """Return the row of this name. Raises ClaimError."""
        found: Row = _named(self.rows, name, f"{self.path}: row")
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


def names(folder: Path = FOLDER) -> list[str]:
    """List the names of the claims, in the order in which they are run."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read(name: str, folder: Path = FOLDER) -> Claim:
    """Read the claim of this name, and check its entries but not its settings: `jobs.load` does. Raises ClaimError."""
    path = folder / f"{name}.toml"
    if not path.is_file():
        raise ClaimError(f"there is no claim {abbreviate(name)}; the claims are {', '.join(names(folder)) or 'none'}")
    try:
        table = read_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClaimError(f"{path}: {error}") from None
    if taken := {"name", "path"} & table.keys():
        raise ClaimError(f"{path}: {min(taken)}: unknown key; a claim has its file's")
    try:
        claim = Claim.model_validate({**table, "name": name, "path": path})
    except ValidationError as error:
        raise ClaimError("\n".join(f"{path}: {_explain(each, table)}" for each in error.errors())) from None
    _check(claim)
    return claim


def _named(entries: Sequence[Any], name: str, where: str) -> Any:
    for entry in entries:
        if entry.name == name:
            return entry
    raise ClaimError(f"{where} {abbreviate(name)}: there is none of this name; there are {_listed(entries)}")


def _listed(entries: Iterable[Any]) -> str:
    return ", ".join(repr(entry.name) for entry in entries)


def _explain(problem: Any, table: dict[str, Any]) -> str:
    """Return `row 'FeDepth' rates 2 = -1: input should be greater than 0`; entries count from 1."""
    place = []
    for at, part in enumerate(problem["loc"]):
        if isinstance(part, str):
            place.append(part)
            continue
        entries = table.get(str(problem["loc"][0]))
        entry = entries[part] if at == 1 and isinstance(entries, list) and part < len(entries) else None
        place.append(repr(entry["name"]) if isinstance(entry, dict) and "name" in entry else str(part + 1))
    where = " ".join(place)
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    message = problem["msg"].removeprefix("Input ")
    return f"{where} = {abbreviate(problem['input'])}: {message[0].lower()}{message[1:]}"


def _check(claim: Claim) -> None:
    """Check that the entries agree with each other. Raises ClaimError."""
    _each_once(claim)
    for case in claim.cases:
        where = f"{claim.path}: case {case.name!r}"
        _require_allowed(case.settings, claim, where)
        _require_unique(case.seeds, where)
        _check_seeds_for(claim, case, where)
        if case.rates_from:
            _require_source(case, claim.case(case.rates_from), claim, where)
    _require_allowed(claim.settings, claim, f"{claim.path}: settings")
    if claim.search is not None:
        _require_several(claim.search.rates, f"{claim.path}: search")
    for row in claim.rows:
        _check_row(claim, row)
    for number, order in enumerate(claim.orders, 1):
        where = f"{claim.path}: order {number}"
        for name in order.cases:
            _named(claim.cases, name, f"{where}: case")
        for name in (order.ahead, *order.behind):
            row = _named(claim.rows, name, f"{where}: row")
            if absent := [each for each in order.cases if each not in (case.name for case in claim.cases_of(row))]:
                raise ClaimError(f"{where}: the row {name!r} has no case {absent[0]!r}")
    if claim.headline is not None:
        _check_headline(claim, claim.headline)


def _check_seeds_for(claim: Claim, case: Case, where: str) -> None:
    """Raise ClaimError unless a case's seeds include the claim's, and are for rows that are run there without their own."""
    if case.seeds_for and not set(claim.seeds) <= set(case.seeds):
        raise ClaimError(
            f"{where}: seeds = {list(case.seeds)}: with seeds-for, add the other rows' {list(claim.seeds)} to compare"
        )
    _require_unique(case.seeds_for, where, "seeds-for")
    for name in case.seeds_for:
        row = _named(claim.rows, name, f"{where}: seeds-for: row")
        if row.seeds or case not in claim.cases_of(row):
            why = f"has seeds of its own, {list(row.seeds)}" if row.seeds else "is not run in this case"
            raise ClaimError(f"{where}: seeds-for: the row {name!r} {why}: take it out")


def _check_headline(claim: Claim, headline: Headline) -> None:
    where = f"{claim.path}: headline"
    *_, last = (_named(claim.cases, name, f"{where}: case") for name in headline.cases)
    if len(set(headline.cases.values())) < len(headline.cases):
        raise ClaimError(f"{where}: cases = {list(headline.cases.values())}: each needs a title of its own")
    for name in headline.rows:
        if last not in claim.cases_of(_named(claim.rows, name, f"{where}: row")):
            raise ClaimError(f"{where}: the row {name!r} has no case {last.name!r}, whose curves are named")


def _check_row(claim: Claim, row: Row) -> None:
    where = f"{claim.path}: row {row.name!r}"
    _require_allowed(row.settings, claim, where)
    _require_allowed(row.search, claim, f"{where}: search")
    for name in (*row.cases, *row.paper, *row.rate_in):
        _named(claim.cases, name, f"{where}: case")
    _require_unique(row.seeds, where)
    given = [key for key in ("rate", "rates", "rates-from") if getattr(row, key.replace("-", "_"))]
    if len(given) > 1:
        raise ClaimError(f"{where} has {' and '.join(given)}: give one of them")
    if claim.search is None and (given[:1] in (["rates"], ["rates-from"]) or row.search):
        raise ClaimError(f"{where} has {(given or ['search'])[0]}, but the claim has no [search]")
    if row.rates:
        _require_several(row.rates, where)
    if row.rates_from:
        _require_source(row, claim.row(row.rates_from), claim, where)


def _require_unique(given: Sequence[int | str], where: str, key: str = "seeds") -> None:
    if len(set(given)) < len(given):
        raise ClaimError(f"{where}: {key} = {list(given)}: each must be unique")


def _require_source(entry: Any, source: Any, claim: Claim, where: str) -> None:
    """Raise ClaimError unless a rate is searched where this row or case takes its rate from."""
    if claim.search is None:
        raise ClaimError(f"{where} has rates-from, but the claim has no [search]")
    if source is entry or source.rates_from or getattr(source, "rate", None):
        raise ClaimError(f"{where}: rates-from = {source.name!r}, for which no rate is searched itself")


def _require_several(rates: Sequence[float], where: str) -> None:
    if len(set(rates)) < len(rates) or len(rates) < 2:
        raise ClaimError(f"{where}: rates = {list(rates)}: give at least two different ones, or a row its `rate`")


def _require_allowed(given: Given, claim: Claim, where: str) -> None:
    """Raise ClaimError for a setting that is not the definition's to set."""
    for key in given:
        if key in OWN:
            raise ClaimError(f"{where}: {key} is set by the harness, for each run")
        if key == "training.lr" and claim.search is not None:
            raise ClaimError(f"{where}: training.lr is searched; give a row its `rate` instead")


def _each_once(claim: Claim) -> None:
    """Raise ClaimError where two cases or two rows would share a folder, or a seed stands twice."""
    for kind, entries in (("case", claim.cases), ("row", claim.rows)):
        folders: dict[str, str] = {}
        for entry in entries:
            other = folders.setdefault(slug(entry.name), entry.name)
            if other is not entry.name:
                raise ClaimError(
                    f"{claim.path}: {kind} {entry.name!r} and {kind} {other!r} would both write to the folder {slug(other)!r}: "
                    "rename one of them"
                )
    _require_unique(claim.seeds, str(claim.path))
