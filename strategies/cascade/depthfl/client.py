"""DepthFL, the client's side ("DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023).

Client k has the model's first d_k blocks, its depth, and a classifier behind each, which predicts p_i behind block i. It trains
blocks and classifiers 1 .. d_k to minimise

    sum_i l_CE(p_i) + lambda_t / (d_k - 1) sum_i sum_{j != i} KL(p_j || p_i).

The second term is self-distillation among the classifiers, in which p_j is a constant. Its weight in round t is lambda_t =
exp(-5 (1 - min(t, T) / T)^2), T = 300 (`depthfl.distillation-rounds`). The client predicts by the mean of the classifiers'
logits.

With `depthfl.feddyn-alpha` a > 0 (FedDyn, Acar et al., ICLR 2021, as in the paper), the loss has the further terms
- <h_k, theta> + a / 2 ||theta - theta_t||^2, and h_k <- h_k - a (theta_k - theta_t) is the client's state.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from piecework.client_app.client import Client, Update
from piecework.models.cascade import Blueprint
from piecework.models.depth_exits import Exits, exits_of, mean_logits
from piecework.models.partition import Piece, fits
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.strategies.cascade.depthfl.settings import DepthFLSettings
from piecework.training.answers import Metrics
from piecework.training.attacks import Loss
from piecework.training.loop import Load, LocalTrainer, MakeLoss, PieceModel, classification_loss
from piecework.training.messages import Task, TaskConfig
from piecework.training.settings.shared import WAYS

HISTORY = "feddyn"  # the folder with h_k in the client's state


@dataclass(frozen=True)
class DepthFLTaskConfig(TaskConfig):
    """The server's instructions: the maximum number of blocks to train, and the weight of self-distillation."""

    depth: int
    weight: float


class ExitsModel(PieceModel):
    """A model's first blocks and the exits behind them. The last exit is the head, and the others are among the atoms."""

    ways = tuple(way for way in WAYS if way != "recompute")  # exits branch off inside of segments

    def __init__(self, blueprint: Blueprint, atoms: Piece, head: str | None, load: Load) -> None:
        super().__init__(blueprint, atoms, head, load)
        count = len(blueprint.atoms) - blueprint.num_replacement_atoms
        self.body = [atom for atom in self.atoms if atom < count]
        self.exits = {behind: atom for behind, atom in exits_of(blueprint).items() if atom in self.atoms}

    def all_logits(self, z: Tensor) -> list[Tensor]:
        """Return logits[B, classes] of every exit, the deepest one last."""
        found = []
        for atom in self.body:
            z = self.modules[f"atoms.{atom}"](z)
            if (place := self.exits.get(atom)) is not None:
                found.append(self.modules[f"atoms.{place}"](z))
        return [*found, self.head(z)]

    def logits(self, z: Tensor) -> Tensor:
        """Return the mean of all exits' logits, [B, classes]."""
        return mean_logits(self.all_logits(z))


def item_of_depth(blueprint: Blueprint, variant: Variant, depth: int) -> WorkItem:
    """Return the work item of the first `depth` blocks and the exits behind them; the exit of the deepest block is the head."""
    exits, blocks = exits_of(blueprint), variant.find(Exits).exits
    body = [atom for block in blocks[:depth] for atom in block]
    before = [exits[block[-1]] for block in blocks[: depth - 1]]
    head = "head" if depth == len(blocks) else f"atoms.{exits[blocks[depth - 1][-1]]}"
    return WorkItem((*body, *before), head, variant)


def distillation_weight(server_round: int, rounds: int) -> float:
    """Return lambda_t, which rises to 1 within `rounds` rounds."""
    return math.exp(-5 * (1 - min(server_round, rounds) / rounds) ** 2)


@cache
def depth_loss(weight: float) -> MakeLoss:
    """Return the loss of an `ExitsModel`: cross-entropy of all exits, and distillation between them with this weight."""

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        assert isinstance(piece, ExitsModel)

        def loss(z: Tensor, y: Tensor) -> Tensor:
            logits = [each.float() for each in piece.all_logits(z)]
            return exits_loss(logits, y, weight)

        return loss

    return make


def exits_loss(logits: list[Tensor], y: Tensor, weight: float) -> Tensor:
    """Return the loss of the exits' logits[B, classes] for labels y[B]."""
    total = classification_loss(logits[0], y)
    for each in logits[1:]:
        total = total + classification_loss(each, y)
    if len(logits) == 1 or not weight:
        return total
    if logits[0].shape[1] == 1:  # one logit means two classes, of which the other has logit 0
        logits = [F.pad(each, (0, 1)) for each in logits]
    logs = [F.log_softmax(each, dim=1) for each in logits]
    for i, log in enumerate(logs):
        others = [other.detach() for j, other in enumerate(logs) if j != i]
        for other in others:
            total = total + weight / len(others) * F.kl_div(log, other, reduction="batchmean", log_target=True)
    return total


