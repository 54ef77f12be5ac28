"""FjORD (Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
NeurIPS 2021), the client's side.

p_max is the largest width ratio that the client can train. In every batch p is drawn uniformly from the ratios up to p_max, and
the first p C channels of every layer learn. Narrower nets are parts of the wider ones, not copies. With self-distillation, the
net of p_max learns the labels, and the drawn net learns the predictions of the net of p_max.

Batch norms use the statistics of the batch, which differ between the nets, and each p has a scale and a shift of its own, as in
FjORD (`fjord.norms`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from piecework.client_app.client import Client, Update
from piecework.client_app.whole import train_whole
from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint
from piecework.models.channels import channel_axes
from piecework.models.nested_norms import NestedNorms
from piecework.models.variant import Variant, vary
from piecework.models.width import Indices, shapes, sub_indices, take_first
from piecework.strategies.width.heterofl import client as heterofl
from piecework.training.answers import Metrics
from piecework.training.attacks import Loss
from piecework.training.loop import LocalTrainer, MakeLoss, PieceModel, classification_loss
from piecework.training.messages import Task, TaskConfig


@dataclass(frozen=True)
class FjORDTaskConfig(TaskConfig):
    """The server's instructions: the number of the client's ratio p_max, and the smaller ratios to draw from in every batch.

    With `distil`, the net of p_max teaches the drawn one. Only the server uses `draw`, the client's number.
    """

    level: int
    nested: list[float]
    distil: bool = False
    draw: int = 0


class NestedLoss:
    """The cross-entropy of net number `level` within a piece: net 0 is the whole piece, the others are those of `widths`.

    With `distil`, the loss of a narrower net is the cross-entropy of net 0 with the labels, plus that of the narrower net with
    the predictions of net 0.
    """

    def __init__(self, piece: PieceModel, widths: Sequence[Blueprint], *, distil: bool, level: int = 0) -> None:
        self.piece, self.distil, self.level = piece, distil, level
        self.nets = [(within_piece(piece.blueprint, w), empty_units(w)) for w in widths]

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        if not self.level:
            return classification_loss(self.piece.logits(z), y)
        narrow = self.narrow(z)
        if not self.distil:
            return classification_loss(narrow, y)
        logits = self.piece.logits(z)
        return classification_loss(logits, y) + F.cross_entropy(narrow, logits.detach().softmax(1))

    def narrow(self, z: Tensor) -> Tensor:
        """Return logits[B, classes] of the net, which uses parts of the piece's parameters."""
        indices, modules = self.nets[self.level - 1]
        for unit, module in self.piece.units().items():
            modules[unit].train(module.training)
            whole = dict(module.named_parameters())
            own = {name: part(whole[name], indices[f"{unit}.{name}"]) for name, _ in modules[unit].named_parameters()}
            z = functional_call(modules[unit], own, (z,))
        return z


@lru_cache(maxsize=256)
def within_piece(piece: Blueprint, narrow: Blueprint) -> Mapping[str, Indices]:
    """Return the indices of a narrower net's arrays in those of a piece, by name."""
    return sub_indices(channel_axes(piece), shapes(piece), shapes(narrow), take_first)


@lru_cache(maxsize=64)
def empty_units(blueprint: Blueprint) -> Mapping[str, nn.Module]:
    """Return the units of a net without values, which all losses of a process lend their own for a batch."""
    with without_data():
        return {unit: blueprint.build_unit(unit) for unit in blueprint.units()}


def part(whole: Tensor, indices: Indices) -> Tensor:
    """Return these entries of each dimension: a view if they are the first, else a copy. Gradients flow to `whole`."""
    for dim, places in enumerate(indices):
        if len(places) < whole.shape[dim]:
            first = np.array_equal(places, np.arange(len(places)))
            whole = whole.narrow(dim, 0, len(places)) if first else whole.index_select(dim, torch.from_numpy(places))
    return whole


@lru_cache(maxsize=256)
def nested_loss(widths: tuple[Blueprint, ...], distil: bool, level: int = 0) -> MakeLoss:
    """Return the loss of a piece and the nets within it, which starts with net number `level`."""
    for width in widths:
        empty_units(width)  # building them takes longer within a trace, which would follow it

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        return NestedLoss(piece, widths, distil=distil, level=level)

    return make


class NestedTrainer(LocalTrainer):
    """Trains a piece and the nets within it: one of `count` nets is drawn for every batch."""

    def __init__(self, rng: np.random.Generator, count: int, *rest: Any) -> None:
        super().__init__(*rest)
        self._rng, self._count, self._level = rng, count, 0
        self.trained = [0] * count  # number of examples that each net was trained on
        self._make_nested, self._make_loss = self._make_loss, self._make_and_keep

    def _make_and_keep(self, pieces: list[PieceModel]) -> Loss:
        """Make the loss and keep it, to set the drawn net: in bfloat16, the trainer's loss is a wrapper around it."""
        self._nested = self._make_nested(pieces)
        return self._nested

    def _form(self) -> Sequence[int]:
        """Draw the net of the next step, and return it as key, because nets of different widths take different memory."""
        self._level = int(self._rng.integers(self._count))
        return (self._level,)

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        assert isinstance(self._nested, NestedLoss)
        self._nested.level = self._level
        self.trained[self._level] += len(y)
        return super()._step(z, y, rng)


def train(task: Task, client: Client) -> Update:
    """Train the nets up to p_max. Raises MemoryBudgetExceededError if they do not fit."""
    task_config = FjORDTaskConfig.of(task)
    widths = tuple(vary(client.full, within(task.variant, ratio)) for ratio in task_config.nested)
    trained: list[NestedTrainer] = []

    def make_trainer(*rest: Any) -> NestedTrainer:
        trained.append(NestedTrainer(client.rng("widths"), 1 + len(widths), *rest))
        return trained[0]

    loss = nested_loss(widths, task_config.distil)
    update = train_whole(task, client, loss, make_trainer=make_trainer)
    update.metrics["widths"] = trained[0].trained
    return update


def within(variant: Variant, ratio: float) -> Variant:
    """Return the variant of the net of a width ratio within another net."""
    norms = (change for change in variant.changes if isinstance(change, NestedNorms))
    changes = tuple(NestedNorms(tuple(r for r in each.nested_norms if r <= ratio)) for each in norms)
    return replace(variant, width=ratio, changes=changes)


def evaluate(task: Task, client: Client) -> Metrics:
    """Return loss and accuracy of the net of p_max. Raises MemoryBudgetExceededError if it does not fit."""
    own = heterofl.HeteroFLTaskConfig(FjORDTaskConfig.of(task).level).to_values()
    return heterofl.evaluate(replace(task, config=own), client)
