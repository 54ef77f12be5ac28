"""Sub-models by width, the client's side: HeteroFL (Diao, Ding, Tarokh, ICLR 2021), and FedRolex and FedDrop, which differ from
it in the channels that the server chooses.

The client trains all of its sub-model, as in federated averaging; r is the sub-model's width ratio. The Scaler divides the
outputs of convolutions and hidden linear layers by the fraction of their inputs that was kept, so that they are as large as in
the full model, which sums more channels. Masked cross-entropy sets the logits of classes without local examples to 0, and so
does a personal evaluation, whose examples have the client's own classes.

Ours: HeteroFL divides all outputs by r, also those of the first layer, whose inputs are never cut. The averaged statistics of
its batch norm would then differ from those of the full model, which has no Scaler. Our Scaler is active whenever the sub-model
runs, also when it is attacked or evaluated (HeteroFL's is active only in training, when its batch norms have no statistics).
LSTMs have no Scaler.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from piecework.client_app.client import Client, Update
from piecework.client_app.whole import train_whole, whole_network
from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint, Shape, outputs
from piecework.models.channel_axes import Axes
from piecework.models.channels import channel_axes
from piecework.models.layers import divide_output
from piecework.models.width import Indices, Select, draw_channels, rolling, shapes, sub_indices, take_first
from piecework.models.zoo import build_blueprint
from piecework.training.answers import Metrics
from piecework.training.attacks import Loss
from piecework.training.loop import MakeLoss, PieceModel, classification_loss
from piecework.training.messages import Task, TaskConfig
from piecework.training.randomness import generator

Channels = Literal["first", "rolling", "random"]


@dataclass(frozen=True)
class HeteroFLTaskConfig(TaskConfig):
    """The server's instructions for a sub-model: the number of its ratio r, and whether it has a Scaler and a class mask.

    `channels` says which ones it has, and `draw` is the number of the client whose choice of channels this is.
    """

    level: int
    scaler: bool = False
    masked: bool = False
    channels: Channels = "first"
    draw: int = 0


def selection(task: Task, seed: int) -> Select:
    """Return how a task's channels are chosen; random ones are a function of seed, round and client."""
    own = HeteroFLTaskConfig.of(task)
    if own.channels == "rolling":
        return rolling(task.round)
    return draw_channels(generator(seed, task.round, own.draw, "channels")) if own.channels == "random" else take_first


def places(task: Task, seed: int, full: Blueprint, model: Blueprint) -> dict[str, Indices]:
    """Return the indices of the sub-model's arrays in the full ones, by name."""
    axes = zoo_axes(full.zoo_name, full.num_classes, full.input_shape, full.width, full.batch_norm, tuple(full.options))
    return sub_indices(axes, shapes(full), shapes(model), selection(task, seed))


@lru_cache(maxsize=8)  # following the channels takes a second for a large model
def zoo_axes(
    name: str, num_classes: int, input_shape: Shape, width: float, batch_norm: str, options: tuple[Any, ...]
) -> Mapping[str, Axes]:
    """Return the channel axes of a model of the zoo."""
    model = build_blueprint(
        name, num_classes=num_classes, input_shape=input_shape, width=width, batch_norm=batch_norm, **dict(options)
    )
    return channel_axes(model)


def layers_of(modules: Iterable[nn.Module]) -> list[nn.Conv2d | nn.Linear]:
    """Return the convolutions and linear layers in modules, in order."""
    return [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


@cache
def input_ratios(small: Blueprint, full: Blueprint) -> tuple[float, ...]:
    """Return the fraction of its inputs that each layer of a sub-model keeps; 1 for the last layer, which has no Scaler."""
    with without_data():
        kept, all_of = (layers_of(map(model.build_unit, model.units())) for model in (small, full))
    ratios = [a.weight.shape[1] / b.weight.shape[1] for a, b in zip(kept, all_of, strict=True)]
    return (*ratios[:-1], 1.0)


def scaled_arrays(small: Blueprint, full: Blueprint) -> dict[str, float]:
    """Return the arrays by which the Scaler's divisions can be replaced, by name with the ratio: weights and biases."""
    ratios = iter(input_ratios(small, full))
    found: dict[str, float] = {}
    with without_data():
        modules = {unit: small.build_unit(unit) for unit in small.units()}
    for unit, module in modules.items():
        for path, layer in module.named_modules():
            if isinstance(layer, nn.Conv2d | nn.Linear) and (ratio := next(ratios)) != 1:
                found |= {f"{unit}.{path}.{kind}": ratio for kind, _ in layer.named_parameters(recurse=False)}
    return found


def scale_up(piece: PieceModel, ratios: tuple[float, ...]) -> None:
    """Add hooks to a piece that divide each layer's output by its ratio (HeteroFL's Scaler); () adds none."""
    for layer, ratio in zip(layers_of(piece.units().values()), ratios, strict=bool(ratios)):
        if ratio != 1:
            divide_output(layer, ratio)


@cache
def width_loss(ratios: tuple[float, ...], present: tuple[bool, ...]) -> MakeLoss:
    """Return the cross-entropy of a sub-model whose layers' outputs are divided by `ratios`.

    Logits of classes that are not `present` are set to 0. An empty tuple means no Scaler, or no mask.
    """

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        scale_up(piece, ratios)
        logits = mask_classes(piece, present)
        return lambda z, y: classification_loss(logits(z), y)

    return make


def mask_classes(piece: PieceModel, present: tuple[bool, ...]) -> Callable[[Tensor], Tensor]:
    """Return the piece's logits as a function of its input, with those of classes that are not `present` set to 0.

    An empty tuple means no mask. A model with one logit has none either.
    """
    if len(present) != outputs(piece.head):
        return piece.logits
    absent = ~torch.tensor(present)
    return lambda z: (logits := piece.logits(z)).masked_fill_(absent.to(logits.device), 0.0)


def classes_of(client: Client) -> tuple[bool, ...]:
    """Return for each class whether the client has examples of it."""
    present = np.bincount(client.local_data(0).labels, minlength=client.blueprint.num_classes) > 0
    return tuple(bool(each) for each in present)


def train(task: Task, client: Client) -> Update:
    """Train the sub-model. Raises MemoryBudgetExceededError if it does not fit."""
    task_config, ratios = HeteroFLTaskConfig.of(task), scaler_of(task, client)
    present = classes_of(client) if task_config.masked else ()
    loss = width_loss(ratios, present)
    update = train_whole(task, client, loss)
    if task_config.masked and not client.settings.privacy.on:
        update.metrics["classes"] = [int(number) for number in np.flatnonzero(present)]
    return update


def evaluate(task: Task, client: Client) -> Metrics:
    """Return loss and accuracy of the sub-model on the validation data; a personal evaluation masks classes as training does.

    Raises MemoryBudgetExceededError if the sub-model does not fit.
    """
    ratios = scaler_of(task, client)
    item = whole_network(task, client, "evaluating the sub-model")
    piece = PieceModel(client.blueprint, range(len(client.blueprint.atoms)), "head", client.load())
    scale_up(piece, ratios)
    piece.train(False)
    present = classes_of(client) if task.personal and HeteroFLTaskConfig.of(task).masked else ()
    found = client.evaluate(mask_classes(piece, present), client.validation, item.micro_batch)
    return found | {"predicted-peak": task.costs[item]}


def scaler_of(task: Task, client: Client) -> tuple[float, ...]:
    """Return the input fractions of the sub-model's layers, or () if the task has no Scaler."""
    return input_ratios(client.blueprint, client.full) if HeteroFLTaskConfig.of(task).scaler else ()
