"""The ClientApp: it reads a task, trains or evaluates under the client's memory budget, and replies."""

import platform
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from piecework.client_app import frozen, local_norms
from piecework.client_app.client import FIXED_FILL, Client
from piecework.client_app.disk import what_to_free
from piecework.client_app.prepare import (
    memory_for_training,
    open_local_data,
    open_store,
    own_test_rows,
    pack,
    prepare_client,
    unpack,
)
from piecework.client_app.served import measure_served, served_item
from piecework.client_app.store import Store
from piecework.client_app.trainers import find_evaluator, find_places, find_query, find_trainer
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import measure_device
from piecework.federated_data.datasets import DatasetError
from piecework.federated_data.partition import split
from piecework.models.imported.source import is_own
from piecework.models.static_norms import is_statistic
from piecework.models.zoo import require_model
from piecework.training.accelerator import NoAcceleratorError, find_device, without_denormals
from piecework.training.answers import TOLD_IN_PRIVATE, Metrics, NodeInfo, Outcome, reply
from piecework.training.memory_cap import ResidentPeak, is_out_of_memory
from piecework.training.messages import Question, Task, content_bytes
from piecework.training.methods import find_entry
from piecework.training.parcels import ParcelError
from piecework.training.readable import MessageError, config_of
from piecework.training.settings import Settings, SettingsError

app = ClientApp()

Answer = tuple[Outcome, Metrics, ArrayRecord | None]


class TaskError(RuntimeError):
    """A task that is well-formed and still cannot be carried out, such as one whose arrays are not those of its model."""


@app.query("device")
def query_device(message: Message, context: Context) -> Message:
    """Report this node's client number, numbers of examples, device and software, and with `device = auto` its own figures."""
    node = context.node_config
    require_strategy_of_run(str(context.run_config.get("strategy", "")), context)
    settings, number = Settings.from_run_config(context.run_config), int(node["partition-id"])
    find_entry(settings.strategy)  # a node that lacks the package of a plugin says so at once
    require_model(settings.model)
    clients = settings.clients or int(node["num-partitions"])
    rows, test_rows, own = np.arange(0), np.arange(0), False
    if number < clients:
        data, rows = open_local_data(settings, context, number, clients, message.content)
        own = bool(context.node_config.get("data-dir")) and data.export is None
        test_rows = own_test_rows(data, settings, context, number, clients)
    train, held = split(rows, settings.data.validation_fraction, settings.seed, number) if len(rows) else (rows, rows)
    metrics: Metrics = {"partition-id": number, "num-partitions": clients}
    metrics |= {"num-examples": len(train), "num-validation": len(held), "num-test": len(test_rows)}
    if own:
        metrics["own-data"] = 1
    if node.get("device") == "auto":
        folder = Path(str(node.get("state-dir", ".")))
        folder.mkdir(parents=True, exist_ok=True)
        available = memory_for_training(
            find_device(settings.training.accelerator)
        )  # before the probes, which use memory themselves
        torch.set_num_threads(settings.training.torch_threads)  # else its speed is that of all cores, which no task has
        measured = measure_device(folder)
        metrics |= {
            "memory-available": available,
            "flops-per-second": measured.flops_per_second,
            "disk-bandwidth": measured.disk_bandwidth,
        }
    software = f"python {platform.python_version()}, torch {torch.__version__}"
    found = reply(message, Outcome("ok"), metrics)
    found.content["node"] = NodeInfo(str(node.get("device", "")), software).to_record()
    return found


@app.query("units")
def query_units(message: Message, context: Context) -> Message:
    """Store the frozen units in the message, and report which of the wanted ones are missing."""
    question = Question.from_record(config_of(message.content, "question"))
    with closing(open_store(context, question.state_dir, question.experiment_id, "units")) as store:
        unpack(message.content, partial(frozen.keep, store.frozen, store.task))
        missing = list(frozen.not_held(store.frozen, question.wanted))
        return reply(message, Outcome("ok", note="; ".join(store.notes), missing=missing), {})


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run a training task. If the budget is too small, the reply has the bytes needed and allowed."""
    started = time.perf_counter()

    def work(client: Client, task: Task) -> Answer:
        resident = ResidentPeak()
        update = find_trainer(task.strategy)(task, client)
        rss_peak = resident.peak_bytes()
        if client.settings.norms == "local":
            places = find_places(task.strategy)(task, client.settings.seed, client.full, client.blueprint)
            local_norms.keep(client, update.units, places)
        client.commit()
        arrays = pack(client.store, update.units)
        measured: Metrics = update.metrics | {
            "num-examples": len(client.local_data(0)),
            "rss-peak": rss_peak,
            "rss-growth": rss_peak - resident.start_bytes,
            "seconds": time.perf_counter() - started,
            "seen": update.seen,
        }
        if client.settings.privacy.on:
            measured = {name: value for name, value in measured.items() if name in TOLD_IN_PRIVATE}
        return Outcome("ok", done=tuple(update.done)), measured, arrays

    return answer(message, context, work)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model in the message on this client's validation data."""

    def work(client: Client, task: Task) -> Answer:
        return Outcome("ok"), find_evaluator(task.strategy)(task, client), None

    return answer(message, context, work)


