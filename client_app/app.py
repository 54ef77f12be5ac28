"""The ClientApp: reads a task, trains or evaluates under the client's memory budget, answers."""

import platform
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from client_app.client import Client
from client_app.examples import Augmentation, Examples, share_examples
from client_app.memory_cap import MemoryCap, ResidentPeak, keep_heap_tight, return_free_memory
from client_app.randomness import generator
from client_app.setup import all_shares, blueprint_for, open_dataset, recipe_for
from client_app.store import Store
from client_app.task import Metrics, Outcome, Task, content_bytes, piece_key, reply
from client_app.trainers import find_trainer
from client_app.training import PieceModel
from device_profiles.fleet import device_state, load_fleet
from device_profiles.memory import MemoryBudgetExceededError
from device_profiles.profile import available_memory, measure_device
from federated_data.datasets import ArrayDataset, load
from federated_data.partition import split
from models.cascade import batch_norm_names, isolated_rng, unit_of
from server_app.settings import Settings

app = ClientApp()


@app.query("device")
def query_device(message: Message, context: Context) -> Message:
    """Who this node is: its client number, how its budget is set, and what software it has."""
    node = context.node_config
    settings, number = Settings.from_run_config(context.run_config), int(node["partition-id"])
    clients = settings.clients or int(node["num-partitions"])
    rows = open_share(settings, context, number, clients)[1] if number < clients else np.arange(0)
    train_rows = split(rows, settings.validation_share, settings.seed, number)[0] if len(rows) else rows
    metrics: Metrics = {"partition-id": number, "num-partitions": clients, "num-examples": len(train_rows)}
    if node.get("device") == "auto":
        folder = Path(str(node.get("state-dir", ".")))
        folder.mkdir(parents=True, exist_ok=True)
        measured = measure_device(folder)
        metrics |= {
            "memory-available": measured.memory_available_bytes,
            "flops-per-second": measured.flops_per_second,
            "disk-bandwidth": measured.disk_bandwidth,
        }
    device = str(node.get("device", ""))
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    return reply(message, Outcome("ok", reason=f"{device}|{versions}"), metrics)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One task. A budget that does not suffice is a normal answer, with the bytes needed and allowed."""
    started = time.perf_counter()
    client, task, measured = prepare_client(message, context)
    try:
        resident = ResidentPeak()
        update = find_trainer(task.strategy)(task, client)
        rss_peak = resident.peak_bytes()
        if client.settings.batch_norm == "local":
            _keep_batch_norm(client, update.units)
        client.commit()
        arrays = ArrayRecord({name: Array(array) for name, array in client.store.read(update.units)})
    except MemoryBudgetExceededError as error:
        return refusal(message, client, error)
    finally:
        client.store.clear_task()
    measured |= update.metrics | {
        "num-examples": len(client.share(0)),
        "budget": client.budget,
        "measured-peak": client.cap.peak_bytes,
        "rss-peak": rss_peak,
        "rss-growth": rss_peak - resident.start_bytes,
        "seconds": time.perf_counter() - started,
        "seen": update.seen,
    }
    if context.node_config.get("device") == "auto":
        measured["memory-available"] = available_memory()
    return reply(message, Outcome("ok", reason="|".join(map(piece_key, update.pieces))), measured, arrays)


def refusal(message: Message, client: Client, error: MemoryBudgetExceededError) -> Message:
    """The answer of a client whose budget does not suffice."""
    outcome = Outcome("memory", error.needed, error.allowed, str(error))
    return reply(message, outcome, {"budget": client.budget, "measured-peak": client.cap.peak_bytes})


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model that was sent on this client's validation share, streamed atom by atom."""
    client, _, _ = prepare_client(message, context)
    last = len(client.blueprint.atoms) - 1
    examples, piece = client.validation, None
    try:
        for atom in range(last + 1):
            del piece  # before the next one is built
            piece = PieceModel(client.blueprint, [atom], "head" if atom == last else None, client.load())
            piece.train(False)
            if atom < last:
                examples = client.stream(piece, examples, f"evaluate-{atom}", atom + 1)
        assert piece is not None
        metrics = client.evaluate(piece.logits, examples) | {"measured-peak": client.cap.peak_bytes}
    except MemoryBudgetExceededError as error:
        return refusal(message, client, error)
    finally:
        client.store.clear_task()
    return reply(message, Outcome("ok"), metrics)


