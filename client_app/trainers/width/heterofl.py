"""Sub-models by width, the client's side: HeteroFL (Diao, Ding, Tarokh, ICLR 2021), and FedRolex and FedDrop, which differ from
it in the channels that the server chooses.

r: the fraction of the channels that this client's model has. It trains all of it, as in federated averaging.
Scaler: what convolutions and hidden linear layers make is divided by the ratio of their inputs that was kept, so that it is as
large as in the full model, where more channels are summed up. Masked cross-entropy: logits of classes that the client has no
examples of are set to 0.

Ours: HeteroFL divides all by r, also the first layer, none of whose inputs is cut; the statistics of its batch norm, averaged,
would not be those of the full model, which has no Scaler. And it works whenever the sub-model does, also when it is attacked or
evaluated (HeteroFL: in training only; its batch norms have no statistics then). LSTMs have none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from piecework.client_app.client import Client, Update
from piecework.client_app.trainers.whole.fedavg import train_whole, whole_network
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.models.cascade import Blueprint, outputs
from piecework.models.partition import fits
from piecework.training.attacks import Loss
from piecework.training.loop import MakeLoss, PieceModel, classification_loss
from piecework.training.messages import Metrics, Task, TaskConfig


@dataclass(frozen=True)
class HeteroFLTaskConfig(TaskConfig):
    """What the server says of a sub-model: the number of its ratio r; whether there is a Scaler and a mask.

    `draw` is for the server alone: which of the clients' choices of channels this is.
    """

    level: int
    scaler: bool = False
    masked: bool = False
    draw: int = 0


def layers_of(modules: Iterable[nn.Module]) -> list[nn.Conv2d | nn.Linear]:
    """The convolutions and linear layers in modules, in order."""
    return [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


def input_ratios(small: Blueprint, full: Blueprint) -> tuple[float, ...]:
    """Of each layer of a sub-model, the ratio of its inputs that was kept; 1 of the last one."""
    with torch.device("meta"):
        kept, all_of = (layers_of(map(model.build_unit, model.units())) for model in (small, full))
    ratios = [a.weight.shape[1] / b.weight.shape[1] for a, b in zip(kept, all_of, strict=True)]
    return (*ratios[:-1], 1.0)


def scale_up(piece: PieceModel, ratios: tuple[float, ...]) -> None:
    """Divide what each layer makes by its ratio (HeteroFL's Scaler), in place; () = none."""
    for layer, ratio in zip(layers_of(piece.units().values()), ratios, strict=bool(ratios)):
        if ratio != 1:
            layer.register_forward_hook(partial(divided, ratio))


def divided(ratio: float, _: nn.Module, __: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """What a layer made, divided by a ratio."""
    return out.div_(ratio)


@cache
def width_loss(ratios: tuple[float, ...], present: tuple[bool, ...]) -> MakeLoss:
    """Cross-entropy of a sub-model scaled up by its layers' `ratios`; logits of classes that are not `present` are 0.

    () = no Scaler, no mask.
    """

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        scale_up(piece, ratios)
        mask = torch.tensor(present) if len(present) == outputs(piece.head) else None

        def loss(z: Tensor, y: Tensor) -> Tensor:
            logits = piece.logits(z)
            if mask is not None:
                logits = logits.masked_fill_(~mask.to(logits.device), 0.0)
            return classification_loss(logits, y)

        return loss

    return make


def classes_of(client: Client) -> tuple[bool, ...]:
    """Which classes the client has examples of."""
    present = np.bincount(client.local_data(0).labels, minlength=client.blueprint.num_classes) > 0
    return tuple(bool(each) for each in present)


def train(task: Task, client: Client) -> Update:
    """Train the sub-model. Raises MemoryBudgetExceededError."""
    task_config, ratios = HeteroFLTaskConfig.of(task), scaler_of(task, client)
    present = classes_of(client) if task_config.masked else ()
    loss = width_loss(ratios, present)
    update = train_whole(task, client, loss)
    if task_config.masked:
        update.metrics["classes"] = [int(number) for number in np.flatnonzero(present)]
    return update


def evaluate(task: Task, client: Client) -> Metrics:
    """Loss and accuracy of the sub-model on the client's validation data. Raises MemoryBudgetExceededError."""
    ratios = scaler_of(task, client)
    needed = task.cost(whole_network(task, client))
    if not fits(needed, client.allowed):
        raise MemoryBudgetExceededError(needed or 0, client.allowed, "evaluating the sub-model")
    piece = PieceModel(client.blueprint, range(len(client.blueprint.atoms)), "head", client.load())
    scale_up(piece, ratios)
    piece.train(False)
    return client.evaluate(piece.logits, client.validation)


def scaler_of(task: Task, client: Client) -> tuple[float, ...]:
    """The ratios that the layers of the client's sub-model have of their inputs, where there is a Scaler."""
    return input_ratios(client.blueprint, client.full) if HeteroFLTaskConfig.of(task).scaler else ()
