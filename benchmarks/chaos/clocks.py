"""A wall clock that jumps by hours while a run goes on, forwards and back: is the run what it is, and do its times make sense?

The jump is one of `time.time` in the process that trains, as a change of the system's clock is: `time.monotonic` goes on.
"""

import random
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.broken import said_by
from benchmarks.chaos.children import run
from benchmarks.chaos.notebook import note, noted
from benchmarks.chaos.systems import STEPS, dataset_in, differing, results, settings_of, words_for
from piecework.server_app.records import RunDir

HOURS = (-48.0, -3.0, 3.0, 48.0)
SHORT = {"num-rounds": 3}
MOST = 300.0  # seconds: no figure of a run of seconds is larger, unless a clock misled it


def jump(draw: random.Random) -> None:
    """Let the clock of this process jump by hours, at one in fifty looks at it."""
    real, offset = time.time, [0.0]

    def shown() -> float:
        if draw.random() < 0.02:
            offset[0] += 3600 * draw.choice(HOURS)
        return real() + offset[0]

    time.time = shown


def jumping_clocks(folder: Path, seed: int, trials: int, systems: list[str]) -> None:
    """Run systems under clocks that jump, and note what came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for system in systems:
        values = settings_of(system, "local", dataset_in(folder)) | SHORT | STEPS.get(system, {})
        expected: dict[str, Any] | str | None = None
        for number in range(1, trials + 1):
            if noted(folder, kind="clock", system=system, number=number, seed=seed):
                continue
            if expected is None:
                expected = finished(folder, "sound-clock", values, None)
            found = finished(folder, "jumping-clock", values, random.Random(f"{seed}-{system}-{number}"))
            differs = differing(expected, found) if isinstance(found, dict) and isinstance(expected, dict) else [found]
            came = f"FAULT: {differs}" if differs else wrong_times(folder / "jumping-clock")
            note(folder, kind="clock", system=system, number=number, seed=seed, came=came)


def finished(folder: Path, name: str, values: dict[str, Any], draw: random.Random | None) -> dict[str, Any] | str:
    """Return the results of a run, under a clock that jumps if there is something to draw from; or how it failed."""
    shutil.rmtree(folder / name, ignore_errors=True)
    ended = run(words_for(values, folder, name), folder / f"{name}.txt", lambda: jump(draw) if draw else None)
    return said_by(ended)[-500:] if ended.code else results(folder / name)


def wrong_times(run_dir: Path) -> str:
    """Return which duration in a run's records is negative or of hours, or that none is."""
    found = RunDir(run_dir)
    for record in [*found.rounds(), found.summary() or {}]:
        for key, value in record.items():
            if key.endswith("seconds") and isinstance(value, int | float) and not 0 <= value < MOST:
                return f"FAULT: {key} = {value}"
    return "same result, durations in order"
