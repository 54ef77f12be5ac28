"""A small claim and its records, whose figures are computed by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import seed_job
from benchmarks.claims.reading import read
from benchmarks.claims.records import Records, RunRecord, SearchRecord
from benchmarks.claims.search import search_hash

CLAIM = """
title = "Pieces against narrow models"
question = "Is Pieces ahead?"
paper = "The paper has Pieces ahead of Narrow."
gap = "- 3 rounds, not 500"
seeds = [1, 2, 3]
last = 2
[search]
rates = [0.05, 0.1]
further = 0
[settings]
"num-rounds" = 3
"faults.allow-untrained" = true
[[case]]
name = "weak"
settings = { model = "convnet", fleet = "demo" }
[[case]]
name = "mixed"
settings = { model = "cnn3", fleet = "demo" }
rates-from = "weak"
[[row]]
name = "Pieces"
settings = { strategy = "fedepth" }
paper = { weak = 71.25 }
[[row]]
name = "Narrow"
settings = { strategy = "allsmall" }
[[row]]
name = "Slow"
settings = { strategy = "profl" }
seeds = [1]
cases = ["weak"]
rates-from = "Pieces"
[[row]]
name = "Alone"
settings = { strategy = "exclusivefl" }
seeds = [1]
cases = ["weak"]
[[row]]
name = "Whole"
role = "bound"
settings = { strategy = "fedavg" }
seeds = [1]
cases = ["weak"]
rate = 0.2
[[order]]
text = "Pieces is ahead"
ahead = "Pieces"
behind = ["Narrow", "Alone"]
[[order]]
text = "Pieces is ahead of Narrow"
ahead = "Pieces"
behind = ["Narrow"]
"""
MACHINE = "a machine, 2 cores"


def claim_in(folder: Path) -> Claim:
    """The claim, whose definition is written to a folder."""
    (folder / "pieces.toml").write_text(CLAIM, encoding="utf-8")
    return read("pieces", folder)


def run_of(claim: Claim, place: tuple[str, str, int], end: float, sd: float, **changed: Any) -> RunRecord:
    """A completed run of three rounds that ends with this accuracy, 0.2 and 0.1 below it before.

    It lasts `sd` seconds on SD, a fifth of it on eMMC, a tenth on NVMe.
    """
    case, row, seed = place
    rate = changed.pop("rate", 0.1)
    job = seed_job(claim, claim.case(case), claim.row(row), seed, rate)
    curve = [[n, n * 10, sd * n / 3, sd * n / 15, sd * n / 30, end - 0.1 * (3 - n)] for n in (1, 2, 3)]
    record = RunRecord(
        **dict(zip(("case", "row", "seed"), place, strict=True)),
        **{"rate": rate, "hash": job.hash, "commit": "0f3c9a1", "machine": MACHINE},
        **{"status": "completed", "reason": "", "rounds": 3, "last": end, "best": end, "best_round": 3},
        **{"mean_last": end - 0.05, "accuracy": end, "adversarial": None, "autoattack": None},
        **{"asked": 30, "ok": 27, "participation": 0.9, "peak_over_budget": 0.98, "bytes_down": 20_000_000},
        **{"bytes_up": 10_000_000, "flops": 1.5e12, "seconds": 600.0, "models": None, "curve": curve},
        simulated={"sd": sd, "emmc": sd / 5, "nvme": sd / 10},
    )
    return replace(record, **changed)


def records_of(claim: Claim) -> Records:
    """The case weak is through but for a run that cannot train; of mixed there is one seed of Pieces, and old ones."""
    nobody = {
        "status": "failed",
        "reason": "no client trained in round 1\ntry: more",
        "ok": 0,
        "mean_last": None,
        "curve": [],
    }
    runs = [
        run_of(claim, ("weak", "Slow", 1), 0.75, 900),
        *(run_of(claim, ("weak", "Pieces", seed), 0.63 + 0.02 * seed, 300) for seed in (1, 2, 3)),
        *(run_of(claim, ("weak", "Narrow", seed), 0.63 + 0.01 * seed, 90, peak_over_budget=0.5) for seed in (1, 2, 3)),
        run_of(claim, ("weak", "Alone", 1), 0.0, 0.0, **nobody),
        run_of(claim, ("weak", "Whole", 1), 0.8, 30, rate=0.2, peak_over_budget=None),
        run_of(claim, ("mixed", "Pieces", 2), 0.65, 300),
        run_of(claim, ("mixed", "Narrow", 1), 0.9, 300, hash="00000000"),
    ]
    searched = {row: search_hash(claim, ("weak", row), {0.05: None, 0.1: None}) for row in ("Pieces", "Alone")}
    searches = [
        SearchRecord("weak", "Narrow", "00000000", "0f3c9a1", MACHINE, 1, {"0.05": 0.31, "0.1": 0.42}, 0.1, 200.0),
        SearchRecord(
            "weak", "Pieces", searched["Pieces"], "0f3c9a1", MACHINE, 1, {"0.05": 0.31, "0.1": 0.42}, 0.1, 200.0
        ),
        SearchRecord(
            "weak", "Alone", searched["Alone"], "0f3c9a1", MACHINE, 1, {"0.05": None, "0.1": None}, None, 20.0
        ),
    ]
    return Records("pieces", runs, searches)
