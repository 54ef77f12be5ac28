"""A soak: thousands of short rounds with clients that come, go, stall and lie; memory, threads and files must stay flat.

    python -m benchmarks.soak [--rounds 5000] [--workers 2] [--kill-every 0] [--stop-every 0] [--seed 1]

One run of FeDepth on the engine `local`, with real worker processes. A schedule drawn from the seed says in each round which
of the 12 clients are away, and which of those asked answer with an error, with a lie, later, or never. A client that returns
has another node id. With `--kill-every N` a worker is killed (SIGKILL) in every Nth round, with `--stop-every N` suspended
(SIGSTOP) while it has a task, so that the round waits until its time is over.

Every 50 rounds the memory (RSS) of each process, the server's open files, threads and Python objects, and the files in the
run's folder and in the temporary folder are measured. Growth is the slope of a line through the samples after the first fifth.
Exits 1 if the run fails or something grew: memory of a process by more than 1 MB in 1,000 rounds, any number of files at all.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hostile import small_digits
from benchmarks.soak_figures import Sample, figures, growth, measure, table
from benchmarks.soak_grid import Faults, SoakGrid
from piecework.server_app.experiment import run_experiment
from piecework.server_app.records import RunDir
from piecework.training.settings import Settings

CLIENTS = 12
SHORT = {
    "strategy": "fedepth",
    "model": "convnet",
    "clients": CLIENTS,
    "clients-per-round": 4,
    "training.local-epochs": 1,
    "training.batch-size": 8,
    "architecture.batch-norm": "local",  # so that each client has a state on its disk
    "data.partition": "iid",
    "evaluation.every": 10,
    "faults.allow-untrained": True,
    "faults.max-empty-rounds": 10**6,
    "messages.round-timeout": 4.0,
    "engine": "local",
    "run-name": "soak",
}
SAMPLED = 50  # rounds between samples
MOST = {"MB": 1.0, "objects / 1,000": 1.0}  # of growth in 1,000 rounds, by the end of a figure's name
ANY = 0.5  # of other figures: numbers of files and threads, which go up and down


class Soak:
    """A run with faults, and what was measured of it."""

    def __init__(self, folder: Path, rounds: int, workers: int, seed: int, every: int = SAMPLED) -> None:
        values = SHORT | {
            "dataset": f"npz:{small_digits(folder)}",
            "num-rounds": rounds,
            "workers": workers,
            "seed": seed,
        }
        self.settings = Settings.from_run_config(values | {"output-dir": str(folder / "runs")})
        self.faults, self.every = Faults(seed, CLIENTS), every
        self.run_dir = RunDir(folder / "runs" / "soak")
        self.temporary = Path(tempfile.gettempdir())
        self.samples: list[Sample] = []
        self.seconds: list[float] = []
        self.kill_every = self.stop_every = 0

    def run(self) -> None:
        """Run all rounds. Raises what ended the run."""
        with SoakGrid(self.settings, self.faults) as grid:

            def on_round(record: dict[str, Any]) -> None:
                number = int(record["round"])
                self.seconds.append(record["seconds"])
                if number % self.every == 0:
                    self.samples.append(measure(number, grid.pids(), self.run_dir.path, self.temporary))
                    if number % (self.every * 10) == 0:
                        print(f"round {number}: {self.samples[-1]}", file=sys.stderr, flush=True)
                grid.begin(number + 1)
                for due, kind in ((self.kill_every, signal.SIGKILL), (self.stop_every, signal.SIGSTOP)):
                    if due and number % due == 0:
                        grid.signal_due = kind

            run_experiment(grid, self.settings, self.run_dir, on_round)


def hurt(rounds: int, soak: Soak) -> list[str]:
    """Return what is wrong with a run that has ended: rounds that are missing, and figures that grew."""
    found = []
    if (soak.run_dir.summary() or {}).get("status") != "completed" or len(soak.run_dir.rounds()) != rounds:
        found.append(f"the run ended after {len(soak.run_dir.rounds())} rounds")
    for name, (numbers, values) in figures(soak.samples).items():
        most = next((most for end, most in MOST.items() if name.endswith(end)), ANY)
        if (more := growth(numbers, values)) > most:
            found.append(f"{name} grows by {more:.2f} in 1,000 rounds: at most {most:g} is allowed")
    return found


def main() -> None:
    """Run the soak that the command line asks for, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-every", type=int, default=0)
    parser.add_argument("--stop-every", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(folder) / "tmp")
        Path(tempfile.tempdir).mkdir()
        soak = Soak(Path(folder), arguments.rounds, arguments.workers, arguments.seed)
        soak.kill_every, soak.stop_every = arguments.kill_every, arguments.stop_every
        started = time.monotonic()
        soak.run()
        print(f"{arguments.rounds} rounds in {time.monotonic() - started:.0f} s; faults: {dict(soak.faults.came)}")
        tenth = max(1, arguments.rounds // 10)
        first, last = median(soak.seconds[:tenth]), median(soak.seconds[-tenth:])
        print(f"seconds a round, median of the first and of the last tenth: {first:.3f}, {last:.3f}")
        print(table(soak.samples))
        wrong = hurt(arguments.rounds, soak)
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
