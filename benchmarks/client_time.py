"""Tell where a client's time goes on the local engine: milliseconds of each part, beside the training loop itself.

    python -m benchmarks.client_time --data-dir FOLDER [--rounds 5]

The run is that of benchmarks/simulation.py with one epoch, in this process, on one thread, under cProfile, which makes what is
Python slower than it is: shares count here, not seconds. The first round is a warm-up.
"""

import argparse
import cProfile
import pstats
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulation import Load, settings_of
from piecework.engines.launch import launch
from piecework.server_app.records import RunDir

PARTS = {
    "training": ("training/loop.py", "epoch"),
    "the message's arrays to files": ("client_app/prepare.py", "prepare_client"),
    "atoms from files": ("training/loop.py", "__init__"),
    "trained weights to files": ("client_app/client.py", "save"),
    "the folder of the task removed": ("client_app/store.py", "close"),
    "server: reading the reply": ("federation/dispatcher.py", "read"),
    "server: checking the update": ("federation/aggregation.py", "check_update"),
}
ACCOUNTING = ("device_profiles/memory.py", "__torch_dispatch__")
OPERATOR = ("torch/_ops.py", "__call__")


def main() -> None:
    """Profile a run, and print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=lambda text: str(Path(text).resolve()), default="")
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    work, profiler, seconds = Load(asked.dataset, asked.data_dir, 100, 10, 1), cProfile.Profile(), list[float]()

    def note(record: dict[str, Any]) -> None:
        if record["round"] > 1:
            seconds.append(record["train_seconds"])
        (profiler.enable if record["round"] == 1 else lambda: None)()

    with tempfile.TemporaryDirectory() as output:
        settings = settings_of("local", work, 1, asked.rounds, Path(output))
        launch(settings, RunDir(Path(output) / settings.run_name), note)
    profiler.disable()
    clients = work.asked * len(seconds)
    print(f"{sum(seconds) / clients * 1e3:6.1f} ms a client")
    for part, milliseconds in parts(pstats.Stats(profiler), clients).items():
        print(f"{milliseconds:6.1f} ms {part}")


def parts(stats: pstats.Stats, clients: int) -> dict[str, float]:
    """Return the milliseconds a client of each part."""
    found = {part: spent(stats, place) / clients * 1e3 for part, place in PARTS.items()}
    found["of training: the accounting"] = (spent(stats, ACCOUNTING) - spent(stats, OPERATOR)) / clients * 1e3
    return found


def spent(stats: pstats.Stats, place: tuple[str, str]) -> float:
    """Return the seconds of a function, with what it calls. `place` is the end of its file's path, and its name."""
    entries: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = vars(stats)["stats"]
    return sum(entry[3] for (file, _, name), entry in entries.items() if file.endswith(place[0]) and name == place[1])


if __name__ == "__main__":
    main()
