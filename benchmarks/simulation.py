"""Measure seconds per round of the engines, against a plain torch loop that runs the same steps on the same cores.

    python benchmarks/simulation.py --data-dir FOLDER [--engines local,ray] [--epochs 1,5] [--rounds 5]
                                    [--dataset fashion-mnist] [--clients 100] [--processes 2]
    python benchmarks/simulation.py --data-dir FOLDER --server-memory [--strategy fedavg] [--engines local] [--asked 10,100]

The run is FedAvg with LeNet-5, Fashion-MNIST, 100 clients of 600 images, 10 per round, batch 64. The plain loop is the lower
bound: two processes of one thread, weights in shared memory, channels_last, torch's own fused SGD, no messages, no memory
accounting, no records. MB are those of all processes of an engine at the end of a round, where shared memory counts once; the
engines' own start and first round are in `first`, in seconds.

`--server-memory` instead measures how far the server's resident set grows with so many clients per round (`--asked`, a tenth of
them and all by default), the seconds per client, and the accounting of a server that distils (`--strategy feddf`: LeNet-5 and
cnn3, 2 % of the examples public). `--dataset`, `--clients` (a tenth of them per round) and `--processes` make it smaller.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
from torch.nn import functional as F

from piecework.engines.launch import launch
from piecework.federated_data.datasets import ArrayDataset, default_cache, load, prepare
from piecework.federated_data.partition import iid
from piecework.models.cascade import Cascade
from piecework.models.zoo import build_blueprint
from piecework.server_app.records import RunDir
from piecework.training.examples import batches, normalise
from piecework.training.loop import channels_last
from piecework.training.memory_cap import ResidentPeak
from piecework.training.settings import Settings

BATCH = 64
DISTILS: dict[str, str | float] = {"feddf.family": "cnn3", "data.public-fraction": 0.02}


class Load(NamedTuple):
    """What is trained: a data set and its folder, the clients that share it, how many of them per round, and the processes."""

    dataset: str
    data_dir: str
    clients: int
    asked: int
    processes: int


def lenet(data: ArrayDataset) -> torch.nn.Module:
    """Return the model, as the engines build it."""
    shape = data.input_shape
    blueprint = build_blueprint("lenet5", num_classes=data.num_classes, input_shape=shape, layout="lecun")
    return channels_last(Cascade(blueprint))


def plain_worker(
    rank: int, weights: dict, sums: dict, jobs: mp.Queue, done: mp.Queue, folder: str, work: Load, epochs: int
) -> None:
    """Train every client from the queue, add it, weighted, to this process's sum, and tell its examples."""
    torch.set_num_threads(1)
    data = load(Path(folder))
    rows = iid(np.asarray(data.labels), work.clients, 1)
    model = lenet(data).train()
    while (client := jobs.get()) is not None:
        model.load_state_dict(weights)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)
        images, labels = normalise(data.inputs[rows[client]], data), torch.tensor(data.labels[rows[client]])
        rng = np.random.default_rng(client)
        for _ in range(epochs):
            for positions in batches(len(labels), BATCH, rng, drop_single=True):
                optimiser.zero_grad(set_to_none=True)
                F.cross_entropy(model(images[positions]), labels[positions]).backward()
                optimiser.step()
        for name, value in model.state_dict().items():
            sums[name] += value * len(labels)
        done.put(len(labels))


def plain(folder: Path, work: Load, epochs: int, rounds: int) -> list[float]:
    """Return the seconds of each round of the plain loop."""
    model = lenet(load(folder))
    weights = {name: value.share_memory_() for name, value in model.state_dict().items()}
    sums = [{name: torch.zeros_like(v).share_memory_() for name, v in weights.items()} for _ in range(work.processes)]
    context = mp.get_context("spawn")
    jobs, done = context.Queue(), context.Queue()
    workers = [
        context.Process(target=plain_worker, args=(rank, weights, sums[rank], jobs, done, str(folder), work, epochs))
        for rank in range(work.processes)
    ]
    for worker in workers:
        worker.start()
    seconds = []
    for number in range(rounds + 1):  # the first is a warm-up
        started = time.perf_counter()
        for client in np.random.default_rng(number).choice(work.clients, work.asked, replace=False):
            jobs.put(int(client))
        seen = sum(done.get() for _ in range(work.asked))
        for name, value in weights.items():
            value.copy_(sum(part[name] for part in sums) / seen)
            for part in sums:
                part[name].zero_()
        seconds.append(time.perf_counter() - started)
    for _ in workers:
        jobs.put(None)
    for worker in workers:
        worker.join()
    return seconds[1:]


