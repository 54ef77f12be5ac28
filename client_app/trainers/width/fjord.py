"""FjORD (Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
NeurIPS 2021), the client's side.

p_max: the largest fraction of the channels that the client can train. In every batch p is drawn uniformly from the ratios up to
p_max, and the first p C channels of every layer learn: the narrower nets are parts of the wider ones, and no copies. With
self-distillation the net of p_max learns labels, and the drawn one what that makes of the batch.

Ours: batch norms take the statistics of the batch, which are each net's own; their scale and shift are shared between nets
(FjORD: each p has its own).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from piecework.client_app.client import Client, Update
from piecework.client_app.trainers.whole.fedavg import train_whole
from piecework.client_app.trainers.width import heterofl
from piecework.models.cascade import Blueprint
from piecework.models.channels import channel_axes
from piecework.models.variant import Variant, vary
from piecework.models.width import Indices, ordered, shapes, sub_indices
from piecework.training.attacks import Loss
from piecework.training.loop import LocalTrainer, MakeLoss, PieceModel, classification_loss
from piecework.training.messages import Metrics, Task, TaskConfig


@dataclass(frozen=True)
class FjORDTaskConfig(TaskConfig):
    """What the server says: the number of the client's ratio; the smaller ones that are drawn from in every batch.

    `draw` is for the server alone.
    """

    level: int
    nested: list[float]
    distil: bool = False
    draw: int = 0


class NestedLoss:
    """Cross-entropy of the net of number `level` within a piece, whose net 0 is all of it and the others are of `widths`.

    With `distil` that of net 0, and of what the other one makes of the batch against net 0's predictions.
    """

    def __init__(self, piece: PieceModel, widths: Sequence[Blueprint], *, distil: bool, level: int = 0) -> None:
        self.piece, self.distil, self.level = piece, distil, level
        axes = channel_axes(piece.blueprint) if widths else {}
        full = shapes(piece.blueprint)
        self.nets = [(w, sub_indices(axes, full, shapes(w), ordered)) for w in widths]
        with torch.device("meta"):
            self.modules = [{unit: w.build_unit(unit) for unit in w.units()} for w in widths]

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        if not self.level:
            return classification_loss(self.piece.logits(z), y)
        narrow = self.narrow(z)
        if not self.distil:
            return classification_loss(narrow, y)
        logits = self.piece.logits(z)
        return classification_loss(logits, y) + F.cross_entropy(narrow, logits.detach().softmax(1))

    def narrow(self, z: Tensor) -> Tensor:
        """Logits[B, classes] of the net, made of parts of the piece's parameters."""
        indices, modules = self.nets[self.level - 1][1], self.modules[self.level - 1]
        for unit, module in self.piece.units().items():
            modules[unit].train(module.training)
            own = {name: part(value, indices[f"{unit}.{name}"]) for name, value in module.named_parameters()}
            z = functional_call(modules[unit], own, (z,))
        return z


def part(whole: Tensor, indices: Indices) -> Tensor:
    """A view of the first entries of each dimension, or where they are not the first, a copy; gradients go to the whole."""
    for dim, places in enumerate(indices):
        if len(places) < whole.shape[dim]:
            first = np.array_equal(places, np.arange(len(places)))
            whole = whole.narrow(dim, 0, len(places)) if first else whole.index_select(dim, torch.from_numpy(places))
    return whole


@cache
def nested_loss(widths: tuple[Blueprint, ...], distil: bool, level: int = 0) -> MakeLoss:
    """The loss of a piece and the nets within it, of which one is drawn to begin with."""

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        return NestedLoss(piece, widths, distil=distil, level=level)

    return make


class NestedTrainer(LocalTrainer):
    """Trains a piece and the nets within it: for every batch one of `count` is drawn."""

    def __init__(self, rng: np.random.Generator, count: int, *rest: Any) -> None:
        super().__init__(*rest)
        self._rng, self._count, self._level = rng, count, 0
        self.trained = [0] * count  # examples, by net
        self._make_nested, self._make_loss = self._make_loss, self._kept

    def _kept(self, pieces: list[PieceModel]) -> Loss:
        """The loss, which is told of every draw; in bfloat16 there is another one around it."""
        self._nested = self._make_nested(pieces)
        return self._nested

    def _form(self) -> Sequence[int]:
        """Nets of other widths take other memory."""
        self._level = int(self._rng.integers(self._count))
        return (self._level,)

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        assert isinstance(self._nested, NestedLoss)
        self._nested.level = self._level
        self.trained[self._level] += len(y)
        return super()._step(z, y, rng)


def train(task: Task, client: Client) -> Update:
    """Train the nets up to p_max. Raises MemoryBudgetExceededError."""
    task_config = FjORDTaskConfig.of(task)
    widths = tuple(vary(client.full, Variant(width=ratio)) for ratio in task_config.nested)
    trained: list[NestedTrainer] = []

    def make_trainer(*rest: Any) -> NestedTrainer:
        trained.append(NestedTrainer(client.rng("widths"), 1 + len(widths), *rest))
        return trained[0]

    loss = nested_loss(widths, task_config.distil)
    update = train_whole(task, client, loss, make_trainer=make_trainer)
    update.metrics["widths"] = trained[0].trained
    return update


def evaluate(task: Task, client: Client) -> Metrics:
    """Loss and accuracy of the net of p_max. Raises MemoryBudgetExceededError."""
    own = heterofl.HeteroFLTaskConfig(FjORDTaskConfig.of(task).level).to_values()
    return heterofl.evaluate(replace(task, own=own), client)