def prepare_client(message: Message, context: Context) -> tuple[Client, Task, Metrics]:
    """Put the arrays that arrived on disk, release them, and set up what a trainer needs; what is known of the message."""
    settings = Settings.from_run_config(context.run_config)
    torch.set_num_threads(settings.torch_threads)
    task = Task.from_record(message.content.config_records["task"])
    number = int(context.node_config["partition-id"])
    clients = settings.clients or int(context.node_config["num-partitions"])
    message_bytes = content_bytes(message.content)
    state_dir = Path(str(context.node_config.get("state-dir", task.state_dir)))
    store = Store(state_dir, task.experiment_id, number, f"{message.metadata.message_type}-{task.round}")
    old_state = store.newest_state(task.state_round)
    _unpack(message, store)
    if settings.batch_norm == "local" and old_state is not None:
        store.overlay(old_state / "batch-norm")
    data, rows = open_share(settings, context, number, clients)
    train_rows, validation_rows = split(rows, settings.validation_share, settings.seed, number)

    def share(fill: int) -> Examples:
        rng = generator(settings.seed, task.round, number, "augment", fill)
        drawn = Augmentation.draw(len(train_rows), rng) if settings.augment else None
        return share_examples(data, train_rows, drawn)

    budget = min(task.budget, own_budget(settings, task, context, number, clients, message_bytes))
    allowed = settings.allowance(budget)
    keep_heap_tight(allowed)
    client = Client(
        number=number,
        round=task.round,
        budget=budget,
        allowed=allowed,
        settings=settings,
        blueprint=blueprint_for(settings, data),
        store=store,
        cap=MemoryCap(allowed, enforced=task.enforced),
        recipe=recipe_for(settings, task.lr),
        share=share,
        validation=share_examples(data, validation_rows),
        old_state=old_state,
    )
    return client, task, {"message-bytes": message_bytes}


def _unpack(message: Message, store: Store) -> None:
    """Arrays go to the store unit by unit, and their memory back to the system, before anything is trained."""
    arrays = message.content.array_records["arrays"]
    for unit in dict.fromkeys(map(unit_of, arrays)):
        store.write_units({name: arrays.pop(name).numpy() for name in list(arrays) if unit_of(name) == unit})
    return_free_memory()


def _keep_batch_norm(client: Client, units: list[str]) -> None:
    """FedBN: what batch norm learned stays with the client; the server's average of it serves central evaluation only."""
    folder = client.new_state() / "batch-norm"
    folder.mkdir(exist_ok=True)
    for unit in units:
        with isolated_rng(0):
            kept = batch_norm_names(unit, client.blueprint.build_unit(unit))
        client.store.write_units({name: array for name, array in client.store.read([unit]) if name in kept}, folder)


def own_budget(settings: Settings, task: Task, context: Context, number: int, clients: int, message_bytes: int) -> int:
    """Bytes this client may use by its own knowledge: measured on a device, else a function of (fleet, seed, round, client)."""
    device = str(context.node_config.get("device", ""))
    if device == "auto":
        return available_memory() - settings.reserve - 3 * message_bytes
    fleet = load_fleet(settings.fleet)
    state = device_state(fleet, number, clients, settings.seed, task.round, task.reference, device or None)
    return state.budget_bytes


def open_share(settings: Settings, context: Context, number: int, clients: int) -> tuple[ArrayDataset, np.ndarray]:
    """The data set, memory-mapped, and the rows of it that are this client's: all of them where the node has its own data."""
    own = context.node_config.get("data-dir")
    if own:
        data = load(Path(str(own)))
        return data, np.arange(len(data.labels))
    data = open_dataset(settings.dataset, settings.data_dir)
    return data, all_shares(settings, clients)[number]
