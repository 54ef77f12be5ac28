"""What several test files need: tiny runs on the in-process grid, clients without a server, fleets in one line."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from settings_helpers import key_of

from piecework.client_app.client import Client
from piecework.client_app.store import Store
from piecework.device_profiles.fleet import Fleet, device_of
from piecework.federated_data.datasets import default_cache, prepare
from piecework.models.cascade import Blueprint, Cascade, initial_state, isolate_rng
from piecework.models.zoo import build_blueprint
from piecework.server_app.experiment import run_experiment
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.training.examples import Examples, feature_examples, training_examples
from piecework.training.memory_cap import MemoryCap
from piecework.training.parcels import pack, unpack, view
from piecework.training.settings import Settings
from piecework.training.setup import blueprint_for, open_dataset, training_config_for
from piecework.training.sgd import TrainingConfig

TINY = {
    "clients": 20,  # about 70 images each
    "clients-per-round": 3,
    "num-rounds": 1,
    "training.local-epochs": 1,
    "data.partition": "iid",
    "fleet": "reference-step",
    "training.lr": 0.05,
    "training.lr-schedule": "constant",
    "workers": 1,
    "run-name": "run",
}
FEW = "few"  # as `dataset`: see few_digits
# Three clients with 56 images each, all of them in every round.
TRIO = {"clients": 3, "clients_per_round": 0, "dataset": FEW}
# What oneDNN takes inside of an operator depends on the CPU, and it has no LSTM in bfloat16 without AVX-512.
CPU = torch.backends.cpu.get_cpu_capability()
MODELLED_CPU = pytest.mark.skipif(
    not CPU.startswith("AVX512"), reason=f"the figures are of oneDNN on a CPU with AVX-512, and this one has {CPU}"
)
SPEEDS = {"flops": 1e9, "bandwidth": 1e6, "disk-bandwidth": 1e7}


def tiny_settings(**changes: Any) -> Settings:
    """The settings of a run of seconds: TINY, with underscores for hyphens. No more clients are asked than there are."""
    values: dict[str, Any] = TINY | {key_of(key): value for key, value in changes.items()}
    if "clients_per_round" not in changes and values["clients"]:
        values["clients-per-round"] = min(values["clients-per-round"], values["clients"])
    return Settings.from_run_config(values)


def run_local(tmp_path: Path, grid: type[LocalGrid] = LocalGrid, **changes: Any) -> RunDir:
    """Run an experiment on the digits in this process (or in `workers`); RunDir of what it left."""
    if changes.get("dataset") == FEW:
        changes = changes | {"dataset": f"npz:{few_digits()}"}
    settings = tiny_settings(**{"output_dir": str(tmp_path)} | changes)
    run_dir = RunDir(Path(settings.resume_from or tmp_path / settings.run_name))
    with grid(settings.clients, settings.to_run_config(), settings.workers) as nodes:
        run_experiment(nodes, settings, run_dir)
    return run_dir


def run_in_parts(folder: Path, stops: Sequence[int], **settings: Any) -> RunDir:
    """A run that is broken off and resumed after each of these rounds, and then goes on to its end."""
    run = run_local(folder, **settings | {"num_rounds": stops[0]})
    for stop in (*stops[1:], settings["num_rounds"]):
        run = run_local(folder, **settings | {"num_rounds": stop, "resume_from": str(run.path)})
    return run


def fleet_json(keeps: Mapping[str, float] | None = None, **devices: float | int) -> str:
    """A fleet of devices that clients get in turn: `fleet_json(rich=2.2, poor=0.5)`; an int is bytes, a float a ratio.

    `keeps` are the fractions of a model that devices are given.
    """
    table = [
        {"name": name, "memory" if isinstance(memory, int) else "memory-ratio": memory, **SPEEDS}
        | ({"keep": keeps[name]} if keeps else {})
        for name, memory in devices.items()
    ]
    return json.dumps({"name": "test", "assignment": "round-robin", "device": table})


def model_of(run_dir: RunDir) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint."""
    checkpoint = run_dir.load_checkpoint()
    assert checkpoint is not None
    return numpy_of(checkpoint.arrays)


def numpy_of(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """A record's arrays, decoded."""
    return {name: view(array).copy() for name, array in arrays.items()}


def first_arrays(settings: Settings, *, exits: bool = False) -> dict[str, np.ndarray]:
    """The initial model of a run with these settings."""
    blueprint = blueprint_for(settings, digits())
    return {name: value.numpy() for name, value in initial_state(blueprint, settings.seed, exits=exits)}


def digits() -> Any:
    """The embedded digits, converted."""
    prepare("digits", data_dir="", cache_dir=default_cache())
    return open_dataset("digits", "")


def few_digits() -> Path:
    """A file of 210 digits to train on and 100 to test with, beside the converted sets."""
    path = default_cache() / "few-digits.npz"
    if not path.exists():
        data = digits()
        train, test = slice(0, 210), slice(0, 100)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"few-digits-{os.getpid()}.npz")  # other workers read the file once it is there
        np.savez(
            unfinished,
            x_train=data.inputs[train],
            y_train=data.labels[train],
            x_test=data.test_inputs[test],
            y_test=data.test_labels[test],
        )
        unfinished.replace(path)
    return path


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], names: Iterable[str] | None = None) -> bool:
    """Whether two models are equal bit by bit (in `names`, or in all)."""
    chosen = list(one) if names is None else list(names)
    assert chosen
    assert names is not None or one.keys() == other.keys()
    return all(one[n].dtype == other[n].dtype and one[n].tobytes() == other[n].tobytes() for n in chosen)