def dynamic(make_loss: MakeLoss, alpha: float, correct: Callable[[PieceModel], list[Tensor]]) -> MakeLoss:
    """Return a loss with FedDyn's terms a theta + c in its gradients; `correct` returns c = - h_k - a theta_t by parameter."""

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        for parameter, c in zip(piece.parameters(), correct(piece), strict=True):
            # detached, because a parameter in its own hook would be freed late
            parameter.register_hook(partial(add_dynamic_terms, parameter.detach(), c, alpha))  # type: ignore[no-untyped-call]
        return make_loss(pieces)

    return make


def add_dynamic_terms(parameter: Tensor, c: Tensor, alpha: float, gradient: Tensor) -> Tensor:
    """Return the gradient with FedDyn's terms added."""
    return torch.add(c, parameter, alpha=alpha).add_(gradient)


@cache
def costed_loss(weight: float, alpha: float) -> MakeLoss:
    """Return the loss for computing memory costs on the server, which does not know the clients' states: c is 0."""
    if not alpha:
        return depth_loss(weight)
    return dynamic(depth_loss(weight), alpha, lambda piece: [torch.zeros_like(p) for p in piece.parameters()])


def train(task: Task, client: Client) -> Update:
    """Train as many blocks as fit. Raises MemoryBudgetExceededError if even the first does not."""
    task_config, settings = DepthFLTaskConfig.of(task), client.settings
    item = deepest(task, client)
    alpha = settings.of(DepthFLSettings).feddyn_alpha
    make_loss = depth_loss(task_config.weight)
    if alpha:
        make_loss = dynamic(make_loss, alpha, lambda piece: corrections(client, piece, alpha))
    trainer = LocalTrainer(
        lambda: [ExitsModel(client.blueprint, item.atoms, item.head, client.load())], client.config_of(item), make_loss
    )
    for epoch in trainer.epochs():
        examples = client.local_data(0 if settings.memory.feature_cache else epoch)
        trainer.epoch(examples, client.rng("batches", 0, epoch), client.cap, "train")
    (piece,) = trainer.finish()
    if alpha:
        remember(client, piece, alpha)  # before `save` overwrites the sent arrays, which it reads
    client.save(piece)
    metrics = client.evaluate(piece.logits, client.validation, item.micro_batch)
    metrics |= {"train-loss": trainer.total_loss / trainer.seen, "predicted-peak": task.costs[item]}
    return Update([*piece.units()], metrics, [item], [trainer.seen])


def deepest(task: Task, client: Client) -> WorkItem:
    """Return the work item of as many assigned blocks as fit this client.

    Raises MemoryBudgetExceededError if even the first block does not fit.
    """
    for depth in range(DepthFLTaskConfig.of(task).depth, 0, -1):
        item = item_of_depth(client.blueprint, task.variant, depth)
        if fits(task.needed_bytes(item), client.allowed):
            return task.fit_item(item, client.allowed)
    raise task.refusal(item, client.allowed, "training the first block")


def corrections(client: Client, piece: PieceModel, alpha: float) -> list[Tensor]:
    """Return c = - h_k - a theta_t of each parameter, in their order; h_k is initially 0."""
    found = []
    for unit, module in piece.units().items():
        with open_history(client, unit) as h:
            for name, parameter in module.named_parameters():
                c = parameter.detach().mul(-alpha)
                if (known := h(f"{unit}.{name}")) is not None:
                    c.sub_(torch.from_numpy(known).to(c.device))
                found.append(c)
    return found


@contextmanager
def open_history(client: Client, unit: str) -> Iterator[Callable[[str], np.ndarray | None]]:
    """Open a function that reads h_k of a unit's parameter from the client's state. It returns None if there is no h_k yet."""
    path = client.old_state / HISTORY / f"{unit}.safetensors" if client.old_state is not None else None
    if path is None or not path.is_file():
        yield lambda _: None
        return
    with safe_open(path, framework="np") as file:
        yield file.get_tensor


def remember(client: Client, piece: PieceModel, alpha: float) -> None:
    """Update h_k <- h_k - a (theta_k - theta_t), unit by unit, even if the server later rejects the update."""
    folder = client.new_state() / HISTORY
    folder.mkdir(exist_ok=True)
    for unit, module in piece.units().items():
        parameters, fresh = dict(module.named_parameters()), {}
        with open_history(client, unit) as h:
            for key, sent in client.store.read([unit]):
                if (parameter := parameters.get(key.removeprefix(f"{unit}."))) is not None:
                    step, known = alpha * (parameter.detach().cpu().numpy() - sent), h(key)
                    fresh[key] = known - step if known is not None else -step
        client.store.write_units(fresh, folder)


def evaluate(task: Task, client: Client) -> Metrics:
    """Return loss and accuracy on the validation data of the model at the client's depth.

    Raises MemoryBudgetExceededError if even the first block does not fit.
    """
    item = deepest(task, client)
    piece = ExitsModel(client.blueprint, item.atoms, item.head, client.load())
    piece.train(False)
    found = client.evaluate(piece.logits, client.validation, item.micro_batch)
    return found | {"predicted-peak": task.costs[item]}
