"""A small claim in a file, and what its runs leave, for tests of the harness."""

import atexit
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from helpers import TRIO, fleet_json, run_local

from benchmarks.claims import jobs
from benchmarks.claims.definition import Claim
from piecework.server_app.records import RunDir
from piecework.training.settings import Settings
from piecework.training.settings.table import flat

TWO_CASES = """
title = "a"
question = "b"
paper = "c"
gap = "d"
seeds = [1, 2]
last = 2
[search]
rates = [0.02, 0.05, 0.1]
further = 0
[settings]
clients = 6
"clients-per-round" = 3
"num-rounds" = 8
[[case]]
name = "weak"
settings = { fleet = "reference-step", "data.partition" = "iid" }
[[case]]
name = "skew"
settings = { fleet = "reference-step", "data.partition" = "dirichlet" }
rates-from = "weak"
[[row]]
name = "FeDepth"
settings = { strategy = "fedepth" }
[[row]]
name = "bound"
settings = { strategy = "fedavg", fleet = "unlimited" }
rate = 0.07
seeds = [1]
role = "bound"
[[row]]
name = "ProFL"
settings = { strategy = "profl", "profl.stage-rounds" = 4 }
cases = ["weak"]
rates = [0.01, 0.2]
search = { "profl.stage-rounds" = 1 }
paper = { weak = 71.2 }
[[row]]
name = "m-FeDepth"
settings = { strategy = "m-fedepth" }
cases = ["skew"]
rates-from = "FeDepth"
[[order]]
text = "FeDepth is ahead of the bound"
ahead = "FeDepth"
behind = ["bound"]
cases = ["skew"]
"""


def a_claim(folder: Path, text: str, name: str = "tiny") -> Claim:
    """Write a definition and load it."""
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return jobs.load(name, folder)


@cache
def template() -> RunDir:
    """A run of one round by three clients with the digits, in a folder that lasts as long as the tests."""
    folder = Path(mkdtemp())
    atexit.register(rmtree, folder, ignore_errors=True)
    return run_local(folder, **TRIO, strategy="fedavg", fleet=fleet_json(rich=1.2))


def finish(
    folder: Path,
    accuracies: Sequence[float | None],
    seconds: float = 2.0,
    status: str = "completed",
    reason: str = "",
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    """Write what a run leaves: a round for each accuracy, of `seconds` each; evaluated unless that is None.

    `settings` are the run's, by default those of the template. `changes` are other values of each round's record.
    """
    (record,) = template().rounds()
    run_dir = RunDir(folder)
    run_dir.create(Settings.from_run_config(flat(settings) if settings else template().settings()))
    run_dir.rounds_file.unlink(missing_ok=True)
    for number, accuracy in enumerate(accuracies, 1):
        run_dir.append_round(record | {"round": number, "accuracy": accuracy, "seconds": seconds, **changes})
    (run_dir.checkpoints / f"round-{len(accuracies):05d}").mkdir(parents=True, exist_ok=True)
    if status:
        summary = {
            "status": status,
            "reason": reason,
            "rounds": len(accuracies),
            "seconds": seconds * len(accuracies) + 3,
        }
        run_dir.write_summary(summary)
