"""Measure a SuperLink under load: nodes that answer without training, more and more of them.

    python -m benchmarks.superlink [--nodes 25,50,100,200] [--rounds 5] [--arrays 16] [--bytes 20000]
                                   [--seconds 120] [--plain] [--memory] [--json]

One SuperLink with its database in a file, as the engine `deployment` starts it, and one ServerApp, which in each round sends
every node new arrays and pulls as many from it. A node is no process of its own: 25 of them are threads of one process, each
with a connection of Flower's SuperNode (benchmarks/superlink_nodes.py). What a task takes on a device is not measured. A round
counts from the first message to the last answer; each answer that has not come after `--seconds` is lost. The SuperLink's
processor seconds are those of a round, with what comes before the first, its MB the VmHWM at the end. With `--plain` it is
Flower's own `flower-superlink`, with `--memory` one without a database.
It runs on Linux only.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from piecework.engines.launch import executor
from piecework.engines.processes import FlowerHome, flower_home, process, superlink, wait_until_healthy

ROOT = Path(__file__).resolve().parents[1]
TOGETHER = 25  # nodes in one process
START_SECONDS = 120.0  # for the nodes to register, beside the rounds
APP = {
    "project": {"name": "load", "version": "1.0.0", "description": "load on a SuperLink", "license": "Apache-2.0"},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "piecework",
                "components": {"serverapp": "load.app:app", "clientapp": "load.app:app"},
                "config": {"nodes": 0, "rounds": 0, "arrays": 0, "bytes": 0, "seconds": 0, "lines": ""},
            }
        }
    },
}
Line = dict[str, Any]


def measure(nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds with so many nodes, and return the figures."""
    with flower_home() as home, ExitStack() as stack:
        database = ["--isolation", "process"]
        if not options.memory:
            database += ["--database", str(home.path / "state.db")]
        if options.plain:
            address = ["--insecure", "--host", "127.0.0.1", "--port", str(home.port)]
            stack.enter_context(process(home, "superlink", "flower-superlink", *address, *database))
            wait_until_healthy(home, "superlink", home.port)
        else:
            stack.enter_context(superlink(home, *database))
        stack.enter_context(process(home, "superexec", "flower-superexec", *executor(home.port)))
        for first in range(0, nodes, TOGETHER):
            of_nodes = [first, min(TOGETHER, nodes - first), options.arrays, options.bytes]
            stack.enter_context(node_process(home, of_nodes))
        return figures(nodes, *rounds(home, nodes, options), home)


def node_process(home: FlowerHome, of_nodes: list[int]) -> Any:
    """Return a context in which a process of nodes runs."""
    command = [sys.executable, "-m", "benchmarks.superlink_nodes", f"127.0.0.1:{home.port}", *map(str, of_nodes)]
    home.environment["PYTHONPATH"] = str(ROOT)
    return process(home, f"nodes-{of_nodes[0]}", *command)


def submit(home: FlowerHome, nodes: int, options: argparse.Namespace) -> Path:
    """Start the run, and return the file of its lines."""
    folder, lines = home.path / "load-app", home.path / "lines.jsonl"
    (folder / "load").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(APP), encoding="utf-8")
    (folder / "load" / "__init__.py").touch()
    shutil.copy(ROOT / "benchmarks" / "superlink_app.py", folder / "load" / "app.py")
    values = {"nodes": nodes, "lines": str(lines)}
    values |= {key: getattr(options, key) for key in ("rounds", "arrays", "bytes", "seconds")}
    config = home.path / "run-config.toml"
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    home.command("run", str(folder), "piecework", "--run-config", str(config))
    return lines


def rounds(home: FlowerHome, nodes: int, options: argparse.Namespace) -> tuple[list[Line], list[float]]:
    """Run all rounds, and return their lines, and the processor seconds of the SuperLink before them and after each."""
    link = psutil.Process(home.processes["superlink"][1].pid)
    lines, seen, used = submit(home, nodes, options), list[Line](), list[float]()
    deadline = time.monotonic() + START_SECONDS + options.rounds * (options.seconds + 5)
    while len(seen) < options.rounds and time.monotonic() < deadline:
        time.sleep(0.1)
        found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
        if len(found) > len(seen) or not used:
            times = link.cpu_times()
            used.append(times.user + times.system)
        seen = found
    return seen, used


def peak(pid: int) -> float:
    """Return the peak of a process's resident set in MB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def figures(nodes: int, seen: list[Line], used: list[float], home: FlowerHome) -> dict[str, Any]:
    """Return the figures of a run; the first round, in which nodes first ask for the run, is not among the times."""
    timed = seen[1:] or seen
    failures = Counter(error for line in seen for error in line["errors"])
    for log in sorted(home.path.glob("nodes-*.log")):
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
        failures.update(line.partition(", ")[2] for line in said if line.startswith("node "))
    refused = (home.path / "superlink.log").read_text(encoding="utf-8", errors="replace")
    return {
        "nodes": nodes,
        "rounds": len(seen),
        "seconds": statistics.median(line["seconds"] for line in timed) if timed else None,
        "slowest": max(line["seconds"] for line in timed) if timed else None,
        "asked": sum(line["asked"] for line in seen),
        "lost": sum(line["asked"] - line["answered"] for line in seen),
        "cpu": (used[-1] - used[0]) / len(seen) if seen else None,
        "mb": peak(home.processes["superlink"][1].pid),
        "locked": refused.count("database is locked"),
        "failures": failures.most_common(5),
    }


def row(found: dict[str, Any]) -> str:
    """Return the figures as a line of the table."""
    if not found["rounds"]:
        return f"{found['nodes']:5}  no round ended"
    text = f"{found['nodes']:5}{found['rounds']:8}{found['seconds']:10.1f}{found['slowest']:9.1f}"
    text += f"{found['lost']:7} of {found['asked']:<6}{found['cpu']:8.1f}{found['mb']:6.0f}{found['locked']:8}"
    return "\n".join([text, *(f"        {count} x {failure}" for failure, count in found["failures"])])


def main() -> None:
    """Print a row of the table for each number of nodes, or a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="25,50,100,200", help="numbers of nodes, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arrays", type=int, default=16, help="in each message and answer")
    parser.add_argument("--bytes", type=int, default=20_000, help="of an array")
    parser.add_argument("--seconds", type=int, default=120, help="after which an answer is lost")
    parser.add_argument("--plain", action="store_true", help="Flower's own SuperLink")
    parser.add_argument("--memory", action="store_true", help="a state in memory instead of a file, without SQLite")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print("nodes  rounds  s/round  slowest   answers lost    cpu s    MB  locked", flush=True)
    for nodes in map(int, options.nodes.split(",")):
        found = measure(nodes, options)
        print(json.dumps(found) if options.json else row(found), flush=True)


if __name__ == "__main__":
    main()
