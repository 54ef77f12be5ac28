"""Kill a run that trackers follow, resume it, and look whether each tracker has one continuous curve of it.

    python -m benchmarks.track_resume [--minutes 60] [--kills 2] [--track tensorboard,mlflow] [--folder runs] [--json]
        [--engine local] [--nodes 20] [--server-app]

The demo, with `kill -9` after each of so many equal parts of the time: of the process that was started, or with
`--server-app`, on the engines ray and deployment, of the ServerApp alone, which the others outlive. The last process is given
as many rounds as fit into the last part, as the first ones took. What the trackers have is then read with their own libraries,
and compared with rounds.jsonl: of each curve every round once, and the accuracies. The exit code is 1 if any is wrong.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from piecework.device_profiles.documents import read_json
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import LOCK_FILE

Curves = dict[str, list[tuple[int, float]]]  # the points of a curve by its name: steps and values, as they were written
ENDLESS = 10**6  # rounds
CHECKED = ("accuracy", "loss", "seconds", "bytes_down", "simulated_seconds")
FLOAT32 = 1e-6  # relative: TensorBoard's precision


def tensorboard_curves(folder: Path) -> tuple[Curves, int]:
    """Return the curves that TensorBoard shows, and how many points of `accuracy` it does not show because they are void."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: list[Curves] = []
    for purge in (True, False):
        events = EventAccumulator(str(folder), {"scalars": 0}, purge_orphaned_data=purge).Reload()
        found.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
    return found[0], len(found[1]["accuracy"]) - len(found[0]["accuracy"])


def mlflow_runs(store: Path) -> list[tuple[Any, Curves]]:
    """Return the runs in a database of MLflow, as MLflow has them, with their curves."""
    from mlflow import MlflowClient

    client, found = MlflowClient(f"sqlite:///{store}"), []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
            found.append((run, {name: [(each.step, each.value) for each in of] for name, of in histories.items()}))
    return found


def process(options: argparse.Namespace, **changed: int | str) -> subprocess.Popen[bytes]:
    """Start the run, or resume it with `resume_from`."""
    values = {"output-dir": options.folder, "run-name": "tracked", "run.track": options.track}
    values |= {"training.lr-schedule": "constant"}
    values |= {key.replace("_", "-"): value for key, value in changed.items()}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    where = ["--engine", options.engine, "--nodes", str(options.nodes)]
    command = [sys.executable, "-m", "piecework.cli", "run", *where, *sets]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def kill_server_app(folder: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Kill the process that writes a run's folder. Raises SystemExit if that is the launcher: the engine has no other."""
    writer = int(read_json((folder / LOCK_FILE).read_text(encoding="utf-8"))["pid"])
    if writer == launcher.pid:
        launcher.kill()
        raise SystemExit("--server-app: on this engine the ServerApp runs in the process that was started")
    os.kill(writer, signal.SIGKILL)


def run_in_parts(options: argparse.Namespace) -> tuple[RunDir, list[int]]:
    """Run, kill and resume. Returns the run, and how many rounds it had at each kill."""
    part = options.minutes * 60 / (options.kills + 1)
    run, at_kills, resume = RunDir(options.folder / "tracked"), list[int](), dict[str, str]()
    for _ in range(options.kills):
        child, until = process(options, num_rounds=ENDLESS, **resume), time.monotonic() + part
        before = run.last_complete_round()
        while time.monotonic() < until or run.last_complete_round() == before:  # a round of each process at least
            if child.poll() is not None:
                raise SystemExit(f"the run ended by itself, with exit code {child.returncode}")
            time.sleep(0.05)
        if options.server_app:
            kill_server_app(run.path, child)
        else:
            child.kill()
        child.wait()
        at_kills.append(run.last_complete_round())
        resume = {"resume_from": str(run.path)}
    rounds = math.ceil(at_kills[-1] * (options.kills + 1) / options.kills)
    if code := process(options, num_rounds=rounds, **resume).wait():
        raise SystemExit(f"the last process ended with exit code {code}")
    return run, at_kills


def faults_of(name: str, curves: Curves, rounds: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a tracker's curves: rounds that are missing or there twice, or another accuracy."""
    expected = [record["round"] for record in rounds]
    faults = []
    for key in CHECKED:
        steps = [step for step, _ in curves.get(key, [])]
        missing, twice = set(expected) - set(steps), {step for step in steps if steps.count(step) > 1}
        if steps != expected:
            faults.append(f"{name}: {key} lacks rounds {sorted(missing)}, and has {sorted(twice)} twice")
    for (step, value), record in zip(curves.get("accuracy", []), rounds, strict=False):
        if not math.isclose(value, record["accuracy"], rel_tol=FLOAT32):
            faults.append(f"{name}: accuracy {value} in round {step}, and not {record['accuracy']}")
    return faults


def check(run: RunDir, track: str) -> tuple[dict[str, Any], list[str]]:
    """Return what the trackers have of a run, and what is wrong with it."""
    rounds, found, faults = run.rounds(), dict[str, Any](), list[str]()
    if "tensorboard" in track:
        curves, void = tensorboard_curves(run.path / "tensorboard")
        faults += faults_of("tensorboard", curves, rounds)
        found["tensorboard"] = {"points": len(curves["accuracy"]), "void": void, "curves": len(curves)}
    if "mlflow" in track:
        runs = mlflow_runs(run.path.parent / "mlflow.db")
        faults += [f"mlflow: {len(runs)} runs"] if len(runs) != 1 else []
        for _, curves in runs:
            faults += faults_of("mlflow", curves, rounds)
        found["mlflow"] = {"runs": len(runs), "points": len(runs[0][1]["accuracy"]), "status": runs[0][0].info.status}
    return found, faults


def main() -> int:
    """Do it, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--track", default="tensorboard,mlflow", help="of tensorboard and mlflow")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="of a run `tracked`, which must not be there yet"
    )
    parser.add_argument("--engine", default="local", help="local, ray or deployment")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--server-app", action="store_true", help="kill the ServerApp alone, on ray or deployment")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    run, at_kills = run_in_parts(options)
    found, faults = check(run, options.track)
    minutes, rounds = (time.monotonic() - started) / 60, len(run.rounds())
    if options.json:
        print(json.dumps({"minutes": minutes, "rounds": rounds, "killed_after": at_kills, "faults": faults} | found))
    else:
        print(f"{rounds} rounds in {minutes:.1f} minutes, killed after rounds {', '.join(map(str, at_kills))}")
        print("\n".join([*(f"{name}: {what}" for name, what in found.items()), *faults]))
        print("one continuous curve in each" if not faults else "not one continuous curve")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
