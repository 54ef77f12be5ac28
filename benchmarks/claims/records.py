"""The records of a claim, `docs/claims/NAME.json`: what its finished runs and searches came to.

    {"claim": NAME, "runs": [{...}, ...], "searches": [{...}, ...]}

A run or a search is a line, sorted by case, row and seed in the definition's order, so that a difference can be read. Floats
have four significant digits, rates all of theirs.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from benchmarks.claims.definition import Claim, ClaimError
from piecework.client_app.disk import write_atomically
from piecework.device_profiles.documents import abbreviate, read_json

DOCS = Path(__file__).resolve().parents[2] / "docs" / "claims"
POINTS = 20  # of a curve, at most
EXACT = ("rate", "chosen")


@dataclass(frozen=True)
class RunRecord:
    """A run that has completed or failed.

    `last`, `best` and `mean_last` are accuracies by the claim's measure, in fractions of 1: of the last evaluation, the best
    one (in round `best_round`, the first of equals), and the mean of the last `Claim.last` ones. `accuracy`, `adversarial`
    (PGD) and `autoattack` are those of the trained model. `participation` is ok / asked, over all tasks of clients. Bytes are
    of training messages, `flops` of clients' training. `simulated` has the seconds on the emulated devices by storage
    (storage.STORAGE), `seconds` are those that the run took. `models`: the mean over the clients and the worst of the
    accuracies of the models that their devices deploy; None where all have the same one. `curve` has a row for each of up to
    POINTS evaluations: round, megabytes sent so far, simulated seconds so far on sd, emmc and nvme, accuracy by the measure.
    `density` is the fraction of the weights that is not pruned, of SpaFL's clients' models: the mean over layers and clients in
    the last round; None for systems that prune nothing, and in older records. `core_seconds`: what `seconds` would be on a core
    of its own, as its processes did not have a whole one on a busy machine; None in older records.
    """

    case: str
    row: str
    seed: int
    rate: float | None
    hash: str
    commit: str
    machine: str
    status: str  # completed or failed
    reason: str
    rounds: int
    last: float | None
    best: float | None
    best_round: int | None
    mean_last: float | None
    accuracy: float | None
    adversarial: float | None
    autoattack: float | None
    asked: int
    ok: int
    participation: float | None
    peak_over_budget: float | None
    bytes_down: int
    bytes_up: int
    flops: float
    seconds: float
    simulated: dict[str, float]
    models: dict[str, float] | None
    curve: list[list[float]]
    density: float | None = None
    core_seconds: float | None = None


@dataclass(frozen=True)
class SearchRecord:
    """The search of a row's rate, of which every run has completed or failed.

    `rates` has the accuracy (the last, by the claim's measure) of each rate, None for a run that failed; `chosen` is the best
    rate, None if all failed. `rounds` are those of each run, `seconds` and `core_seconds` those of all (RunRecord).
    """

    case: str
    row: str
    hash: str
    commit: str
    machine: str
    rounds: int
    rates: dict[str, float | None]
    chosen: float | None
    seconds: float
    core_seconds: float | None = None

    @property
    def figures(self) -> dict[float, float | None]:
        """The accuracy of each rate."""
        return {float(rate): accuracy for rate, accuracy in self.rates.items()}


@dataclass(frozen=True)
class Records:
    """All records of a claim."""

    claim: str
    runs: list[RunRecord]
    searches: list[SearchRecord]

    @classmethod
    def read(cls, claim: str, folder: Path = DOCS) -> Self:
        """Return the records of a claim; none if it has no file yet. Raises ClaimError."""
        path = folder / f"{claim}.json"
        if not path.is_file():
            return cls(claim, [], [])
        try:
            found = read_json(path.read_text(encoding="utf-8"))
            runs = [_record(RunRecord, each) for each in found["runs"]]
            return cls(str(found["claim"]), runs, [_record(SearchRecord, each) for each in found["searches"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ClaimError(f"{path} is damaged, or of another version: {error}") from None

    def write(self, claim: Claim, folder: Path = DOCS) -> Path:
        """Write the claim's file, with a line for each record."""
        cases, rows = ([entry.name for entry in entries] for entries in (claim.cases, claim.rows))

        def place(record: RunRecord | SearchRecord) -> tuple[int, int, int]:
            return cases.index(record.case), rows.index(record.row), getattr(record, "seed", 0)

        path = folder / f"{self.claim}.json"
        runs, searches = (sorted(each, key=place) for each in (self.runs, self.searches))
        folder.mkdir(parents=True, exist_ok=True)
        text = f'{{"claim": {json.dumps(self.claim)},\n"runs": {_lines(runs)},\n"searches": {_lines(searches)}}}\n'
        write_atomically(path, text.encode())
        return path


def _record(kind: type[Any], values: Any) -> Any:
    known = {field.name: field.default is MISSING for field in fields(kind)}
    given = set(values) if isinstance(values, Mapping) else set()
    lacking = {name for name, required in known.items() if required} - given
    if lacking or given - known.keys():
        raise ValueError(
            f"a record {abbreviate(values)} lacks {sorted(lacking)} and has too many {sorted(given - known.keys())}"
        )
    return kind(**values)


def _lines(records: list[Any]) -> str:
    if not records:
        return "[]"
    return "[\n" + ",\n".join(json.dumps(written(record), ensure_ascii=False) for record in records) + "\n]"


def written(record: RunRecord | SearchRecord) -> dict[str, Any]:
    """Return a record's values as the file has them."""
    return {key: value if key in EXACT else rounded(value) for key, value in asdict(record).items()}


def rounded(value: Any) -> Any:
    """Return a value whose floats have four significant digits; whole ones without a fraction."""
    if isinstance(value, float):
        short = float(f"{value:.4g}")
        return int(short) if short.is_integer() and abs(short) >= 10 else short
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def thinned(points: list[Any], most: int = POINTS) -> list[Any]:
    """Return at most `most` points, evenly spread over the list; the first and the last are kept."""
    if len(points) <= most:
        return points
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]
