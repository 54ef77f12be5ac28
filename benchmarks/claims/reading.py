"""Read a claim's definition and check that its entries agree; definition.py says what they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.claims.definition import Case, Claim, ClaimError, Given, Headline, Row, named
from piecework.device_profiles.documents import abbreviate, read_toml
from piecework.studies.jobs import slug

FOLDER = Path(__file__).parent
# What the harness decides about a run, by setting; `training.lr` may be given where no rate is searched.
OWN = (
    *("seed", "output-dir", "run-name", "resume-from", "state-dir", "data-dir", "engine", "workers"),
    "training.torch-threads",
)


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
            named(claim.cases, name, f"{where}: case")
        for name in (order.ahead, *order.behind):
            row = named(claim.rows, name, f"{where}: row")
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
        row = named(claim.rows, name, f"{where}: seeds-for: row")
        if row.seeds or case not in claim.cases_of(row):
            why = f"has seeds of its own, {list(row.seeds)}" if row.seeds else "is not run in this case"
            raise ClaimError(f"{where}: seeds-for: the row {name!r} {why}: take it out")


def _check_headline(claim: Claim, headline: Headline) -> None:
    where = f"{claim.path}: headline"
    cases = [named(claim.cases, name, f"{where}: case") for name in headline.cases]
    if len(set(headline.cases.values())) < len(cases):
        raise ClaimError(f"{where}: cases = {list(headline.cases.values())}: each needs a title of its own")
    for name in headline.rows:
        own = claim.cases_of(named(claim.rows, name, f"{where}: row"))
        if not any(case in own for case in cases):
            raise ClaimError(f"{where}: the row {name!r} is in none of the cases {list(headline.cases)}")
    for case in cases:
        _require_unique(_names_in(claim, headline, case), f"{where}: case {case.name!r}", "rows")
    in_last = _names_in(claim, headline, cases[-1])
    if absent := [called for called in headline.rows.values() if called not in in_last]:
        raise ClaimError(
            f"{where}: the last case, {cases[-1].name!r}, whose curves are named, has no row called {absent[0]!r}"
        )


def _names_in(claim: Claim, headline: Headline, case: Case) -> list[str]:
    """Return what the headline calls the rows of a case."""
    return [called for name, called in headline.rows.items() if case in claim.cases_of(claim.row(name))]


def _check_row(claim: Claim, row: Row) -> None:
    where = f"{claim.path}: row {row.name!r}"
    _require_allowed(row.settings, claim, where)
    _require_allowed(row.search, claim, f"{where}: search")
    for name in (*row.cases, *row.paper, *row.rate_in):
        named(claim.cases, name, f"{where}: case")
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
