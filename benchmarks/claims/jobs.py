"""The runs of a claim: what each trains with, where it is written, and in which order they are started."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.claims.definition import Case, Claim, ClaimError, Row
from benchmarks.claims.reading import FOLDER, read
from piecework.device_profiles.fleet import load_fleet
from piecework.server_app.used_settings import require_used
from piecework.studies.jobs import hash_of, slug
from piecework.training.methods import find_entry
from piecework.training.settings import Scalar, Settings

RATE, ROUNDS, SEED, AUTOATTACK = "training.lr", "num-rounds", "seed", "evaluation.autoattack-examples"
Place = tuple[str, str]  # a case and a row, by their names


@dataclass(frozen=True)
class Job:
    """A run of a claim. `settings` are those that the definition gives, with seed and rate, and the fleet as JSON.

    `searched`: it is one of the runs of its row's search. `rate` is None if the definition names none.
    """

    claim: str
    case: str
    row: str
    searched: bool
    seed: int
    rate: float | None
    settings: Mapping[str, Scalar]

    @property
    def place(self) -> Place:
        """The case and the row."""
        return self.case, self.row

    @cached_property
    def hash(self) -> str:
        """Eight characters that identify what was given."""
        return hash_of(self.settings)

    @property
    def identity(self) -> dict[str, Any]:
        """What the note beside the run says it is."""
        keys = ("claim", "case", "row", "searched", "seed", "rate", "hash")
        return {key: getattr(self, key) for key in keys}

    @property
    def name(self) -> str:
        """The name of its folder: `seed-1-0f3c9a1b`, or `rate-0.05-0f3c9a1b` in a search."""
        return f"{f'rate-{self.rate:g}' if self.searched else f'seed-{self.seed}'}-{self.hash}"

    @property
    def label(self) -> str:
        """The job in words."""
        what = f"search, rate {self.rate:g}" if self.searched else f"seed {self.seed}"
        return f"{self.claim}: {self.case}: {self.row}: {what}"

    def folder(self, out: Path) -> Path:
        """Return the folder of the run below `out`."""
        return out / self.claim / slug(self.case) / slug(self.row) / self.name


def folders(out: Path, claim: str) -> Iterator[Path]:
    """Yield the folders of all runs of a claim below `out`, also of those that wrote none, by name."""
    for path in sorted(each for each in (out / claim).glob("*/*") if each.is_dir()):
        names = {each.name.removesuffix(".json") for each in path.iterdir() if each.is_dir() or each.suffix == ".json"}
        yield from (path / name for name in sorted(names))


def given_rate(case: Case, row: Row) -> float | None:
    """Return the rate that is given for a row in a case; None if it is searched."""
    return row.rate_in.get(case.name, row.rate)


def source_of(claim: Claim, case: Case, row: Row) -> Place | None:
    """Return the case and row whose search finds the rate of this row in this case; None if none is searched."""
    if claim.search is None or given_rate(case, row) is not None:
        return None
    return case.rates_from or case.name, row.rates_from or row.name


def searches(claim: Claim) -> list[Place]:
    """List the searches that the rows need, case by case."""
    needed = {source_of(claim, case, row) for case, row in claim.places()}
    return [(case.name, row.name) for case in claim.cases for row in claim.rows if (case.name, row.name) in needed]


def rates_of(claim: Claim, row: Row) -> list[float]:
    """Return the rates that are tried for a row whatever they come to, the lowest first."""
    assert claim.search is not None
    return sorted(row.rates or claim.search.rates)


def reach_of(claim: Claim, row: Row) -> list[float]:
    """Return the rates that may be tried for a row, the lowest first: those of `rates_of`, and the further ones."""
    assert claim.search is not None
    rates = rates_of(claim, row)
    for _ in range(claim.search.further):
        lower, higher = rates[0] * rates[0] / rates[1], rates[-1] * rates[-1] / rates[-2]
        rates = [float(f"{lower:.6g}"), *rates, float(f"{higher:.6g}")]
    return rates


def search_jobs(claim: Claim, place: Place, rates: Collection[float] | None = None) -> list[Job]:
    """Return the runs of a search: a rate each, with the row's first seed, fewer rounds, and without AutoAttack.

    `rates` are those of `rates_of` if none are given.
    """
    assert claim.search is not None
    case, row = claim.case(place[0]), claim.row(place[1])
    given = merged(claim, case, row) | row.search
    rounds = int(given.get(ROUNDS, Settings().num_rounds))
    if ROUNDS not in row.search:
        given[ROUNDS] = case.search_rounds or max(1, round(rounds / claim.search.fraction))
    given.pop(AUTOATTACK, None)
    seed = claim.seeds_of(case, row)[0]
    return [
        Job(claim.name, case.name, row.name, True, seed, rate, given | {SEED: seed, RATE: rate})
        for rate in (rates_of(claim, row) if rates is None else rates)
    ]


def reachable_jobs(claim: Claim, place: Place) -> list[Job]:
    """Return all runs that a search may have."""
    return search_jobs(claim, place, reach_of(claim, claim.row(place[1])))


def seed_job(claim: Claim, case: Case, row: Row, seed: int, found: float | None) -> Job:
    """Return the run of a row with a seed. `found` is the searched rate, None where none is searched."""
    own = given_rate(case, row)
    rate = found if own is None else own
    given = merged(claim, case, row) | {SEED: seed} | ({} if rate is None else {RATE: rate})
    stated = given.get(RATE)
    return Job(claim.name, case.name, row.name, False, seed, None if stated is None else float(stated), given)


def merged(claim: Claim, case: Case, row: Row) -> dict[str, Scalar]:
    """Return the settings of a row in a case, with the content of its fleet. Raises FleetError."""
    given = {**claim.settings, **case.settings, **row.settings}
    if "fleet" in given:
        source = str(given["fleet"])
        if source.endswith(".toml"):  # of the definition's own
            source = str(claim.path.parent / source)
        given["fleet"] = load_fleet(source).to_json()
    return given


@dataclass(frozen=True)
class Wanted:
    """A run with a seed that the claim wants, whose rate may still have to be found by the search of `source`."""

    case: str
    row: str
    seed: int
    source: Place | None


def wanted(claim: Claim, of_row: str = "", of_case: str = "") -> list[list[Wanted]]:
    """List the runs by the position of their seed: the first seed of every row, the second of every row that has one, ...

    They are those of the row `of_row` and the case `of_case`, where these are given.
    """
    places = [(case, row) for case, row in claim.places() if of_row in ("", row.name) and of_case in ("", case.name)]
    return [
        [
            Wanted(case.name, row.name, claim.seeds_of(case, row)[number], source_of(claim, case, row))
            for case, row in places
            if number < len(claim.seeds_of(case, row))
        ]
        for number in range(max((len(claim.seeds_of(case, row)) for case, row in places), default=0))
    ]


def in_order(claims: Sequence[Claim], of_row: str = "", of_case: str = "") -> Iterator[tuple[Claim, Place | Wanted]]:
    """Yield searches and runs in the order in which they are started: claim by claim, one seed of all before the next.

    The first runs of a case come after the searches that they need, and before the next case. `of_row` and `of_case` are
    those of `wanted`; a search that they need may be of another row or case.
    """
    passes = [(claim, wanted(claim, of_row, of_case)) for claim in claims]
    for number in range(max((len(rounds) for _, rounds in passes), default=0)):
        for claim, rounds in passes:
            if number < len(rounds):
                runs = rounds[number]
                yield from ((claim, found) for found in (runs if number else with_searches(runs)))


def with_searches(runs: Sequence[Wanted]) -> Iterator[Place | Wanted]:
    """Yield runs case by case, and before those of a case the searches that they need and none before them did."""
    known = set[Place]()
    for _, group in groupby(runs, lambda want: want.case):
        of_case = list(group)
        needed = dict.fromkeys(want.source for want in of_case if want.source is not None)
        yield from (place for place in needed if place not in known)
        known |= needed.keys()
        yield from of_case


def job_of(claim: Claim, want: Wanted, found: float | None) -> Job:
    """Return the run that is wanted, with the rate that its search has found."""
    return seed_job(claim, claim.case(want.case), claim.row(want.row), want.seed, found)


def possible(claim: Claim, want: Wanted) -> list[Job]:
    """Return the run with each rate that its search may choose."""
    rates = [None] if want.source is None else reach_of(claim, claim.row(want.source[1]))
    return [job_of(claim, want, rate) for rate in rates]


def load(name: str, folder: Path = FOLDER) -> Claim:
    """Read the claim of this name, and check all its settings. Raises ClaimError, which names the file and the entry."""
    claim = read(name, folder)
    require_runnable(claim)
    return claim


def require_runnable(claim: Claim) -> None:
    """Raise ClaimError, which names the file, the case and the row, if Piecework refuses or does not use settings."""
    searched = {case for case, _ in searches(claim)}
    if unused := [case for case in claim.cases if case.search_rounds is not None and case.name not in searched]:
        raise ClaimError(
            f"{claim.path}: case {unused[0].name!r}: search-rounds = {unused[0].search_rounds}: no rate is searched there"
        )
    for case, row in claim.places():
        where = f"{claim.path}: row {row.name!r}: case {case.name!r}"
        source = source_of(claim, case, row)
        if source is not None and claim.case(source[0]) not in claim.cases_of(claim.row(source[1])):
            raise ClaimError(
                f"{where}: its rate is searched with the row {source[1]!r}, which has no case {source[0]!r}"
            )
        try:
            jobs = possible(claim, Wanted(case.name, row.name, claim.seeds_of(case, row)[0], source))
            jobs += search_jobs(claim, source) if source == (case.name, row.name) else []
            for job in jobs:
                _require_valid(job.settings)
        except ValueError as error:
            raise ClaimError(f"{where}: {error}") from None


def _require_valid(given: Mapping[str, Scalar]) -> None:
    settings = Settings.from_run_config(given)
    find_entry(settings.strategy)
    require_used(settings)
    devices = load_fleet(settings.fleet).devices
    if slow := [device.name for device in devices if device.disk_latency or device.disk_write_latency]:
        raise ValueError(
            f"fleet: the device {slow[0]!r} has a disk-latency: times on other storage can be computed only without one"
        )


def require_named(claims: Collection[Claim], of_row: str, of_case: str) -> None:
    """Raise ClaimError if no claim has the row `of_row`, if none has the case `of_case`, or if no run is of both."""
    places = [(row.name, case.name) for claim in claims for case, row in claim.places()]
    for option, name, known in (
        ("--only", of_row, dict.fromkeys(row for row, _ in places)),
        ("--case", of_case, dict.fromkeys(case for _, case in places)),
    ):
        if name and name not in known:
            what = "row" if option == "--only" else "case"
            raise ClaimError(f"{option} {name}: no {what} has this name; there are {', '.join(map(repr, known))}")
    if of_row and of_case and (of_row, of_case) not in places:
        cases = ", ".join(repr(case) for row, case in places if row == of_row)
        raise ClaimError(
            f"--only {of_row} --case {of_case}: the row {of_row!r} is not run in this case, but in {cases}"
        )
