"""Runs killed with SIGKILL at random moments, several times each, and resumed: are they the unbroken ones?

On the local engine and Ray's grid, a run must come to the model, the clients' states and the records of the unbroken run on the
local engine, bit for bit. On real processes it must complete, with all rounds. Nothing of a killed process may be left.
"""

import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.children import Ended, end_of, kill, leftovers, run, start
from benchmarks.chaos.notebook import note, noted
from benchmarks.chaos.systems import dataset_in, differing, results, settings_of, words_for, words_to_resume
from piecework.server_app.records import RunDir

EXACT = ("local", "ray")  # engines on which a run is the same to the bit, wherever it was broken off


@dataclass(frozen=True)
class Length:
    """The seconds of an unbroken run, and of them those before its folder was there."""

    whole: float
    start: float


def kill_runs(folder: Path, engine: str, systems: list[str], runs: int, seed: int, kills: tuple[int, int]) -> None:
    """Kill and resume `runs` runs of each system, each `kills` times, from the least to the most; go on with what is noted."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, runs + 1):
        for system in systems:
            named = {"engine": engine, "system": system, "run": number, "seed": seed}
            if not noted(folder, kind="kill", **named):
                found = kill_run(folder, engine, system, random.Random(f"{seed}-{engine}-{system}-{number}"), kills)
                note(folder, kind="kill", **named, **found)


def unbroken(folder: Path, engine: str, system: str) -> tuple[dict[str, Any], Length]:
    """Return the results of the unbroken run with the settings for an engine, on the local engine, and its length."""
    values = settings_of(system, engine, dataset_in(folder)) | {"engine": "local"}
    name = f"unbroken-{system}" + ("" if engine in EXACT else f"-{engine}")
    known = noted(folder, kind="unbroken", name=name)
    if not known:
        shutil.rmtree(folder / name, ignore_errors=True)
        began = time.time()
        ended = run(words_for(values, folder, name), folder / f"{name}.txt")
        if ended.code:
            raise SystemExit(f"the unbroken run of {system} ended with exit code {ended.code}:\n{ended.said}")
        before = (folder / name / "settings.toml").stat().st_mtime - began
        note(folder, kind="unbroken", name=name, seconds=ended.seconds, start=before)
        known = noted(folder, kind="unbroken", name=name)
    return results(folder / name), Length(known[0]["seconds"], known[0]["start"])


def length_on(folder: Path, engine: str, local: Length) -> Length:
    """Return the length of an unbroken run on an engine: what that takes beside the run itself is measured once."""
    if engine == "local":
        return local
    name = f"length-{engine}"
    if not (known := noted(folder, kind="length", engine=engine)):
        shutil.rmtree(folder / name, ignore_errors=True)
        values = settings_of("fedavg", engine, dataset_in(folder))
        began = time.time()
        ended = run(words_for(values, folder, name), folder / f"{name}.txt")
        if ended.code:
            raise SystemExit(f"the unbroken run on {engine} ended with exit code {ended.code}:\n{ended.said}")
        before = (folder / name / "settings.toml").stat().st_mtime - began
        note(folder, kind="length", engine=engine, seconds=ended.seconds, start=before)
        shutil.rmtree(folder / name)
        known = noted(folder, kind="length", engine=engine)
    return Length(known[0]["seconds"], known[0]["start"])


def kill_run(folder: Path, engine: str, system: str, draw: random.Random, kills: tuple[int, int]) -> dict[str, Any]:
    """Run a system, kill it at random moments, resume it to its end, and return what came of it."""
    expected, local = unbroken(folder, engine, system)
    length, name = length_on(folder, engine, local), f"{system}-{engine}"
    values, began = settings_of(system, engine, dataset_in(folder)), time.monotonic()
    shutil.rmtree(folder / name, ignore_errors=True)
    killed, left, wanted, ended = list[dict[str, Any]](), list[str](), draw.randint(*kills), None
    with tempfile.TemporaryDirectory(prefix="c-") as temporary:  # a short name, for Ray's sockets
        for attempt in range(wanted + 1):
            words = next_words(folder / name, words_for(values, folder, name), draw)
            child = start(words, folder / f"{name}-{attempt}.txt", {"TMPDIR": temporary, "RAY_TMPDIR": temporary})
            after = moment(draw, length, folder / name, expected) if attempt < wanted else 0.0
            if (ended := end_of(child, child.started + after if after else 0.0)) is None:
                everything = draw.random() < 0.5
                kill(child, everything=everything)
                killed.append({"after": round(after, 3), "group": everything, **progress(folder / name)})
                end_of(child)
            left += leftovers(child, Path(temporary))
            if ended is not None and (ended.code or attempt == wanted):
                break
    assert ended is not None
    found = judge(folder / name, ended, expected, len(expected["records"]))
    if not found["faults"] and not found["differs"]:
        shutil.rmtree(folder / name)
    return {"kills": killed, "left": sorted(set(left)), "seconds": round(time.monotonic() - began, 1), **found}


def next_words(run_dir: Path, begin: list[str], draw: random.Random) -> list[str]:
    """Return how a user would go on: resume what there is, or begin again under the same name if no checkpoint is there."""
    found = RunDir(run_dir)
    if found.checkpoint_paths() or (found.has_begun() and draw.random() < 0.5):
        return words_to_resume(run_dir)
    return begin


def moment(draw: random.Random, length: Length, run_dir: Path, expected: dict[str, Any]) -> float:
    """Return after how many seconds to kill: at any moment from the start to the expected end of what is left."""
    done = RunDir(run_dir).last_complete_round() / len(expected["records"])
    return max(0.001, draw.random() * (length.start + (length.whole - length.start) * (1 - done)))


def progress(run_dir: Path) -> dict[str, int]:
    """Return how far a run has come: rounds that are recorded, and the round of the newest checkpoint."""
    found = RunDir(run_dir)
    return {"rounds": len(found.readable_rounds()[0]), "checkpoint": found.last_complete_round()}


def judge(run_dir: Path, ended: Ended, expected: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return whether the last process completed the run, whether that is the unbroken one, and what is wrong with it."""
    if ended.code:
        return {"completed": False, "differs": [], "faults": [f"exit code {ended.code}: {ended.said[-2000:]}"]}
    summary, numbers = RunDir(run_dir).summary() or {}, [record["round"] for record in RunDir(run_dir).rounds()]
    complete = summary.get("status") == "completed" and numbers == list(range(1, rounds + 1))
    differs = differing(expected, results(run_dir))
    faults = [] if complete else [f"status {summary.get('status')}, rounds {numbers}"]
    return {"completed": complete, "differs": differs, "faults": faults}
