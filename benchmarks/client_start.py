"""Measure what a client's process costs before it trains: seconds of import and the resident floor, in fresh processes.

    python -m benchmarks.client_start [--repeats 5] [--limit-mb 340] [--json]

A process imports what Flower's `flwr-clientapp` does, torch and our ClientApp, then answers one tiny train task (FedAvg, the
demo's convnet on 70 random images). The exit code is 1 if the floor, the largest resident set up to the answer, is above
`--limit-mb` (340 with the CPU wheel, 650 with a CUDA wheel). Figures are medians; MB are 2^20 bytes. It runs on Linux only,
because the figures come from /proc.

Measured on 2 cores of an x86-64 server shared with others, with compiled modules in the file cache:

    wheel                       import s  flwr  torch  ours   imported MB  flwr  torch  ours  after a task MB   floor MB
    torch 2.15.0+cu132, CUDA 13.2     2.03  0.61   1.33  0.05           582    78    487     6              613        614
    torch 2.13.0+cpu, CPU             1.87  0.61   1.15  0.05           284    78    189     6              315        315
"""

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS_MB = {"CPU": 340.0, "CUDA": 650.0}  # a tenth above what was measured, so that a slower or larger start fails
PARTS = ("flwr", "torch", "ours")

CHILD = """
import json, pickle, sys, time
from pathlib import Path

def size(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1024

figures, began = {}, (time.perf_counter(), size("VmRSS"))

def note(part):
    global began
    now = time.perf_counter(), size("VmRSS")
    figures[part] = {"seconds": now[0] - began[0], "mb": now[1] - began[1]}
    began = now

import flwr.supernode.runtime.run_clientapp
note("flwr")
import torch
note("torch")
import piecework.client_app.app
note("ours")
figures["imported"] = size("VmRSS")
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Flower makes no message outside a task
message, config = pickle.loads(Path(sys.argv[1]).read_bytes())
reply = piecework.client_app.app.app(message, Context(1, 2, {"partition-id": 0, "num-partitions": 1}, RecordDict(), config))
outcome = reply.content["outcome"]
if outcome["status"] != "ok":
    sys.exit(f"the task was not done: {outcome['reason']}")
figures |= {"task": size("VmRSS"), "floor": size("VmHWM")}
figures["wheel"] = f"torch {torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU'}"
print(json.dumps(figures))
"""


def write_task(folder: Path) -> Path:
    """Write a file with a train message and the run's configuration."""
    import numpy as np
    from flwr.app import Message, RecordDict

    from piecework.models.cascade import initial_state
    from piecework.models.work_item import WorkItem
    from piecework.server_app.local_grid import FIRST_NODE, identify
    from piecework.training.messages import Task
    from piecework.training.parcels import pack
    from piecework.training.settings import Settings
    from piecework.training.setup import blueprint_for, dataset_of

    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (70, 8, 8), dtype=np.uint8), np.arange(70) % 10
    np.savez(folder / "data.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    dataset = {"dataset": f"npz:{folder / 'data.npz'}", "clients": 1, "data.partition": "iid"}
    settings = Settings.from_run_config({**dataset, "strategy": "fedavg", "fleet": "unlimited"})
    blueprint = blueprint_for(settings, dataset_of(settings))
    task = Task(
        experiment_id="benchmark",
        round=1,
        state_round=0,
        strategy="fedavg",
        budget=10**12,
        reference=10**9,
        lr=settings.training.lr,
        state_dir=str(folder),
        costs={WorkItem(tuple(range(len(blueprint.atoms)))): 1},
    )
    arrays = pack((name, value.numpy()) for name, value in initial_state(blueprint, settings.seed))
    identify(1)
    content = RecordDict({"task": task.to_record(), "arrays": arrays})
    message = Message(content, dst_node_id=FIRST_NODE, message_type="train")
    (folder / "task.pickle").write_bytes(pickle.dumps((message, settings.to_run_config())))
    return folder / "task.pickle"


def measure(repeats: int) -> dict[str, object]:
    """Return medians over fresh processes, after one that compiles modules and fills the file cache."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), str(ROOT)]))
    with tempfile.TemporaryDirectory() as folder:
        environment["PIECEWORK_CACHE"] = os.environ["PIECEWORK_CACHE"] = str(Path(folder) / "cache")
        command = [sys.executable, "-c", CHILD, str(write_task(Path(folder)))]
        runs = [
            json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
            for _ in range(repeats + 1)
        ][1:]
    median: dict[str, object] = {
        part: {unit: statistics.median(run[part][unit] for run in runs) for unit in ("seconds", "mb")} for part in PARTS
    }
    for key in ("imported", "task", "floor"):
        median[f"{key}_mb"] = statistics.median(run[key] for run in runs)
    median["import_seconds"] = statistics.median(sum(run[part]["seconds"] for part in PARTS) for run in runs)
    return {"wheel": runs[0]["wheel"], "repeats": repeats, **median}


def table(found: dict) -> str:
    """Return the table, a head and a row."""
    seconds = [f"{found[part]['seconds']:.2f}" for part in PARTS]
    sizes = [f"{found[part]['mb']:.0f}" for part in PARTS]
    head = f"{'import s':>9}{'flwr':>6}{'torch':>7}{'ours':>6}{'imported MB':>14}{'flwr':>6}{'torch':>7}{'ours':>6}"
    line = f"{found['import_seconds']:9.2f}{seconds[0]:>6}{seconds[1]:>7}{seconds[2]:>6}{found['imported_mb']:14.0f}"
    line += f"{sizes[0]:>6}{sizes[1]:>7}{sizes[2]:>6}{found['task_mb']:17.0f}{found['floor_mb']:11.0f}"
    return f"{'wheel':29}{head[1:]}{'after a task MB':>17}{'floor MB':>11}\n{found['wheel']:29}{line[1:]}"


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-mb", type=float, help="exit with 1 when the floor is above; default: the wheel's")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if sys.platform != "linux":
        parser.error("resident sets are read from /proc, which only Linux has")
    found = measure(max(1, options.repeats))
    print(json.dumps(found) if options.json else table(found))
    limit = options.limit_mb or LIMITS_MB["CPU" if str(found["wheel"]).endswith("CPU") else "CUDA"]
    if found["floor_mb"] > limit:  # type: ignore[operator]
        sys.exit(f"the floor is {found['floor_mb']:.0f} MB, above the limit of {limit:.0f} MB")


if __name__ == "__main__":
    main()