class Rounds(NamedTuple):
    """The records of an engine's rounds, without the first, a warm-up; seconds until that ended, and the most bytes in use."""

    records: list[dict]
    first: float
    bytes: int


def family_bytes() -> int:
    """Return the bytes that this process and its descendants hold; what several of them share counts once."""
    found = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            found += process.memory_full_info().pss
    return found


def settings_of(engine: str, work: Load, epochs: int, rounds: int, output: Path, strategy: str = "fedavg") -> Settings:
    """Return the settings of a run of an engine, with a round more, to warm up."""
    return Settings.from_run_config(
        {
            "engine": engine,
            "strategy": strategy,
            "model": "lenet5",
            "architecture.options": "layout=lecun",
            "dataset": work.dataset,
            "data-dir": work.data_dir,
            "data.partition": "iid",
            "data.validation-fraction": 0.0,
            "fleet": "unlimited",
            "clients": work.clients,
            "clients-per-round": work.asked,
            "num-rounds": rounds + 1,
            "training.local-epochs": epochs,
            "training.batch-size": BATCH,
            "training.lr": 0.05,
            "training.lr-schedule": "constant",
            "evaluation.every": 0,
            "workers": work.processes,
            "output-dir": str(output),
            "run-name": f"{engine}-{epochs}-{work.asked}",
        }
        | (DISTILS if strategy == "feddf" else {})
    )


def engine_rounds(engine: str, work: Load, epochs: int, rounds: int, output: Path, strategy: str = "fedavg") -> Rounds:
    """Run an engine."""
    settings = settings_of(engine, work, epochs, rounds, output, strategy)
    run_dir, started = RunDir(output / settings.run_name), time.perf_counter()
    ends, used = list[float](), list[int]()

    def note(record: dict) -> None:
        ends.append(time.perf_counter() - started)
        used.append(family_bytes())

    launch(settings, run_dir, note)
    return Rounds(run_dir.rounds()[1:], ends[0], max(used))


def server_memory(engine: str, work: Load, output: str, strategy: str) -> dict[str, float]:
    """Return bytes for runs of three rounds.

    They are the resident set after a first run, how far the server grows over a second one, and the peak of its own accounting
    if it distils. The seconds per client are the median of the second run's.
    """
    engine_rounds(engine, work, 1, 2, Path(output) / "first", strategy)
    resident = ResidentPeak()
    rounds = engine_rounds(engine, work, 1, 2, Path(output) / "second", strategy).records
    found: dict[str, float] = {"start": resident.start_bytes, "growth": resident.peak_bytes() - resident.start_bytes}
    found["seconds_a_client"] = round(statistics.median(each["train_seconds"] for each in rounds) / work.asked, 4)
    if strategy == "feddf":
        found["server_peak"] = max(record["server_peak"] for record in rounds)
    return found


def main() -> None:
    """Measure, and print JSON objects, one a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=lambda text: str(Path(text).resolve()), default="", help="of --dataset")
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--engines", default="", help="local,ray, or local with --server-memory")
    parser.add_argument("--asked", default="", help="clients per round, with --server-memory")
    parser.add_argument("--epochs", default="1,5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--server-memory", action="store_true")
    parser.add_argument("--strategy", choices=("fedavg", "feddf"), default="fedavg", help="of --server-memory")
    options = parser.parse_args()
    whole = Load(options.dataset, options.data_dir, options.clients, max(1, options.clients // 10), options.processes)
    folder = prepare(whole.dataset, data_dir=whole.data_dir, cache_dir=default_cache())
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary)
        if options.server_memory:
            counts = [int(each) for each in options.asked.split(",") if each] or [whole.asked, whole.clients]
            for engine, asked in product((options.engines or "local").split(","), counts):
                # in a process each: memory kept by a heap would count for the next
                with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
                    runs = engine, whole._replace(asked=asked), str(output / f"{engine}-{asked}"), options.strategy
                    found = pool.submit(server_memory, *runs).result()
                    print(json.dumps({"engine": engine, "clients": asked} | found), flush=True)
            return
        for epochs in map(int, options.epochs.split(",")):
            floor = statistics.median(plain(folder, whole, epochs, options.rounds))
            row = {"epochs": epochs, "plain": round(floor, 3)}
            for engine in (options.engines or "local,ray").split(","):
                rounds = engine_rounds(engine, whole, epochs, options.rounds, output)
                median = statistics.median(record["train_seconds"] for record in rounds.records)
                row |= {engine: round(median, 3), f"{engine} speed": round(floor / median, 3)}
                row |= {f"{engine} first": round(rounds.first, 1), f"{engine} MB": round(rounds.bytes / 1e6)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
