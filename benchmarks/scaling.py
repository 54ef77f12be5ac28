"""Measure how a round's seconds grow when clients grow with the nodes of a Ray cluster, and where a node's time goes.

    python -m benchmarks.scaling [--nodes 1,2,4] [--quota 0.35] [--head-quota 0.4] [--clients-per-node 8] [--images 600]
                                 [--epochs 1,5] [--rounds 5] [--set KEY=VALUE] [--image piecework-cluster] [--json]

The nodes are containers of docker-compose.cluster.yml, whose image must be there (docs/howto/cluster.md): a head with the run
and no client, and workers with one client at a time. Each has as much of a processor as its quota says, so that they do not
take each other's where the machine has more than the sum. Each client has random images of 28x28; by default the model is
LeNet-5 (1.7 MB) and the system FedAvg, with batches of 64. A round asks so many clients of each node. The quotas hold from
the second round on, so that a cluster starts soon, and the first two rounds are left out.

A round has the same work for each node, so its seconds ought to stay the same: `efficiency` is the first number of nodes' round
divided by it. The seconds of a node's round, in the mean of nodes and rounds, are:

    train      its clients' tasks, by their own clocks        message    until it has a task, and until the head has its answer
    between    it has no task, but will get one               others     it has done its last, and another node has not
    head       before the first task of a round, and after its last answer: the head evaluates, records, and chooses

`at work` are the seconds of a round in which the head's run does not wait, beside the nodes' work or alone, and `evaluate`
those of them in which it evaluates the model. `quota used` is how much of its processor's time a worker took, and the head,
and `the run` is how much of that of the head was the run's own process; the rest are Ray's. `--json` has the head's seconds by
phase (as in benchmarks/head.py, and `write`, the checkpoint).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("train", "message", "between", "others", "head")
OVERRIDE = """
services:
  head:
    command: >-
      ray start --head --block --port 6379 --include-dashboard false --num-cpus 0 --object-store-memory 250000000
    volumes: ["{benchmarks}:/app/benchmarks:ro"]
