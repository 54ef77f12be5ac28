"""Measure where the time of a round on real processes goes: by step of a message, and by process.

    python -m benchmarks.deployment [--nodes 4] [--rounds 5] [--plain] [--set KEY=VALUE] [--json]

The run is the demo (FeDepth on scikit-learn's digits) with `--nodes` clients, all asked in each round, on the engine
`deployment`, and then on the engine `local` with as many workers. The first round, in which nodes get the app and caches
fill, is left out. Figures are medians over messages, of seconds of the clock, and of the processor in the task's process:

    poll     until the SuperNode asks the SuperLink and is given the message     fetch    until it has all its objects
    start    beside `fetch`, until a process for the task begins                 import   until it has imported Flower's client
    pull     the message from the SuperNode into the task                        install  the app's bundle is unpacked
    load     the app is imported, with torch                                     unpack   arrays to the store, data
    train    whatever else the app does                                          pack     the update into records
    push     the reply to the SuperNode                                          answer   until the SuperLink has it all
    collect  until the server has it, and has dealt with replies before it

A task's MB are its VmHWM, those of other processes their resident sets at the end. With `--plain` each client has a
`flower-superexec` of Flower's, which starts a Python for each task, instead of the warm executor. It runs on Linux only.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from piecework.commands.options import settings_from
from piecework.engines import launch
from piecework.server_app.records import RunDir

TRACE = Path(__file__).with_name("deployment_trace.py")
STEPS = (
    *("poll", "fetch", "start", "import", "pull", "install", "load"),
    *("unpack", "train", "pack", "push", "answer", "collect", "message"),
)
ROLES = ("flower-superlink", "flower-supernode", "flower-superexec", "piecework.executor", "flwr-serverapp")
Line = dict[str, Any]


def first(lines: list[Line], step: str, after: float = 0.0) -> Line | None:
    """Return the first line of a step that ended after a time; lines are in the order of their ends."""
    return next((line for line in lines if line["step"] == step and line["ended"] > after), None)


def messages(lines: list[Line]) -> Iterator[dict[str, float]]:
    """Yield the seconds of each step of each message that was sent in the given lines, and of the whole.

    A message whose task or answer is not there (it crashed, or came too late) is left out.
    """
    of_process, of_node = defaultdict[int, list[Line]](list), defaultdict[int, list[Line]](list)
    for line in lines:
        of_process[line["pid"]].append(line)
        of_node[line["node"]].append(line)
    for sent in (line for line in lines if line["step"] == "send"):
        node = of_node[sent["node"]]
        received = first(node, "receive", sent["began"])
        pulled = received and first(node, "pull", received["began"])
        answered = pulled and first(node, "answer", pulled["ended"])
        collected = answered and first(lines, "collect", answered["ended"])
        if received and pulled and answered and collected:
            yield seconds_of(sent, received, of_process[pulled["pid"]], answered, collected)


def seconds_of(sent: Line, received: Line, task: list[Line], answered: Line, collected: Line) -> dict[str, float]:
    """Return the seconds of each step of a message, and as `cpu STEP` those of the task's processor.

    `task` are the lines of the process that did it.
    """
    lasted, worked = defaultdict[str, float](float), defaultdict[str, float](float)
    for line in task:
        lasted[line["step"]] += line["ended"] - line["began"]
        worked[line["step"]] += line["cpu_ended"] - line["cpu_began"]
    entered = next(line for line in task if line["step"] == "start")
    pushed = next(line["ended"] for line in task if line["step"] == "push")
    worked["import"] = entered["cpu_began"] - task[0]["cpu_began"]
    worked["message"] = task[-1]["cpu_ended"] - task[0]["cpu_began"]
    for each in (lasted, worked):
        each["train"] = each["app"] - each["unpack"] - each["pack"]
    return {f"cpu {step}": seconds for step, seconds in worked.items()} | {
        **lasted,
        "poll": max(0.0, received["began"] - sent["ended"]),
        "fetch": received["ended"] - max(received["began"], sent["ended"]),
        "start": task[0]["began"] - max(received["began"], sent["ended"]),
        "import": entered["began"] - task[0]["began"],
        "answer": answered["ended"] - pushed,
        "collect": collected["ended"] - answered["ended"],
        "message": collected["ended"] - sent["began"],
        "peak": max(line["peak"] for line in task) / 1024,
    }


def processes() -> dict[str, tuple[int, float, float]]:
    """Return by role the number of this run's lasting processes, their processor seconds, and their mean resident set in MB."""
    found = defaultdict[str, list[tuple[float, float]]](list)
    for child in psutil.Process().children(recursive=True):
        try:
            words, times, resident = child.cmdline(), child.cpu_times(), child.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
        role = next((role for role in ROLES if any(Path(word).name == role for word in words)), None)
        if role is not None:
            found[role].append((times.user + times.system, resident / 2**20))
    return {
        role: (len(each), sum(cpu for cpu, _ in each), statistics.mean(mb for _, mb in each))
        for role, each in found.items()
    }


