"""Runs killed with SIGKILL at random moments, several times each, and resumed: are they the unbroken ones?

On the local engine and Ray's grid, a run must come to the model, the clients' states and the records of the unbroken run on the
local engine, bit for bit. On real processes it must complete, with all rounds. Nothing of a killed process may be left.
"""

import random
import shutil
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.children import Child, Ended, end_of, kill, leftovers, run, start
from benchmarks.chaos.notebook import note, noted
from benchmarks.chaos.systems import REAL, dataset_in, differing, results, settings_of, words_for, words_to_resume
from piecework.device_profiles.documents import read_json
from piecework.engines.launch import federation
from piecework.engines.processes import FlowerHome
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import LOCK_FILE

EXACT = ("local", "ray")  # engines on which a run is the same to the bit, wherever it was broken off
START = {"ray": 30.0, "deployment": 100.0}  # times that a process takes longer to start than on the local engine
REAL_CLIENTS = int(REAL["clients"])


@dataclass(frozen=True)
class Length:
    """The seconds of an unbroken run on the local engine, of them those before its folder was there, and its rounds."""

    whole: float
    start: float
    rounds: int


def kill_runs(folder: Path, engine: str, systems: list[str], runs: int, seed: int, kills: tuple[int, int]) -> None:
    """Kill and resume `runs` runs of each system, each `kills` times, from the least to the most; go on with what is noted.

    On the engine `superlink` the runs are of one SuperLink with its nodes, and only ServerApps are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with federation(REAL_CLIENTS) if engine == "superlink" else nullcontext() as home:
        for number, system in product(range(1, runs + 1), systems):
            named = {"engine": engine, "system": system, "run": number, "seed": seed}
            if not noted(folder, kind="kill", **named):
                draw = random.Random(f"{seed}-{engine}-{system}-{number}")
                found = kill_run(folder, engine, system, draw, kills, home)
                note(folder, kind="kill", **named, **found)


def words_to_join(home: FlowerHome | None) -> list[str]:
    """Return the words of the command line that name the SuperLink that is there."""
    return ["--superlink", f"127.0.0.1:{home.port}", "--insecure"] if home is not None else []


def kill_server_app(run_dir: Path, home: FlowerHome) -> None:
    """Kill the process that holds the lock of a run, if it is one of this SuperLink."""
    with suppress(psutil.NoSuchProcess, ValueError):
        writer = psutil.Process(read_json((run_dir / LOCK_FILE).read_text("utf-8"))["pid"])
        if writer.environ().get("FLWR_HOME") == str(home.path):
            writer.kill()


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
    found = results(folder / name)
    return found, Length(known[0]["seconds"], known[0]["start"], len(found["records"]))


def kill_run(
    folder: Path, engine: str, system: str, draw: random.Random, kills: tuple[int, int], home: FlowerHome | None
) -> dict[str, Any]:
    """Run a system, kill it at random moments, resume it to its end, and return what came of it.

    A run that ended before it was killed as often as was drawn is killed less often; one that was not killed is repeated.
    """
    expected, length = unbroken(folder, engine, system)
    run_dir, there = folder / f"{system}-{engine}", words_to_join(home)
    begin = words_for(settings_of(system, engine, dataset_in(folder)), folder, run_dir.name) + there
    began, killed, left = time.monotonic(), list[dict[str, Any]](), list[str]()
    while not killed:
        shutil.rmtree(run_dir, ignore_errors=True)
        ended, wanted = None, draw.randint(*kills)
        while ended is None:
            with tempfile.TemporaryDirectory(prefix="c-") as temporary:  # a short name, for Ray's sockets
                after = Moment.draw(draw, engine, length, run_dir) if len(killed) < wanted else None
                words, environment = (
                    next_words(run_dir, begin, there, draw),
                    {"TMPDIR": temporary, "RAY_TMPDIR": temporary},
                )
                child = start(words, run_dir.with_suffix(f".{len(killed)}.txt"), environment)
                if (ended := after.wait(child, run_dir) if after else end_of(child)) is None:
                    what = draw.choice(["launcher", "group"]) if home is None else "ServerApp"
                    if home is not None:
                        kill_server_app(run_dir, home)
                    else:
                        kill(child, everything=what == "group")
                    killed.append({"what": what, "after": after and after.text, **progress(run_dir)})
                    end_of(child)
                left += leftovers(child, Path(temporary))
    found = judge(run_dir, ended, expected, len(expected["records"]))
    if not found["faults"] and not found["differs"]:
        shutil.rmtree(run_dir)
    return {"kills": killed, "left": sorted(set(left)), "seconds": round(time.monotonic() - began, 1), **found}


@dataclass(frozen=True)
class Moment:
    """When a process is killed: so many seconds after its start, or after it began to write the run (`writing`).

    With `rounds` it is after so many rounds were recorded. `before` is what stood in the run's lock when it was started.
    """

    seconds: float
    writing: bool
    before: str
    rounds: int = 0

    @classmethod
    def draw(cls, draw: random.Random, engine: str, length: Length, run_dir: Path) -> "Moment":
        """Draw a moment: one in four while it starts, else one of what is left of the rounds.

        Where processes take long to start, and who knows how long, that is a round and a moment after its record.
        """
        lock, done = run_dir / LOCK_FILE, RunDir(run_dir).last_complete_round()
        before, rounds = lock.read_text("utf-8") if lock.is_file() else "", length.whole - length.start
        if draw.random() < 0.25:
            return cls(max(0.001, draw.random() * length.start * START.get(engine, 1.0)), engine == "superlink", before)
        if engine == "local":
            return cls(draw.random() * rounds * (1 - done / length.rounds), True, before)
        return cls(
            draw.random() * rounds / length.rounds,
            True,
            before,
            draw.randint(min(done, length.rounds - 1), length.rounds - 1),
        )

    @property
    def text(self) -> str:
        """The moment in words."""
        since = f"round {self.rounds}" if self.rounds else "it began to write" if self.writing else "it began"
        return f"{self.seconds:.3f} s after {since}"

    def wait(self, child: Child, run_dir: Path) -> Ended | None:
        """Wait for the moment; returns how the process ended if it ended before, else None."""
        lock = run_dir / LOCK_FILE
        while self.writing and not (
            lock.is_file()
            and lock.read_text("utf-8") not in ("", self.before)
            and progress(run_dir)["rounds"] >= self.rounds
        ):
            if (ended := end_of(child, time.monotonic() + 0.005)) is not None:
                return ended
        since = time.monotonic() if self.writing else child.started
        return end_of(child, since + self.seconds)


def next_words(run_dir: Path, begin: list[str], there: list[str], draw: random.Random) -> list[str]:
    """Return how a user would go on: resume what there is, or begin again under the same name if no checkpoint is there."""
    found = RunDir(run_dir)
    if found.checkpoint_paths() or (found.has_begun() and draw.random() < 0.5):
        return words_to_resume(run_dir) + there
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