@app.query("statistics")
def statistics(message: Message, context: Context) -> Message:
    """Measure the batch-norm statistics of the served model on this client's training data."""

    def work(client: Client, task: Task) -> Answer:
        units = measure_served(task, client)
        arrays = pack(client.store, units, is_statistic)
        counted: Metrics = {
            "num-examples": len(client.local_data(FIXED_FILL)),
            "predicted-peak": task.needed_bytes(served_item(task)) or 0,
        }
        return Outcome("ok"), counted, arrays

    return answer(message, context, work)


@app.query("query")
def query(message: Message, context: Context) -> Message:
    """Measure the metrics that the strategy queries from all clients between rounds."""

    def work(client: Client, task: Task) -> Answer:
        return Outcome("ok"), find_query(task.strategy)(task, client), None

    return answer(message, context, work)


def too_little(error: Exception, store: Store, client: Client | None, task: Task) -> Outcome:
    """Return the outcome of a task that met a full disk or too little memory. Raises TaskError for any other error."""
    if to_free := what_to_free(store.root, error):
        return Outcome("failed", reason=f"the client's store {store.root} cannot be written: {error}; {to_free}")
    if isinstance(error, (MessageError, ParcelError, SettingsError)):
        raise error
    if not is_out_of_memory(error):
        what = f"task {task.strategy!r} of round {task.round} cannot be carried out"
        raise TaskError(f"{what}: {type(error).__name__}: {error}") from error
    allowed = client.allowed if client is not None else 0
    return Outcome("memory", 0, allowed, f"the device ran out of memory: {type(error).__name__}: {error}")


def require_strategy_of_run(strategy: str, context: Context) -> None:
    """Raise ValueError for a strategy or a model outside the repository that this client does not train.

    It must be the run's, and the client one that this process emulates: no message and no run has a board import a module.
    """
    of_run, model = (str(context.run_config.get(key, "")) for key in ("strategy", "model"))
    if is_own(model) and "state-dir" in context.node_config:
        raise ValueError(f"the run's model {model!r} is code outside this project, which a board does not import")
    if ":" in strategy and (strategy != of_run or "state-dir" in context.node_config):
        raise ValueError(
            f"the task is of strategy {strategy!r}, which is neither of this project nor of a run emulated here"
        )


def answer(message: Message, context: Context, work: Callable[[Client, Task], Answer]) -> Message:
    """Run a task and return the reply. Too little memory, missing frozen units and a missing GPU are normal replies too."""
    record = config_of(message.content, "task")
    strategy = str(record.get("strategy", ""))
    require_strategy_of_run(strategy, context)
    find_trainer(strategy)  # imports it: the task may hold values of the method's own
    task = Task.from_record(record)
    message_bytes = content_bytes(message.content)
    metrics: Metrics = {"message-bytes": message_bytes}
    client, arrays = None, None
    name = f"{message.metadata.message_type}-{task.round}"
    with closing(open_store(context, task.state_dir, task.experiment_id, name)) as store:
        try:
            client = prepare_client(message.content, message_bytes, task, context, store)
            with client.cap.task(), without_denormals():
                outcome, measured, arrays = work(client, task)
            metrics |= measured
        except MemoryBudgetExceededError as error:
            outcome = Outcome("memory", error.needed, error.allowed, str(error))
        except frozen.MissingUnitsError as error:
            outcome = Outcome("failed", reason=str(error), missing=sorted(error.missing.values()))
        except (NoAcceleratorError, DatasetError) as error:
            outcome = Outcome("failed", reason=str(error))
        except Exception as error:
            outcome = too_little(error, store, client, task)
        if client is not None:
            metrics |= {"budget": client.budget, "measured-peak": client.cap.peak_bytes}
            metrics |= {"gpu-peak": client.cap.gpu_peak_bytes}
            if client.available is not None:
                metrics["memory-available"] = client.available
        return reply(message, replace(outcome, note="; ".join(store.notes)), metrics, arrays)
