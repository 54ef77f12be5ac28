"""What a run came to: its record, from its folder and the note beside it."""

import operator
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.claims.definition import Claim
from benchmarks.claims.records import RunRecord, thinned
from benchmarks.claims.storage import STORAGE, Devices, seconds_of_rounds
from piecework.device_profiles.fleet import load_fleet
from piecework.report import display
from piecework.report.read_records import Record, read_final, read_models, with_details
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.run_folder import COMPLETED
from piecework.server_app.summary import peak_over_budget, worst_and_mean
from piecework.studies.notes import Note
from piecework.studies.results import Evaluations, evaluations, whole_rounds
from piecework.training.settings import Settings, SettingsError


def on_a_core(seconds: Sequence[float], shares: Sequence[float | None]) -> float | None:
    """Return the sum of runs' seconds, each times its share of a core; None if a share is unknown."""
    known = [share for share in shares if share is not None]
    return sum(map(operator.mul, seconds, known)) if len(known) == len(seconds) else None


def run_record(claim: Claim, folder: Path, note: Note) -> RunRecord:
    """Return the record of a run that has completed, or failed, at once or later. Raises CheckpointError or ValueError."""
    run_dir = RunDir(folder)
    try:
        settings = Settings.from_run_config(run_dir.settings() if run_dir.has_begun() else {})
    except SettingsError as error:
        raise CheckpointError(f"{folder} was written by another version of Piecework: {error}") from error
    with with_details(run_dir):
        rounds, final = whole_rounds(run_dir), read_final(run_dir)
        seconds = display.how_it_ended(run_dir, rounds)[2]
        found = evaluations(rounds, final, claim.measure)
        of_rounds = seconds_of_rounds(rounds, Devices(load_fleet(settings.fleet), settings.clients, settings.seed))
        values = {
            **{key: note.job[key] for key in ("case", "row", "seed", "hash")},
            "rate": settings.training.lr if run_dir.has_begun() else note.job["rate"],
            **{"commit": joined(note.commits), "machine": joined(note.machines)},
            **{"status": "failed" if note.failed else COMPLETED, "reason": note.failed, "rounds": len(rounds)},
            **_accuracies(found, claim.last),
            **_of_the_model(rounds, final),
            **_costs(rounds),
            "seconds": seconds,
            "core_seconds": on_a_core([seconds], [note.share]),
            "simulated": {storage: sum(each[storage] for each in of_rounds) for storage in STORAGE},
            "models": worst_and_mean(read_models(run_dir)) or None,
            "density": rounds[-1].get("density") if rounds else None,
            "curve": thinned(curve(rounds, found, of_rounds)),
        }
    return RunRecord(**values)


def _accuracies(found: Evaluations, last: int) -> dict[str, Any]:
    """Return the figures of the evaluations by the claim's measure; `last` of them are averaged."""
    if not found:
        return {"last": None, "best": None, "best_round": None, "mean_last": None}
    best_round, best = max(found, key=lambda each: each[1])
    mean = fmean(accuracy for _, accuracy in found[-last:])
    return {"last": found[-1][1], "best": best, "best_round": best_round, "mean_last": mean}


def _of_the_model(rounds: Sequence[Record], final: Record | None) -> dict[str, float | None]:
    """Return the accuracies of the trained model: clean, under PGD, under AutoAttack."""
    clean, attacked = display.accuracies(rounds, final), display.under_attack(final)
    withstood = {key: each.accuracy for key, each in attacked.items()}
    return {
        "accuracy": clean[-1] if clean else None,
        "adversarial": withstood.get("adversarial_accuracy"),
        "autoattack": withstood.get("autoattack_accuracy"),
    }


def _costs(rounds: Sequence[Record]) -> dict[str, Any]:
    """Return how many tasks were given and done, the peak, and bytes and FLOPs of training."""
    totals = display.totals(rounds)
    asked, ok = totals["asked"], totals["answered"]
    return {
        **{"asked": asked, "ok": ok, "participation": ok / asked if asked else None},
        "peak_over_budget": peak_over_budget(rounds),
        **{key: totals[key] for key in ("bytes_down", "bytes_up")},
        "flops": float(sum(client["flops"] for record in rounds for client in record["clients"])),
    }


def curve(rounds: Sequence[Record], found: Evaluations, of_rounds: Sequence[dict[str, float]]) -> list[list[float]]:
    """Return a point for each evaluation: round, megabytes so far, seconds so far by storage, accuracy."""
    sent = accumulate([(record["bytes_down"] + record["bytes_up"]) / 1e6 for record in rounds])
    passed = [accumulate([each[storage] for each in of_rounds]) for storage in STORAGE]
    so_far = {record["round"]: costs for record, *costs in zip(rounds, sent, *passed, strict=True)}
    return [[number, *so_far[number], accuracy] for number, accuracy in found]


def joined(values: Sequence[str]) -> str:
    """Return different texts in a line."""
    return "; ".join(dict.fromkeys(values))