"""
PATIENCE_SECONDS = 300.0
WARM_UP = 2  # rounds
# What a container has used of processors so far, in nanoseconds.
USAGE = (
    "awk '/usage_usec/{print $2*1000}' /sys/fs/cgroup/cpu.stat 2>/dev/null || cat /sys/fs/cgroup/cpuacct/cpuacct.usage"
)


class Part(NamedTuple):
    """Where the seconds of a round went, on the mean node: see the top of this file."""

    train: float
    message: float
    between: float
    others: float
    head: float


class Scaled(NamedTuple):
    """What was measured with so many nodes: see the top of this file."""

    nodes: int
    epochs: int
    seconds: float
    part: Part
    phases: dict[str, float]
    quota_used: float
    head_quota_used: float
    run_part: float


def parts_of(found: dict[str, Any], nodes: int) -> Part:
    """Return where the seconds of a round went, of which the head had these calls and clients these seconds."""
    whole = found["ended"] - found["began"]
    calls = [(node, began, ended) for node, _, began, ended in found["calls"]]
    first, last = min(began for _, began, _ in calls), max(ended for _, _, ended in calls)
    lasted = sum(ended - began for _, began, ended in calls)
    ends = [max(ended for name, _, ended in calls if name == node) for node in {name for name, *_ in calls}]
    ends += [first] * (nodes - len(ends))  # of a node that had none
    others = sum(last - end for end in ends)
    train = sum(found["trained"].values())
    between = nodes * (last - first) - others - lasted
    return Part(*(each / nodes for each in (train, lasted - train, between, others)), whole - (last - first))


class Cluster:
    """The containers of a head and of workers."""

    def __init__(self, options: argparse.Namespace, nodes: int, folder: str) -> None:
        self.options, self.nodes = options, nodes
        override = Path(folder) / "override.yml"
        override.write_text(OVERRIDE.format(benchmarks=ROOT / "benchmarks"), encoding="utf-8")
        compose = ["docker", "compose"]
        if subprocess.run([*compose, "version"], capture_output=True, check=False).returncode:
            compose = ["docker-compose"]
        files = ["-f", str(ROOT / "docker-compose.cluster.yml"), "-f", str(override)]
        self._compose = [*compose, "-p", f"scaling{uuid.uuid4().hex[:8]}", "--project-directory", str(ROOT), *files]
        self._environment = os.environ | {
            "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
            "PIECEWORK_CLUSTER_IMAGE": options.image,
            "PIECEWORK_HEAD_DATA": folder,
            "PIECEWORK_NODE_CPUS": str(os.cpu_count()),
        }

    def call(self, *words: str) -> str:
        """Run compose. Exits with what it says if it fails."""
        command = [*self._compose, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._environment)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: {done.stderr[-2000:]}")
        return done.stdout

    def start(self) -> None:
        """Start the containers, and wait until Ray has them all."""
        self.call("up", "-d", "--no-build", "--scale", f"worker={self.nodes}")
        self.head, self.workers = self.call("ps", "-q", "head").strip(), self.call("ps", "-q", "worker").split()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._joined() <= self.nodes:
            if time.monotonic() > deadline:
                sys.exit(f"{self.nodes} workers have not joined within {PATIENCE_SECONDS:g} s")
            time.sleep(1.0)

    def _joined(self) -> int:
        command = ["docker", "exec", self.head, "ray", "status"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.split("Pending:")[0].count(" node_")

    def _limit(self, head: float, workers: float) -> None:
        """Set how much of a processor the head has, and each worker."""
        for quota, containers in ((head, [self.head]), (workers, self.workers)):
            subprocess.run(["docker", "update", "--cpus", str(quota), *containers], capture_output=True, check=True)

    def used(self, container: str) -> float:
        """Return the seconds of processors that a container has used."""
        command = ["docker", "exec", container, "sh", "-c", USAGE]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1e9

    def measure(self, settings: dict[str, Any]) -> Scaled:
        """Run on the cluster."""
        self._limit(head=os.cpu_count() or 1, workers=os.cpu_count() or 1)
        code = "from benchmarks.scaling_run import drive; drive()"
        command = ["docker", "exec", "-i", "-w", "/app", self.head, "python", "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdin and run.stdout
            run.stdin.write(json.dumps(settings))
            run.stdin.close()
            notes, found = list[tuple[float, list[float]]](), list[dict[str, Any]]()
            for said in map(json.loads, run.stdout):
                if said == 1:
                    self._limit(self.options.head_quota, self.options.quota)
                if said in (WARM_UP, settings["num-rounds"]):
                    notes.append((time.perf_counter(), [self.used(each) for each in (self.head, *self.workers)]))
                found = said
        if run.returncode or len(notes) < 2:
            sys.exit(f"the run on {self.nodes} nodes ended with {run.returncode}")
        (began, before), (ended, after) = notes
        head, *workers = (b - a for a, b in zip(before, after, strict=True))
        used = statistics.mean(workers) / self.options.quota, head / self.options.head_quota
        own = sum(each["processor"] for each in found[WARM_UP:]) / head
        return self._scaled(
            settings["training.local-epochs"], found[WARM_UP:], *(u / (ended - began) for u in used), own
        )

    def _scaled(self, epochs: int, found: Sequence[dict[str, Any]], *used: float) -> Scaled:
        parts = [parts_of(each, self.nodes) for each in found]
        mean = Part(*(statistics.mean(each) for each in zip(*parts, strict=True)))
        phases = {name: statistics.mean(each["seconds"][name] for each in found) for name in found[0]["seconds"]}
        return Scaled(self.nodes, epochs, sum(mean), mean, phases, *used)


@contextmanager
def cluster(options: argparse.Namespace, nodes: int, folder: str) -> Iterator[Cluster]:
    """Start containers, and remove them."""
    found = Cluster(options, nodes, folder)
    try:
        found.start()
        yield found
    finally:
        found.call("down", "--volumes", "--timeout", "5")


def write_images(path: Path, count: int) -> None:
    """Write so many random images of ten classes, and 1,000 for tests."""
    draw, sizes = np.random.default_rng(1), {"train": count, "test": 1000}
    images = {f"x_{name}": draw.integers(0, 255, (size, 28, 28, 1), np.uint8) for name, size in sizes.items()}
    labels = {f"y_{name}": np.arange(size) % 10 for name, size in sizes.items()}
    np.savez(path, **images, **labels)


def convert(text: str) -> Any:
    """Return a setting's value: a number or a truth value if the text is one, else the text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def settings_of(options: argparse.Namespace, nodes: int, most: int, epochs: int) -> dict[str, Any]:
    """Return the run's settings. There are as many clients for any number of nodes, of which it asks each node's."""
    own = {key: convert(value) for key, value in (each.split("=", 1) for each in options.set)}
    return {
        "engine": "ray",
        "strategy": "fedavg",
        "model": "lenet5",
        "dataset": "npz:random.npz",
        "data-dir": "/data",
        "data.partition": "iid",
        "data.validation-fraction": 0.0,
        "fleet": "unlimited",
        "clients": most * options.clients_per_node,
        "clients-per-round": nodes * options.clients_per_node,
        "num-rounds": options.rounds + WARM_UP,
        "training.local-epochs": epochs,
        "training.batch-size": 64,
        "training.lr": 0.05,
    } | own


def line(found: Scaled, one: Scaled) -> str:
    """Return a row of the table."""
    head = found.seconds - found.phases["wait"], found.phases["evaluate"]
    cells = [f"{found.epochs}", f"{found.nodes}", f"{found.seconds:.2f}", f"{one.seconds / found.seconds:.2f}"]
    cells += [f"{each:.2f}" for each in (*found.part, *head)]
    cells += [f"{found.quota_used:.0%}", f"{found.head_quota_used:.0%}", f"{found.run_part:.0%}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a line for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,2,4")
    parser.add_argument("--quota", type=float, default=0.35, help="processors of a worker")
    parser.add_argument("--head-quota", type=float, default=0.4, help="processors of the head")
    parser.add_argument("--clients-per-node", type=int, default=8, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=600, help="of each client")
    parser.add_argument("--epochs", default="1")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    parser.add_argument("--image", default="piecework-cluster")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts, rows = [int(each) for each in options.nodes.split(",")], list[Scaled]()
    if not options.json:
        heads = (
            "epochs",
            "nodes",
            "seconds",
            "efficiency",
            *PARTS,
            "at work",
            "evaluate",
            "quota used",
            "the head's",
            "the run",
        )
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        write_images(Path(folder) / "random.npz", max(counts) * options.clients_per_node * options.images)
        for nodes in counts:
            with cluster(options, nodes, folder) as started:
                for epochs in map(int, options.epochs.split(",")):
                    row = started.measure(settings_of(options, nodes, max(counts), epochs))
                    rows.append(row)
                    one = next(each for each in rows if each.epochs == epochs)
                    said = json.dumps(row._asdict() | {"part": row.part._asdict()}) if options.json else line(row, one)
                    print(said, flush=True)


if __name__ == "__main__":
    main()
