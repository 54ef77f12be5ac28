"""What the records of all claims say for advice: piecework/plans/measured.toml, which `piecework plan --suggest` reads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.claims.definition import Case, Claim, Row
from benchmarks.claims.jobs import load, merged
from benchmarks.claims.records import DOCS, Records
from benchmarks.claims.standings import Standing, accuracy_at, current, deadlines, standings
from benchmarks.claims.storage import STORAGE
from benchmarks.claims.verdicts import as_good_with_more_rounds, difference
from piecework.device_profiles.fleet import load_fleet
from piecework.plans.measured import FILE, Situation, situate, skew_of
from piecework.plans.question import ask
from piecework.training.methods import SIMPLEST
from piecework.training.settings import Settings

VARIANTS = {"training.batch-size", "architecture.width"}  # a row with one of these stands for no system
HEAD = "# Written by `python -m benchmarks.claims table` from docs/claims. Do not edit: a test compares it.\n"


def write_evidence(names: Sequence[str], docs: Path = DOCS, file: Path = FILE) -> Path:
    """Write the evidence of the claims with these names, and return the file."""
    file.write_text(document(names, docs), encoding="utf-8")
    return file


def document(names: Sequence[str], docs: Path = DOCS) -> str:
    """Return the text of the evidence: each case in which two candidates or more have trained, and two thirds have a record.

    One with fewer would stand before an older case that has all of its rivals.
    """
    cases = [case for name in names for case in cases_of(load(name), docs)]
    return HEAD + tomli_w.dumps({"case": cases})


def cases_of(claim: Claim, docs: Path) -> Iterator[dict[str, Any]]:
    """Yield the cases of a claim that say something.

    Cases whose fleet says what part of the model a device keeps, or whose memory is a paper's count, say nothing of devices
    that are limited by their memory. One where the whole model in less memory has not run may have another leader.
    """
    found = standings(claim, current(claim, Records.read(claim.name, docs)))
    for case in claim.cases:
        if not is_limited_by_memory(claim, case) or not has_whole_model(claim, case, found[case.name]):
            continue
        there = [each for each in found[case.name] if each.candidate]
        ran = [each for each in there if each.runs]
        plain = plain_rows(row for row in claim.rows if row in [each.row for each in ran])
        if len(ran) > 1 and 3 * sum(each.recorded for each in there) >= 2 * len(there):
            yield {
                "claim": claim.name,
                "name": case.name,
                "setting": setting_of(claim, case),
                "situation": asdict(situation_of(claim, case)),
                "lead": lead_of(*ran[:2]),
                "rows": [row_of(each) | {"plain": each.row in plain, "ahead_of": behind(each, ran)} for each in ran],
                "longer": longer_rows(claim, case, found[case.name]),
                "idle": [idle_name(each.row, ran) for each in there if each.untrainable],
                "missing": [each.row.name for each in there if not each.recorded],
                "times": times_of(ran),
            }


def idle_name(row: Row, ran: Iterable[Standing]) -> str:
    """Return the name of a row that no client can train, with what its system lacks if another row of it has trained."""
    same = [each.row for each in ran if each.row.settings["strategy"] == row.settings["strategy"]]
    fits = any(each.settings.get("memory.fit") for each in same) and not {"memory.fit", *VARIANTS} & row.settings.keys()
    return f"{row.name} without memory.fit" if fits else row.name


def plain_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that stand for their system and its `memory.fit` in advice: the first of each.

    One with a batch or a width of its own stands for none.
    """
    found: dict[tuple[Any, Any], Row] = {}
    for row in rows:
        if not VARIANTS & row.settings.keys():
            found.setdefault((row.settings["strategy"], row.settings.get("memory.fit", "")), row)
    return [*found.values()]


