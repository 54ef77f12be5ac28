"""Measure the anonymous memory of one client's executor and its tasks, while the demo runs on real processes.

    python -m benchmarks.executor_memory [--plain] [--rounds 3] [--set KEY=VALUE]

The sums are of the proportional sets (`Pss_Anon` of `smaps_rollup`, so a page that processes share counts once), sampled every
50 ms: idle before the first task, the largest beside a task, and between tasks. With `--plain` the executor is Flower's
`flower-superexec`. The run is the demo with one client on the engine `deployment`. It runs on Linux only.
"""

import argparse
import re
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import psutil

from piecework.commands.options import settings_from
from piecework.engines import launch
from piecework.server_app.records import RunDir

SAMPLE_SECONDS = 0.05
IDLE, TASK, BETWEEN = "idle before the first task", "beside a task", "between tasks"


def anonymous_mb(pid: int) -> float:
    """Return the proportional anonymous memory of a process in MB. Raises OSError if it has ended."""
    found = re.search(
        r"^Pss_Anon:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"), re.MULTILINE
    )
    if found is None:
        raise OSError(f"process {pid} has no memory any more")
    return int(found[1]) * 1024 / 1e6


def sample(address: str) -> tuple[str, float]:
    """Return what the client is doing, and the memory of the executor of a SuperNode's address and of its tasks."""
    total, seen = 0.0, set[str]()
    for process in psutil.Process().children(recursive=True):
        try:
            words, name = process.cmdline(), process.name()
            if address in words and not any("supernode" in word for word in words):
                total, seen = total + anonymous_mb(process.pid), seen | {name}
        except (psutil.Error, OSError):  # it has just ended
            continue
    task, warm = (any(kind in name for name in seen) for kind in ("flwr-clientapp", "piecework-warm"))
    return (TASK if task else BETWEEN if warm else IDLE), total


def watch(executors: dict[str, list[str]], over: threading.Event, found: dict[str, list[float]]) -> None:
    """Sample until the run is over."""
    ((*_, address),) = executors.values()
    while not over.wait(SAMPLE_SECONDS):
        doing, size = sample(address)
        found[doing].append(size)


def main() -> None:
    """Run the demo and print the figures."""
    parser = argparse.ArgumentParser("python -m benchmarks.executor_memory", description=__doc__.partition("\n")[0])
    parser.add_argument("--plain", action="store_true", help="with Flower's own executor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    options = parser.parse_args()
    commands, over, found = launch.client_executors, threading.Event(), defaultdict[str, list[float]](list)
    threads = list[threading.Thread]()

    def watched(ports: list[int]) -> dict[str, list[str]]:
        executors = commands(ports, warm=not options.plain)
        threads.append(threading.Thread(target=watch, args=(executors, over, found)))
        threads[0].start()
        return executors

    launch.client_executors = watched
    with tempfile.TemporaryDirectory() as folder:
        assignments = [f"num-rounds={options.rounds}", "clients-per-round=1", *options.set]
        settings = settings_from("", assignments, engine="deployment", nodes=1, output_dir=folder)
        try:
            launch.launch(settings, RunDir(Path(folder) / "run"), lambda _: None)
        finally:
            over.set()
            threads[0].join()
    for doing in (IDLE, TASK, BETWEEN):
        if sizes := found.get(doing):
            print(f"{doing:26s} {max(sizes):6.0f} MB at most ({len(sizes)} samples)")


if __name__ == "__main__":
    main()
