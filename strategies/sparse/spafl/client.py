"""SpaFL ("Communication-Efficient Federated Learning with Sparse Models and Low Computational Overhead", NeurIPS 2024), the
client's side, and `local`, which trains in this way without communication.

w_k and tau are the client's weights and thresholds, and Delta tau is the change of the server's thresholds. Algorithm 1: the
client takes the server's thresholds, moves its weights by Delta tau (Eq. 13), and trains both for E epochs (Eq. 3 to 6).
Weights and batch norms stay in its store, with momentum if `spafl.client-momentum` is set, and only thresholds are sent. A
client that has no model yet, or lost it, builds the initial one from the seed.

Ours: the server also sends Delta tau, because a client that missed the last round cannot know it. Weight decay
(`training.weight-decay`) pulls weights towards 0 and does not apply to thresholds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from piecework.client_app.client import Client, Update, fill_from
from piecework.client_app.momentum import CarriedMomentum
from piecework.client_app.whole import whole_network
from piecework.models.cascade import Blueprint, Shape, initial_state, unit_of
from piecework.models.compact import Layout, layout
from piecework.models.masked import update_from_importance
from piecework.models.variant import Variant, vary
from piecework.strategies.sparse.spafl.forms import SparseModel, SparseTrainer, model_class, sparse_loss
from piecework.strategies.sparse.spafl.settings import SpaFLSettings
from piecework.training.answers import Metrics
from piecework.training.loop import PieceModel, load_for_device
from piecework.training.messages import Task, TaskConfig
from piecework.training.settings import Settings
from piecework.training.setup import blueprint_of_shape

THRESHOLDS, CHANGE = "thresholds", "change"  # float32 [thresholds]: tau(t), and tau(t) - tau(t - 1)
WORD = 32  # bits of a mask in an integer of a message


@dataclass(frozen=True)
class SpaFLTaskConfig(TaskConfig):
    """The server's instructions: alpha of the round, the initial model's digest, whether the client shares its thresholds."""

    alpha: float
    initial: str
    shared: bool = True


def initial_model(
    blueprint: Blueprint, seed: int, keep: Callable[[dict[str, np.ndarray]], None] = lambda arrays: None
) -> str:
    """Build the initial model, pass each unit's arrays to `keep`, and return the model's digest, 16 hex digits."""
    found, arrays = sha256(), groupby(initial_state(blueprint, seed), key=lambda pair: unit_of(pair[0]))
    for _, unit in arrays:
        held = {name: value.numpy() for name, value in unit}
        for name, array in held.items():
            found.update(name.encode())
            found.update(np.ascontiguousarray(array).data)
        keep(held)
    return found.hexdigest()[:16]


def train(task: Task, client: Client) -> Update:
    """Train weights and thresholds.

    Raises MemoryBudgetExceededError if the model does not fit, RuntimeError if the initial model differs from the server's.
    """
    task_config, settings = SpaFLTaskConfig.of(task), client.settings
    layout, item = own_layout(client, task.variant), whole_network(task, client, "training the whole model")
    source = own_model(client, task_config)
    carried = CarriedMomentum(client) if settings.of(SpaFLSettings).client_momentum else None
    folder = client.new_state(empty=True)

    def begin() -> list[PieceModel]:
        model = load(client, source)
        if task_config.shared:
            apply_thresholds(model, client)
        model.after_step()
        return [model]

    trainer = SparseTrainer(client, client.config_of(item), begin, sparse_loss(task_config.alpha), carried, layout)
    for epoch in trainer.epochs():
        trainer.epoch(client.local_data(epoch), client.rng("batches", 0, epoch), client.cap, "train the masked model")
    (model,) = trainer.finish()
    assert isinstance(model, SparseModel)
    for unit, module in model.units().items():
        client.store.save(unit, module, folder)
    metrics = client.evaluate(model.logits, client.validation, item.micro_batch)
    metrics |= {
        "train-loss": trainer.total_loss / trainer.seen,
        "predicted-peak": task.costs.get(item, 0),
        "mask": to_words(model.mask()),
        "macs": trainer.macs,
        "fresh": int(source == client.store.model),
    }
    if not task_config.shared:
        return Update([], metrics, [item], [trainer.seen])
    client.store.write_units({THRESHOLDS: model.thresholds()})
    return Update([THRESHOLDS], metrics, [item], [trainer.seen])


def evaluate(task: Task, client: Client) -> Metrics:
    """Return loss, accuracy and density (the mean over layers) of the client's own model as it last trained it.

    Raises MemoryBudgetExceededError if the model does not fit, RuntimeError if the initial model differs from the server's.
    """
    task_config = SpaFLTaskConfig.of(task)
    layout = own_layout(client, task.variant)
    item = whole_network(task, client, "evaluating the whole model")
    source = own_model(client, task_config)
    with client.cap.first("load the model"):
        model = load(client, source)
        density = float(np.mean([layer.mask().float().mean() for layer in model.layers()]))
        if layout is not None:
            model = model.compact(layout)[0]
    model.train(False)
    metrics = client.evaluate(model.logits, client.validation, item.micro_batch)
    if metrics:
        metrics |= {"density": density, "fresh": int(source == client.store.model)}
    return metrics | {"predicted-peak": task.costs[item]}


def own_layout(client: Client, variant: Variant) -> Layout | None:
    """Return the layout of the compact form of a client's masked model, or None if `spafl.masked-every` is 1."""
    settings, data = client.settings, client.data
    return (
        _layout(settings, data.input_shape, data.num_classes, variant)
        if settings.of(SpaFLSettings).masked_every != 1
        else None
    )


