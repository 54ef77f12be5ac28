"""Measure seconds per round of the engines, against a plain torch loop that runs the same steps on the same cores.

    python benchmarks/simulation.py --data-dir FOLDER [--engines local,ray] [--epochs 1,5] [--rounds 5]
    python benchmarks/simulation.py --data-dir FOLDER --server-memory [--strategy fedavg]

The run is FedAvg with LeNet-5, Fashion-MNIST, 100 clients of 600 images, 10 per round, batch 64. The plain loop is the lower
bound: two processes of one thread, weights in shared memory, channels_last, torch's own fused SGD, no messages, no memory
accounting, no records. `--server-memory` instead measures how far the server's resident set grows with 10 and with 100 clients
per round, and the accounting of a server that distils (`--strategy feddf`: LeNet-5 and cnn3, 2 % of the examples public).
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from torch.nn import functional as F

from piecework.federated_data.datasets import ArrayDataset, default_cache, load, prepare
from piecework.federated_data.partition import iid
from piecework.launch import launch
from piecework.models.cascade import Cascade
from piecework.models.zoo import build_blueprint
from piecework.server_app.records import RunDir
from piecework.training.examples import batches, normalised
from piecework.training.loop import channels_last
from piecework.training.memory_cap import ResidentPeak
from piecework.training.settings import Settings

CLIENTS, ASKED, BATCH, PROCESSES = 100, 10, 64, 2


def lenet(data: ArrayDataset) -> torch.nn.Module:
    """Return the model, as the engines build it."""
    shape = data.input_shape
    blueprint = build_blueprint("lenet5", num_classes=data.num_classes, input_shape=shape, layout="lecun")
    return channels_last(Cascade(blueprint))


def plain_worker(
    rank: int, weights: dict, sums: dict, jobs: mp.Queue, done: mp.Queue, folder: str, epochs: int
) -> None:
    """Train every client from the queue and add it, weighted, to this process's sum."""
    torch.set_num_threads(1)
    data = load(Path(folder))
    rows = iid(np.asarray(data.labels), CLIENTS, 1)
    model = lenet(data).train()
    while (client := jobs.get()) is not None:
        model.load_state_dict(weights)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)
        images, labels = normalised(data.inputs[rows[client]], data), torch.tensor(data.labels[rows[client]])
        rng = np.random.default_rng(client)
        for _ in range(epochs):
            for positions in batches(len(labels), BATCH, rng, drop_single=True):
                optimiser.zero_grad(set_to_none=True)
                F.cross_entropy(model(images[positions]), labels[positions]).backward()
                optimiser.step()
        for name, value in model.state_dict().items():
            sums[name] += value * len(labels)
        done.put(rank)


def plain(folder: Path, epochs: int, rounds: int) -> list[float]:
    """Return the seconds of each round of the plain loop."""
    model = lenet(load(folder))
    weights = {name: value.share_memory_() for name, value in model.state_dict().items()}
    sums = [{name: torch.zeros_like(v).share_memory_() for name, v in weights.items()} for _ in range(PROCESSES)]
    context = mp.get_context("spawn")
    jobs, done = context.Queue(), context.Queue()
    workers = [
        context.Process(target=plain_worker, args=(rank, weights, sums[rank], jobs, done, str(folder), epochs))
        for rank in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    seconds = []
    for number in range(rounds + 1):  # the first is a warm-up
        started = time.perf_counter()
        for client in np.random.default_rng(number).choice(CLIENTS, ASKED, replace=False):
            jobs.put(int(client))
        for _ in range(ASKED):
            done.get()
        for name, value in weights.items():
            value.copy_(sum(part[name] for part in sums) / (600 * ASKED))
            for part in sums:
                part[name].zero_()
        seconds.append(time.perf_counter() - started)
    for _ in workers:
        jobs.put(None)
    for worker in workers:
        worker.join()
    return seconds[1:]


def engine_rounds(
    engine: str, data_dir: str, epochs: int, rounds: int, output: Path, asked: int = ASKED, strategy: str = "fedavg"
) -> list[dict]:
    """Return the records of an engine's rounds, without the first, a warm-up."""
    distils = {"feddf.family": "cnn3", "data.public-fraction": 0.02} if strategy == "feddf" else {}
    settings = Settings.from_run_config(
        {
            "engine": engine,
            "strategy": strategy,
            "model": "lenet5",
            "architecture.options": "layout=lecun",
            "dataset": "fashion-mnist",
            "data-dir": data_dir,
            "partition": "iid",
            "data.validation-fraction": 0.0,
            "fleet": "unlimited",
            "clients": CLIENTS,
            "clients-per-round": asked,
            "num-rounds": rounds + 1,
            "training.local-epochs": epochs,
            "training.batch-size": BATCH,
            "lr": 0.05,
            "training.lr-schedule": "constant",
            "evaluation.every": 0,
            "workers": PROCESSES,
            "output-dir": str(output),
            "run-name": f"{engine}-{epochs}-{asked}",
        }
        | distils
    )
    run_dir = RunDir(output / settings.run_name)
    launch(settings, run_dir, lambda record: None)
    return run_dir.rounds()[1:]


def server_memory(data_dir: str, output: str, strategy: str, asked: int) -> dict[str, int]:
    """Return bytes for runs of three rounds of `asked` clients (local engine).

    They are the resident set after a first run, how far the server grows over a second one, and the peak of its own accounting
    if it distils.
    """
    engine_rounds("local", data_dir, 1, 2, Path(output) / "first", asked, strategy)
    resident = ResidentPeak()
    rounds = engine_rounds("local", data_dir, 1, 2, Path(output) / "second", asked, strategy)
    found = {"start": resident.start_bytes, "growth": resident.peak_bytes() - resident.start_bytes}
    if strategy == "feddf":
        found["server_peak"] = max(record["server_peak"] for record in rounds)
    return found


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--engines", default="local,ray")
    parser.add_argument("--epochs", default="1,5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-memory", action="store_true")
    parser.add_argument("--strategy", choices=("fedavg", "feddf"), default="fedavg", help="of --server-memory")
    options = parser.parse_args()
    folder = prepare("fashion-mnist", data_dir=options.data_dir, cache_dir=default_cache())
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary)
        if options.server_memory:
            for asked in (10, 100):  # each in its own process, because memory kept by a heap would count for the next
                with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
                    folder = str(output / str(asked))
                    found = pool.submit(server_memory, options.data_dir, folder, options.strategy, asked).result()
                print(json.dumps({"clients": asked} | found), flush=True)
            return
        results = []
        for epochs in map(int, options.epochs.split(",")):
            floor = statistics.median(plain(folder, epochs, options.rounds))
            row = {"epochs": epochs, "plain": round(floor, 3)}
            for engine in options.engines.split(","):
                rounds = engine_rounds(engine, options.data_dir, epochs, options.rounds, output)
                median = statistics.median(record["train_seconds"] for record in rounds)
                row |= {engine: round(median, 3), f"{engine} speed": round(floor / median, 3)}
            results.append(row)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
