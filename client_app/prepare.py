"""Turn a message into the `Client` that a trainer works with: store its arrays, find the budget, open the local data."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, RecordDict

from piecework.client_app import frozen, local_norms
from piecework.client_app.client import FIXED_FILL, Client
from piecework.client_app.store import Store
from piecework.client_app.trainers import find_places
from piecework.device_profiles.fleet import device_state, load_fleet
from piecework.device_profiles.profile import allowance, available_memory, measured_budget
from piecework.federated_data.datasets import ArrayDataset
from piecework.federated_data.partition import split
from piecework.models.cascade import is_bare, unit_of
from piecework.models.variant import vary
from piecework.training import parcels
from piecework.training.accelerator import find_device, free_memory
from piecework.training.examples import Augmentation, Examples, examples_of_test, training_examples
from piecework.training.memory_cap import MemoryCap, keep_heap_tight, return_free_memory
from piecework.training.messages import Task, read_expected
from piecework.training.randomness import generator
from piecework.training.readable import MessageError, arrays_of
from piecework.training.settings import Settings
from piecework.training.setup import (
    all_client_rows,
    all_client_test_rows,
    blueprint_for,
    dataset_of,
    image_attack,
    open_own,
    training_config_for,
)

NUMBERS = "fiub"  # kinds of numpy types


def open_store(context: Context, state_dir: str, experiment_id: str, task: str) -> Store:
    """Open this client's store in the server's `state_dir`, unless the node has one.

    A board has a `state-dir`. A machine that emulates clients, and does not see the run's folder, has a `scratch-dir`.
    """
    node = context.node_config
    folder = Path(str(node.get("state-dir") or node.get("scratch-dir") or state_dir))
    return Store(folder, experiment_id, int(context.node_config["partition-id"]), task)


def free_disk(settings: Settings, context: Context, store: Store) -> None:
    """Remove old experiments from a node's own disk. Stores in a run's folder are removed by `piecework clean`."""
    if {"state-dir", "scratch-dir"} & context.node_config.keys():
        store.remove_other_experiments(settings.memory.keep_experiments)


def prepare_client(content: RecordDict, message_bytes: int, task: Task, context: Context, store: Store) -> Client:
    """Move the message's arrays to disk, and return the client that a trainer needs.

    Raises MissingUnitsError for frozen units to be sent again, NoAcceleratorError if the settings ask for a missing GPU.
    """
    settings = Settings.from_run_config(context.run_config)
    torch.set_num_threads(settings.training.torch_threads)
    device = find_device(settings.training.accelerator)
    number = int(context.node_config["partition-id"])
    clients = settings.clients or int(context.node_config["num-partitions"])
    free_disk(settings, context, store)
    old_state = store.newest_state(task.state_round, task.discarded_rounds)
    unpack(content, store.write_units)
    frozen.forget_others(store.frozen, set(task.frozen.values()))
    frozen.link_units(store.frozen, task.frozen, store.model)
    data, rows = open_local_data(settings, context, number, clients, content)
    train_rows, validation_rows = split(rows, settings.data.validation_fraction, settings.seed, number)
    if task.personal:
        validation = examples_of_test(data, own_test_rows(data, settings, context, number, clients))
    else:
        validation = training_examples(data, validation_rows)
    available = memory_for_training(device) if context.node_config.get("device") == "auto" else None
    budget = min(task.budget, own_budget(settings, task, context, number, clients, message_bytes, available))
    allowed = allowance(budget, settings.memory.excess)
    keep_heap_tight(budget, available_memory())
    full = blueprint_for(settings, data)
    blueprint = vary(full, task.variant)
    store.is_bare = partial(is_bare, blueprint)
    if settings.norms == "local" and old_state is not None:
        local_norms.overlay_norms(store, old_state, find_places(task.strategy)(task, settings.seed, full, blueprint))
    attack = image_attack(settings, data, settings.attack.steps) if task.adversarial else None
    return Client(
        number=number,
        round=task.round,
        budget=budget,
        allowed=allowed,
        settings=settings,
        data=data,
        blueprint=blueprint,
        full=full,
        store=store,
        cap=MemoryCap(allowed, enforced=task.enforced, device=device),
        training_config=replace(training_config_for(settings, task.lr), attack=attack),
        local_data=partial(training_data, settings, data, train_rows, task.round, number, device),
        validation=validation.on(device),
        old_state=old_state,
        kept_round=task.kept_round,
        device=device,
        available=available,
    )


def training_data(
    settings: Settings,
    data: ArrayDataset,
    rows: np.ndarray,
    server_round: int,
    number: int,
    device: torch.device,
    fill: int,
) -> Examples:
    """Return a client's training examples, augmented differently for each `fill` if the settings ask for augmentation."""
    when, purpose = (server_round, fill) if fill != FIXED_FILL else (0, "stages")
    rng = generator(settings.seed, when, number, "augment", purpose)
    drawn = Augmentation.draw(len(rows), rng) if settings.data.augment else None
    return training_examples(data, rows, drawn).on(device)