def clients_of(run_dir: RunDir, server_round: int = 1) -> list[dict[str, Any]]:
    """The client reports of a round."""
    (record,) = [r for r in run_dir.rounds() if r["round"] == server_round]
    clients: list[dict[str, Any]] = record["clients"]
    return clients


def a_training_config(batch_size: int = 16, **changes: Any) -> TrainingConfig:
    """The demo's step."""
    return TrainingConfig(
        **{"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": batch_size, "epochs": 1} | changes
    )


def a_blueprint(name: str = "convnet", shape: tuple[int, int, int] = (1, 8, 8), batch_norm: str = "batch") -> Blueprint:
    """The demo's model, or another."""
    return build_blueprint(name, num_classes=10, input_shape=shape, batch_norm=batch_norm)


def random_examples(count: int, shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> Examples:
    """Features [count, *shape] for a piece that begins at a map or a vector, and labels."""
    rng = np.random.default_rng(seed)
    stored = (*shape[1:], shape[0]) if len(shape) == 3 else shape
    features = rng.standard_normal((count, *stored), dtype=np.float32)
    return feature_examples(features, rng.integers(0, classes, count))


def a_client(
    folder: Path, settings: Settings | None = None, allowed: int = 10**9, rows: int = 40, **overrides: Any
) -> Client:
    """Client 0 in round 1 with the first digits as its data, and the run's initial model in its store."""
    settings = settings or tiny_settings()
    data = digits()
    blueprint: Blueprint = overrides.pop("blueprint", None) or blueprint_for(settings, data)
    store = Store(folder, "experiment", 0, "train-1")
    store.write_units({name: v.numpy() for name, v in initial_state(blueprint, settings.seed, exits=True)})
    return Client(
        **{
            "number": 0,
            "round": 1,
            "budget": allowed,
            "allowed": allowed,
            "settings": settings,
            "data": data,
            "blueprint": blueprint,
            "full": blueprint,
            "store": store,
            "cap": MemoryCap(allowed, enforced=True),
            "training_config": training_config_for(settings, settings.training.lr),
            "local_data": lambda fill: training_examples(data, np.arange(rows)),
            "validation": training_examples(data, np.arange(rows, rows + 20)),
            "old_state": None,
        }
        | overrides
    )


class RecordingGrid(LocalGrid):
    """Keeps the messages that were sent and the replies, in order; `last` is the one made last."""

    last: ClassVar["RecordingGrid"]
    sent: list[Message]
    received: list[Message]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent, self.received = [], []
        RecordingGrid.last = self

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self.received += replies
        return replies


def training(messages: Iterable[Message]) -> list[Message]:
    """The train messages, or the answers to them."""
    return [m for m in messages if m.metadata.message_type == "train"]


def record_of(message: Message) -> ArrayRecord:
    return unpack(message.content.array_records["arrays"])


def arrays_of(message: Message) -> dict[str, np.ndarray]:
    return numpy_of(record_of(message))


@contextmanager
def changing(message: Message) -> Iterator[ArrayRecord]:
    """The arrays of a message, and at the end the message has them as they are then."""
    arrays = record_of(message)
    yield arrays
    message.content["arrays"] = pack(arrays.items())


def examples_of(message: Message) -> int:
    count = message.content.metric_records["metrics"]["num-examples"]
    assert isinstance(count, int)
    return count


def average(replies: list[Message], name: str) -> np.ndarray:
    """What the server has to come to, in float64 and by hand."""
    records = [(record_of(m), examples_of(m)) for m in replies]
    held = [(view(record[name]).astype(np.float64), count) for record, count in records if name in record]
    return (sum(a * n for a, n in held) / sum(n for _, n in held)).astype(np.float32)


def num_parameters(blueprint: Blueprint) -> int:
    """Trainable parameters of a model that is really built; torch's global generator stays as it was."""
    with isolate_rng(0):
        return sum(parameter.numel() for parameter in Cascade(blueprint).parameters())


def budgets(fleet: Fleet, clients: int, seed: int, reference_bytes: int) -> list[int]:
    """Bytes of every client's device before any degradation, in client order."""
    return [device_of(fleet, client, clients, seed).budget(reference_bytes) for client in range(clients)]
