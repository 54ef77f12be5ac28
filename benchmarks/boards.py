"""Measure the memory that is left for training on a board: SuperNode, executor and task in one container.

    python -m benchmarks.boards [--image piecework] [--boards 512MB,1GB,2GB,4GB,8GB] [--fraction 0.85]
                                [--models lenet5,resnet18,vgg16] [--batch-size 128] [--json]

Each line is a federation with one client: a SuperLink here, and a container without swap, as large as `MemoryMax` of the
systemd unit, in which `flower-supernode --isolation subprocess` runs with device = "auto". `piecework run --superlink` trains
one round of FeDepth on two batches of random images of 3x32x32, 10 classes. The anonymous memory of a process is the largest
sample of its private pages, from /proc; for the task it excludes the training bytes that the task counted itself. `budget` is
what the device measured before it trained, less `memory.reserve`. Requires Docker on this machine, an image made from the
Dockerfile, and root, because the processes belong to another user.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.containers import amounts
from piecework.device_profiles.profile import format_bytes
from piecework.engines.processes import flower_home, free_ports, superlink

ROOT = Path(__file__).resolve().parents[1]
BATCHES, CLASSES = 2, 10
ROLES = {"flower-supernode": "supernode", "flower-superexec": "executor", "flwr-clientapp": "task"}
SAMPLE_SECONDS = 0.02


def role_of(command: list[str]) -> str | None:
    """Return which of the three a command is, as in `python .../flower-supernode --insecure ...`, or None."""
    names = [Path(word).name for word in command[:2]]
    return next((ROLES[name] for name in names if name in ROLES), None)


def anonymous_bytes(smaps_rollup: str) -> int:
    """Return the private pages of a process that have no backing file. Raises ValueError if the text has no such line."""
    for line in smaps_rollup.splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no line Anonymous: in {smaps_rollup[:200]!r}")


class Sampler(threading.Thread):
    """Samples the largest anonymous memory of each role in a container until `stop` is set."""

    def __init__(self, container: str) -> None:
        super().__init__(daemon=True)
        self.container, self.stop = container, threading.Event()
        self.largest = dict.fromkeys(ROLES.values(), 0)

    def run(self) -> None:
        """Sample. A process may end between being listed and being read."""
        inspect = ["docker", "inspect", "--format", "{{.State.Pid}}", self.container]
        first = psutil.Process(int(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout))
        while not self.stop.wait(SAMPLE_SECONDS):
            for process in first.children(recursive=True):
                try:
                    role = role_of(process.cmdline())
                    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
                except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    continue
                if role and text:
                    self.largest[role] = max(self.largest[role], anonymous_bytes(text))


@contextmanager
def board(image: str, limit: int, address: str, data: Path) -> Iterator[str]:
    """Run a container as a board with its one service; yield its name."""
    name = f"piecework-board-{uuid.uuid4().hex[:8]}"
    (port,) = free_ports(1)
    config = 'partition-id=0 num-partitions=1 device="auto" data-dir="/data" state-dir="/store"'
    command = ["docker", "run", "--detach", "--init", "--name", name, "--network", "host"]
    command += ["--memory", str(limit), "--memory-swap", str(limit), "--volume", f"{data}:/data:ro", image]
    command += ["flower-supernode", "--insecure", "--isolation", "subprocess", "--superlink", address]
    command += ["--port", str(port), "--node-config", config]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    try:
        yield name
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)


def piecework(*arguments: str) -> dict[str, Any]:
    """Return the JSON that one of our commands prints last."""
    command = [sys.executable, "-m", "piecework.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def settings_of(model: str, dataset: Path, batch_size: int) -> list[str]:
    """Return the options of a run that trains each of a model's pieces once, on all examples of a file."""
    settings = {
        "model": model,
        "dataset": f"npz:{dataset}",
        "strategy": "fedepth",
        "fleet": "reference-step",
        "training.batch-size": batch_size,
        "num-rounds": 1,
        "clients-per-round": 0,
        "training.local-epochs": 1,
        "data.validation-fraction": 0.0,
        "fedepth.mutual-models": 1,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def measure(options: argparse.Namespace, size: int, model: str) -> dict[str, Any]:
    """Measure one board and model."""
    limit = int(size * options.fraction)
    with tempfile.TemporaryDirectory() as name, flower_home() as home, superlink(home, "--isolation", "subprocess"):
        folder = Path(name)
        folder.chmod(0o755)
        rng, count = np.random.default_rng(0), BATCHES * options.batch_size
        images, labels = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), np.arange(count) % CLASSES
        np.savez(folder / "random.npz", x_train=images, y_train=labels, x_test=images[:50], y_test=labels[:50])
        sets = settings_of(model, folder / "random.npz", options.batch_size)
        piecework("export-data", "--nodes", "1", "--out", str(folder / "data"), *sets)
        address = f"127.0.0.1:{home.port}"
        with board(options.image, limit, address, folder / "data" / "node-0") as container:
            sampler = Sampler(container)
            sampler.start()
            started = time.monotonic()
            runs = ["--output-dir", str(folder / "runs"), "--nodes", "1"]
            summary = piecework("run", "--superlink", address, "--insecure", *runs, *sets)
            seconds = time.monotonic() - started
            sampler.stop.set()
            sampler.join()
        lines = (Path(summary["run_dir"]) / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        (client,) = json.loads(lines[0])["clients"] if lines else ({},)
    largest = dict(sampler.largest)
    largest["task"] -= int(client.get("measured_peak", 0))
    return {"board": size, "limit": limit, "model": model, **largest, "seconds": seconds, "client": client}


HEAD = ("board", "limit", "model", "SuperNode", "executor", "task", "message", "budget", "status", "pieces", "counted")


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """Return a table row."""
    client = found["client"]
    sizes = [format_bytes(found[key]) for key in ("board", "limit", "supernode", "executor", "task")]
    reported = [format_bytes(int(client.get(key, 0))) for key in ("message_bytes", "budget", "measured_peak")]
    status = str(client.get("status", "no round")), str(client.get("pieces", ""))
    return *sizes[:2], found["model"], *sizes[2:], *reported[:2], *status, reported[2]


def main() -> None:
    """Print a line per board and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="piecework")
    parser.add_argument("--boards", type=amounts, default="512MB,1GB,2GB,4GB,8GB")
    parser.add_argument(
        "--fraction", type=float, default=0.85, help="fraction of the board for the service: MemoryMax of the unit"
    )
    parser.add_argument("--models", default="lenet5,resnet18,vgg16")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print("\n".join(f"| {' | '.join(cells)} |" for cells in (HEAD, ("---",) * len(HEAD))), flush=True)
    for size in options.boards:
        for model in options.models.split(","):
            found = measure(options, size, model)
            print(json.dumps(found) if options.json else f"| {' | '.join(row(found))} |", flush=True)


if __name__ == "__main__":
    main()