def longer_rows(claim: Claim, case: Case, there: Sequence[Standing]) -> list[dict[str, Any]]:
    """Return the rows that are not behind the first one by having more rounds: the best of each system and number of rounds."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each, compared in as_good_with_more_rounds(claim, case, there):
        row = row_of(each) | {"verdict": compared.verdict}
        best.setdefault((row["strategy"], row["fit"], row["rounds"]), row)
    return [*best.values()]


def is_limited_by_memory(claim: Claim, case: Case) -> bool:
    """Return whether what a client trains in a case is decided by true bytes."""
    settings = plain_settings(claim, case)
    return settings.memory.model == "traced" and not any(device.keep for device in load_fleet(settings.fleet).devices)


def has_whole_model(claim: Claim, case: Case, there: Sequence[Standing]) -> bool:
    """Return whether the whole model has a record in a case: in less memory, or in a plain step where that fits everywhere."""
    fits = situation_of(claim, case).poorest == 1
    averaged = [each.row for each in there if each.recorded and each.row.settings.get("strategy") == SIMPLEST]
    return any(fits or row.settings.get("memory.fit") for row in averaged)


def plain_settings(claim: Claim, case: Case) -> Settings:
    """Return the settings of federated averaging in a case."""
    own = {"strategy": SIMPLEST, "training.adversarial": claim.measure != "accuracy"}
    return Settings.from_run_config(merged(claim, case, Row(name="plain", settings=own)))


def situation_of(claim: Claim, case: Case) -> Situation:
    """Return the situation of a case's devices and model."""
    settings = plain_settings(claim, case)
    return situate(settings, ask(settings))


def setting_of(claim: Claim, case: Case) -> str:
    """Return a case in words: its model and data, its rounds and clients."""
    settings = plain_settings(claim, case)
    width = settings.architecture.width
    model = settings.model if width == 1 else f"{settings.model} x {width:g}"
    skew = skew_of(settings)
    judged = f", each judged by its own data ({skew})" if skew else ""
    return (
        f"{model} on {settings.dataset}, {settings.num_rounds} rounds of {settings.clients_per_round} of {settings.clients} "
        f"clients{judged}"
    )


def row_of(standing: Standing) -> dict[str, Any]:
    """Return the figures of a row: accuracy and participation in percent, simulated seconds by storage."""
    accuracy, participation = standing.mean, standing.average(lambda run: run.participation)
    assert accuracy is not None
    return {
        "name": standing.row.name,
        "strategy": standing.row.settings.get("strategy", ""),
        "fit": standing.row.settings.get("memory.fit", ""),
        "advice": dict(standing.row.advice),
        "rate": standing.runs[0].rate or 0.0,
        "accuracy": accuracy,  # not rounded: differences of rounded figures would not be those of the claims' pages
        "seeds": len(standing.by_seed),
        "rounds": standing.runs[0].rounds,
        "participation": round(100 * (participation or 0.0), 1),
        "seconds": {storage: seconds_of(standing, storage) for storage in STORAGE},
    }


def seconds_of(standing: Standing, storage: str) -> float:
    """Return the simulated seconds that a run of a row takes, the mean over its seeds."""
    return round(standing.average(lambda run: run.simulated[storage]) or 0.0, 1)


def behind(standing: Standing, ran: Sequence[Standing]) -> dict[str, float]:
    """Return the rows of which one is ahead by the rule for orders, and by how many points, with the seeds that both have."""
    compared = {each.row.name: difference(standing, each) for each in ran if each is not standing}
    return {name: round(found.points or 0.0, 1) for name, found in compared.items() if found.verdict == "ahead"}


def lead_of(first: Standing, second: Standing) -> dict[str, Any]:
    """Return how far the first row is ahead of the second one: points, seeds that both have, and the verdict by the rule."""
    found = difference(first, second)
    points = round(found.points or 0.0, 1)
    return {"points": points, "next": second.row.name, "seeds": found.seeds, "verdict": found.verdict}


def times_of(ran: Sequence[Standing]) -> list[dict[str, Any]]:
    """Return by storage the time in which half of the rows are through, and the row that is ahead then."""
    found = []
    for storage, bandwidth in STORAGE.items():
        seconds = deadlines(ran, storage)[-1]
        by_row = {each.row.name: accuracy_at(each, storage, seconds) or 0.0 for each in ran}
        row = max(by_row, key=lambda name: by_row[name])
        figures = {"seconds": round(seconds, 1), "row": row, "accuracy": round(by_row[row], 1)}
        found.append({"storage": storage, "bandwidth": bandwidth} | figures)
    return found
