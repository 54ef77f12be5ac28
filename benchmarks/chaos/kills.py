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

from benchmarks.chaos.children import Child, Ended, end_of, kill, leftovers, run, start
from benchmarks.chaos.notebook import note, noted
from benchmarks.chaos.systems import dataset_in, differing, results, settings_of, words_for, words_to_resume
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import LOCK_FILE

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
    """Run a system, kill it at random moments, resume it to its end, and return what came of it.

    A run that ended before it was killed as often as was drawn is killed less often; one that was not killed is repeated.
    """
    expected, local = unbroken(folder, engine, system)
    length, run_dir = length_on(folder, engine, local), folder / f"{system}-{engine}"
    begin = words_for(settings_of(system, engine, dataset_in(folder)), folder, run_dir.name)
    began, killed, left = time.monotonic(), list[dict[str, Any]](), list[str]()
    while not killed:
        shutil.rmtree(run_dir, ignore_errors=True)
        ended, wanted = None, draw.randint(*kills)
        while ended is None:
            with tempfile.TemporaryDirectory(prefix="c-") as temporary:  # a short name, for Ray's sockets
                after = Moment.draw(draw, length, run_dir, expected) if len(killed) < wanted else None
                words, environment = next_words(run_dir, begin, draw), {"TMPDIR": temporary, "RAY_TMPDIR": temporary}
                child = start(words, run_dir.with_suffix(f".{len(killed)}.txt"), environment)
                if (ended := after.wait(child, run_dir) if after else end_of(child)) is None:
                    everything = draw.random() < 0.5
                    kill(child, everything=everything)
                    killed.append({"after": after and after.text, "group": everything, **progress(run_dir)})
                    end_of(child)
                left += leftovers(child, Path(temporary))
    found = judge(run_dir, ended, expected, len(expected["records"]))
    if not found["faults"] and not found["differs"]:
        shutil.rmtree(run_dir)
    return {"kills": killed, "left": sorted(set(left)), "seconds": round(time.monotonic() - began, 1), **found}


@dataclass(frozen=True)
class Moment:
    """When a process is killed: so many seconds after its start, or after it began to write the run (`writing`).

    `before` is what stood in the lock of the run when it was started.
    """

    seconds: float
    writing: bool
    before: str

    @classmethod
    def draw(cls, draw: random.Random, length: Length, run_dir: Path, expected: dict[str, Any]) -> "Moment":
        """Draw a moment: one in four while it starts, else one of what is left of the rounds."""
        lock, left = run_dir / LOCK_FILE, 1 - RunDir(run_dir).last_complete_round() / len(expected["records"])
        before = lock.read_text("utf-8") if lock.is_file() else ""
        if draw.random() < 0.25:
            return cls(max(0.001, draw.random() * length.start), False, before)
        return cls(draw.random() * (length.whole - length.start) * left, True, before)

    @property
    def text(self) -> str:
        """The moment in words."""
        return f"{self.seconds:.3f} s after it began {'to write' if self.writing else ''}".rstrip()

    def wait(self, child: Child, run_dir: Path) -> Ended | None:
        """Wait for the moment; returns how the process ended if it ended before, else None."""
        lock = run_dir / LOCK_FILE
        while self.writing and not (lock.is_file() and lock.read_text("utf-8") not in ("", self.before)):
            if (ended := end_of(child, time.monotonic() + 0.005)) is not None:
                return ended
        since = time.monotonic() if self.writing else child.started
        return end_of(child, since + self.seconds)


def next_words(run_dir: Path, begin: list[str], draw: random.Random) -> list[str]:
    """Return how a user would go on: resume what there is, or begin again under the same name if no checkpoint is there."""
    found = RunDir(run_dir)
    if found.checkpoint_paths() or (found.has_begun() and draw.random() < 0.5):
        return words_to_resume(run_dir)
    return begin


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