def run(engine: str, nodes: int, rounds: int, words: list[str], folder: Path) -> tuple[list[Line], list[dict]]:
    """Run the demo. Returns the trace's lines in the order of their ends, and after each round who has run so far."""
    trace, output = folder / f"{engine}.jsonl", folder / engine
    shutil.copy(TRACE, folder / "sitecustomize.py")
    before = dict(os.environ)
    # Without compiled modules, which a developer may have turned off, each process would spend a second more.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ |= {"DEPLOYMENT_TRACE": str(trace), "PYTHONPATH": str(folder)} if engine == "deployment" else {}
    assignments = [f"num-rounds={rounds + 1}", f"clients-per-round={nodes}", f"workers={nodes}", *words]
    settings = settings_from("", assignments, engine=engine, nodes=nodes, output_dir=str(output))
    snapshots: list[dict] = []
    run_dir = RunDir(output / "profile")
    try:
        launch.launch(settings, run_dir, lambda record: snapshots.append(processes() | {"record": record}))
    finally:
        os.environ.clear()
        os.environ |= before
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()] if trace.is_file() else []
    return sorted(lines, key=lambda line: line["ended"]), snapshots


def profile(nodes: int, rounds: int, words: list[str]) -> dict[str, Any]:
    """Run both engines and return the figures."""
    with tempfile.TemporaryDirectory() as temporary:
        lines, snapshots = run("deployment", nodes, rounds, words, Path(temporary))
        _, local = run("local", nodes, rounds, words, Path(temporary))
    begun = next(line for line in lines if line["step"] == "round")["ended"]  # the first round's
    found = list(messages([line for line in lines if line["ended"] > begun]))
    if not found:
        raise SystemExit("no message was answered after the first round")
    steps = {
        step: [statistics.median(each.get(name, 0.0) for each in found) for name in (step, f"cpu {step}")]
        for step in STEPS
    }
    last, earlier = snapshots[-1], snapshots[0]
    lasting = {
        role: {
            "processes": count,
            "cpu": (cpu - earlier.get(role, (0, 0.0, 0.0))[1]) / max(1, len(snapshots) - 1),
            "mb": resident,
        }
        for role, (count, cpu, resident) in ((role, last[role]) for role in ROLES if role in last)
    }
    tasks = {"processes": len(found) / rounds, "cpu": sum(each["cpu message"] for each in found) / rounds}
    tasks["mb"] = statistics.median(each["peak"] for each in found)
    round_seconds = {
        engine: statistics.median(each["record"]["seconds"] for each in seen[1:])
        for engine, seen in (("deployment", snapshots), ("local", local))
    }
    return {
        "nodes": nodes,
        "rounds": rounds,
        "seconds": round_seconds,
        "steps": steps,
        "processes": lasting | {"tasks": tasks},
    }


def table(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    seconds = found["seconds"]
    lines = [
        f"a round of {found['nodes']} nodes: {seconds['deployment']:.2f} s on the engine deployment, {seconds['local']:.2f} s "
        f"on local: {seconds['deployment'] / seconds['local']:.0f} times",
        "",
        f"{'step':10}{'s':>8}{'cpu s':>8}",
        *(f"{step:10}{clock:8.3f}{cpu:8.3f}" for step, (clock, cpu) in found["steps"].items()),
        "",
        f"{'process':20}{'a round':>9}{'cpu s a round':>15}{'MB each':>9}",
        *(
            f"{role:20}{each['processes']:9.1f}{each['cpu']:15.2f}{each['mb']:9.0f}"
            for role, each in found["processes"].items()
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="that are measured, after a first one")
    parser.add_argument("--plain", action="store_true", help="with Flower's own executors")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of the run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.plain:
        launch.client_executors = partial(launch.client_executors, warm=False)
    found = profile(options.nodes, options.rounds, options.set)
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