@lru_cache(maxsize=4)
def _layout(settings: Settings, input_shape: Shape, num_classes: int, variant: Variant) -> Layout:
    plain = blueprint_of_shape(settings, input_shape, num_classes)
    return layout(plain, vary(plain, variant))


def own_model(client: Client, task_config: SpaFLTaskConfig) -> Path:
    """Return the folder of the client's model: its state's, or else the task's, with the initial model.

    Raises RuntimeError if the initial model differs from the server's.
    """
    if client.old_state is not None:
        return client.old_state
    found = initial_model(client.blueprint, client.settings.seed, client.store.write_units)
    if found != task_config.initial:
        raise RuntimeError(
            f"the initial model of seed {client.settings.seed} is {found} here and {task_config.initial} on the server: this "
            f"device's torch ({torch.__version__}) draws different random numbers; install the version that the server has"
        )
    return client.store.model


def load(client: Client, folder: Path) -> SparseModel:
    """Load the client's model from a folder."""
    load = load_for_device(client.blueprint, fill_from(client.store, folder), client.device)
    return model_class(client.settings)(client.blueprint, range(len(client.blueprint.atoms)), "head", load)


@torch.no_grad()
def apply_thresholds(model: SparseModel, client: Client) -> None:
    """Move the weights by the change of the server's thresholds (Eq. 13), and set the thresholds to the server's."""
    sent = dict(client.store.read([THRESHOLDS]))
    if (client.store.model / f"{CHANGE}.safetensors").is_file():
        sent |= dict(client.store.read([CHANGE]))
    place, table = 0, client.settings.of(SpaFLSettings)
    how = "off" if table.frozen_weights else table.importance_update
    for layer in model.layers():
        part = slice(place, place := place + len(layer.tau))
        if how != "off" and CHANGE in sent:
            kernel = layer.weight[0][0].numel() if how == "authors" and layer.weight.dim() == 4 else layer.fan_in
            update_from_importance(layer, torch.from_numpy(sent[CHANGE][part]).to(layer.weight.device), kernel)
        layer.tau.copy_(torch.from_numpy(sent[THRESHOLDS][part]))


def to_words(mask: np.ndarray) -> list[int]:
    """Pack bool [n] into integers of 32 bits, the first entry in the lowest bit."""
    padded = np.zeros(-(-len(mask) // WORD) * WORD, dtype=np.uint8)
    padded[: len(mask)] = mask
    return [int(word) for word in np.packbits(padded, bitorder="little").view("<u4")]


def from_words(words: list[int], count: int) -> np.ndarray:
    """Return the bool [count] that `to_words` packed.

    Raises ValueError for a wrong number of words, OverflowError for a word that does not fit 32 bits.
    """
    if len(words) != -(-count // WORD):
        raise ValueError(f"a mask of {count} filters has {-(-count // WORD)} words, not {len(words)}")
    bits = np.unpackbits(np.array(words, dtype="<u4").view(np.uint8), bitorder="little")
    return bits[:count].astype(bool)