def unpack(content: RecordDict, write: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Pass a message's arrays to `write` unit by unit, and return their memory to the system.

    The arrays are removed from the message, because Flower keeps it until the reply is sent. What is written are views of the
    parcels; each parcel is freed when all of it is written. Raises MessageError or ParcelError.
    """
    record = arrays_of(content)
    arrays = parcels.unpack(record)
    record.clear()
    for unit in dict.fromkeys(map(unit_of, arrays)):
        write({name: readable(name, arrays.pop(name)) for name in list(arrays) if unit_of(name) == unit})
    return_free_memory()


def readable(name: str, array: Array) -> np.ndarray:
    """Return an array of a message, not copied. Raises MessageError if it is none, or one of anything but numbers."""
    try:
        found = parcels.view(array)
    except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
        raise MessageError(f"array {name!r:.100} of the message cannot be read: {error}") from None
    if found.dtype.kind not in NUMBERS:
        raise MessageError(f"array {name!r:.100} of the message holds {found.dtype}, and no numbers")
    return found


def pack(store: Store, units: list[str], wanted: Callable[[str], bool] = lambda name: True) -> ArrayRecord:
    """Return the arrays of units whose names are `wanted`, in parcels, for a reply.

    Freed memory of training and of each unit's copies is returned to the system. Without that, 170 MB of unused memory were
    seen to stay beside the reply for a model of 100 MB.
    """
    packed = parcels.pack(_read(store, units, wanted))
    return_free_memory()
    return packed


def _read(store: Store, units: list[str], wanted: Callable[[str], bool]) -> Iterator[tuple[str, np.ndarray]]:
    for unit in units:
        return_free_memory()
        for name, array in store.read([unit]):
            if wanted(name):
                yield name, array
            del array  # frees it before the next one is read


fleet_of_run = lru_cache(maxsize=1)(load_fleet)  # the same text for all clients that a process emulates


def own_budget(
    settings: Settings,
    task: Task,
    context: Context,
    number: int,
    clients: int,
    message_bytes: int,
    available: int | None,
) -> int:
    """Return this client's own budget in bytes: of the memory it measured, or given by fleet, seed, round and client."""
    if available is not None:
        return measured_budget(available, settings.memory.reserve, message_bytes)
    name = str(context.node_config.get("device", ""))
    fleet = fleet_of_run(settings.fleet)
    state = device_state(fleet, number, clients, settings.seed, task.round, task.reference, name or None)
    return state.budget_bytes


def memory_for_training(device: torch.device) -> int:
    """Return the bytes that are free for training now: of the GPU if it trains, else of the system."""
    return available_memory() if device.type == "cpu" else free_memory(device)


def open_local_data(
    settings: Settings, context: Context, number: int, clients: int, content: RecordDict
) -> tuple[ArrayDataset, np.ndarray]:
    """Return the memory-mapped data set and this client's rows of it, which are all rows if the node has its own data.

    The message's content says what the run expects of a node's own data. Raises DatasetError.
    """
    own = context.node_config.get("data-dir")
    if own:
        data = open_own(Path(str(own)), settings, number, clients, read_expected(content))
        return data, np.arange(len(data.labels))
    data = dataset_of(settings)
    return data, all_client_rows(settings, clients)[number]


def own_test_rows(data: ArrayDataset, settings: Settings, context: Context, number: int, clients: int) -> np.ndarray:
    """Return this client's rows of the test split, which are all rows if the node has its own data."""
    if context.node_config.get("data-dir"):
        return np.arange(len(data.test_labels))
    return all_client_test_rows(settings, clients)[number]
