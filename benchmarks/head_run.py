"""What `benchmarks.head` runs. It imports Ray, which reads how it is protected when it is imported."""

import pickle
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import ray
from flwr.app import Message

from benchmarks.phases import ADD, CHECK, RECEIVE, SEND, SHARE, Watched, watching
from piecework.engines.cluster import nodes
from piecework.engines.cluster.shared_arrays import Apart
from piecework.engines.cluster.worker import Answered, Job, Worker
from piecework.engines.launch import launch
from piecework.server_app.records import RunDir
from piecework.training.settings import Settings

IMAGES = 4  # of each client
CLIENT = (SEND, SHARE, RECEIVE, CHECK, ADD)


class Echo(Worker):
    """A worker that trains once, and answers each further task with the same update."""

    update: Answered | None = None

    def answer(self, job: Job) -> Answered:
        """Answer a message."""
        message: Message = pickle.loads(job.message.rest)
        if message.metadata.message_type != "train":
            return super().answer(job)
        if self.update is None:
            self.update = super().answer(job)
        kept: Message = pickle.loads(self.update.message.rest)
        rest = pickle.dumps(Message(kept.content, reply_to=message), protocol=5)
        return self.update._replace(message=Apart(rest, self.update.message.places))


class Costs(NamedTuple):
    """The head's costs with a model: seconds for each client and for a round, and the bytes of a client's answer."""

    model: str
    strategy: str
    megabytes: float
    send: float
    share: float
    receive: float
    check: float
    add: float
    round: float
    bytes: float

    @property
    def clients(self) -> float:
        """Clients a second, if a round has many."""
        return 1 / (self.send + self.share + self.receive + self.check + self.add)


def rounds_of(model: str, strategy: str, asked: int, rounds: int, folder: Path) -> tuple[list[Watched], list[dict]]:
    """Return the rounds of a run after the first, and their records."""
    name, _, width = model.partition("x")
    settings = Settings.from_run_config(
        {
            "engine": "ray",
            "workers": 1,
            "strategy": strategy,
            "model": name,
            "architecture.width": float(width or 1),
            "architecture.batch-norm": "batch",
            "dataset": f"npz:{folder / 'random.npz'}",
            "data.partition": "iid",
            "data.validation-fraction": 0.0,
            "fleet": "unlimited",
            "clients": asked,
            "clients-per-round": asked,
            "num-rounds": rounds + 1,
            "training.batch-size": IMAGES,
            "training.local-epochs": 1,
            "evaluation.every": 0,
            "output-dir": str(folder),
            "run-name": f"{strategy}-{model}-{asked}",
        }
    )
    run_dir = RunDir(folder / settings.run_name)
    with watching() as watch, patch.object(nodes, "WORKER", ray.remote(Echo)):
        launch(settings, run_dir, lambda _: None)
    return watch.rounds[2:], run_dir.rounds()[1:]


def costs(model: str, strategy: str, asked: Sequence[int], rounds: int, folder: Path) -> Costs:
    """Measure a model."""
    few, many = (rounds_of(model, strategy, each, rounds, folder) for each in asked)
    more = asked[1] - asked[0]

    def median(found: tuple[list[Watched], list[dict]], phase: str) -> float:
        return statistics.median(each.seconds[phase] for each in found[0])

    own = {phase: (median(many, phase) - median(few, phase)) / more for phase in CLIENT}
    busy = statistics.median(each.busy for each in many[0])
    record = many[1][-1]
    answer = record["bytes_up"] / record["answered"]
    weights = record["clients"][0]["bytes_down"] / 1e6
    return Costs(model, strategy, weights, *own.values(), busy - asked[1] * sum(own.values()), answer)


def write_images(path: Path, clients: int) -> None:
    """Write random images for so many clients."""
    draw, count = np.random.default_rng(1), clients * IMAGES
    images = {f"x_{name}": draw.integers(0, 255, (count, 32, 32, 3), np.uint8) for name in ("train", "test")}
    labels = {f"y_{name}": np.arange(count) % 10 for name in ("train", "test")}
    np.savez(path, **images, **labels)
