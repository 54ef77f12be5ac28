"""FeDepth's mutual knowledge distillation (section 4.3): whole models on one client that teach each other.

Eq.: min over W^1..W^M of 1/M sum_m F(W^m) + 1/(M-1) sum_m sum_{m' != m} KL(h^{m'} || h^m), where h^m are the logits of model m
and F is the cross-entropy. The client uploads the first model. The others, its companions, stay in its state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from piecework.client_app.client import Client, Update
from piecework.models.cascade import isolate_rng
from piecework.models.work_item import Mode, WorkItem, register_mode
from piecework.strategies.cascade.fedepth.settings import FeDepthSettings
from piecework.training.attacks import Loss
from piecework.training.examples import Examples
from piecework.training.loop import LocalTrainer, MakeLoss, PieceModel, classification_loss
from piecework.training.randomness import integer


@register_mode
@dataclass(frozen=True)
class Mutual(Mode):
    """Whole models that teach each other at once."""

    copies: Annotated[int, Field(ge=2)]  # of the item's atoms


@register_mode
@dataclass(frozen=True)
class Taught(Mode):
    """Atoms that learn from the logits of another model besides labels."""

    taught: Literal[True]


def mutual_item(count: int, copies: int) -> WorkItem:
    """Return the work item of `copies` whole models, of `count` atoms each, that teach each other."""
    return WorkItem(tuple(range(count)), mode=Mutual(copies))


def companion_folder(client: Client, m: int, units: Sequence[str]) -> Path:
    """Return the folder of the m-th companion in the client's new state.

    Units that it lacks are drawn by seed, client, m and unit.
    """
    folder = client.new_state() / f"companion-{m}"
    folder.mkdir(exist_ok=True)
    for unit in units:
        if not (folder / f"{unit}.safetensors").is_file():
            with isolate_rng(integer(client.settings.seed, "companion", client.number, m, unit)):
                client.store.save(unit, client.blueprint.build_unit(unit), folder)
    return folder


def train_mutually(client: Client, item: WorkItem, copies: int) -> Update:
    """Train M whole models, the `copies`, that teach each other at once."""
    units = client.blueprint.units()
    owners = [client, *(replace(client, folder=companion_folder(client, m, units)) for m in range(1, copies))]
    trainer = LocalTrainer(
        lambda: [PieceModel(client.blueprint, item.atoms, item.head, owner.load()) for owner in owners],
        client.config_of(item),
        mutual_loss(client.settings.of(FeDepthSettings).mutual_loss),
    )
    examples = client.local_data(0)
    for epoch in trainer.epochs():
        trainer.epoch(examples, client.rng("batches", 0, epoch), client.cap, f"train {copies} models mutually")
    pieces = trainer.finish()
    for owner, piece in zip(owners, pieces, strict=True):
        owner.save(piece)
    metrics = client.evaluate(pieces[0].logits, client.validation, item.micro_batch)
    return Update(units, metrics | {"train-loss": trainer.total_loss / trainer.seen}, [item], [trainer.seen])


@cache
def mutual_loss(kind: str) -> MakeLoss:
    """Return the loss of M models: 1/M sum_m CE(h^m) + 1/(M-1) sum_m sum_{m' != m} KL(h^{m'} || h^m).

    With kind `authors`, CE has no factor 1/M, as in the authors' code.
    """

    def make(pieces: list[PieceModel]) -> Loss:
        def loss(z: Tensor, y: Tensor) -> Tensor:
            return mutual_objective([piece.logits(z) for piece in pieces], y, kind)

        return loss

    return make


def mutual_objective(logits: list[Tensor], y: Tensor, kind: str) -> Tensor:
    """Return the objective of section 4.3 for logits[M][B, classes] and labels y[B]; KL is the mean over the batch."""
    logits, M = [h.float() for h in logits], len(logits)
    ce = torch.stack([classification_loss(h, y) for h in logits]).sum() / (M if kind == "paper" else 1)
    if logits[0].shape[1] == 1:  # one logit means two classes, of which the other has logit 0
        logits = [F.pad(h, (0, 1)) for h in logits]
    kl = [
        F.kl_div(h.log_softmax(1), other.detach().log_softmax(1), reduction="batchmean", log_target=True)
        for m, h in enumerate(logits)
        for n, other in enumerate(logits)
        if n != m
    ]
    return ce + torch.stack(kl).sum() / (M - 1)


def taught(examples: Examples, targets: np.ndarray) -> Examples:
    """Return the same examples with these targets[n, C] instead of their labels."""
    return replace(examples, labels=targets, smaller=None)  # who is taught has the first atom: images stay as they are


def without_examples(examples: Examples) -> Examples:
    """Return none of these examples."""
    return taught(examples, examples.labels[:0])


def soft_targets(logits: np.ndarray, labels: np.ndarray, kind: str) -> np.ndarray:
    """Return c onehot(y) + softmax(h), [n, C], for a teacher's logits h[n, C] and labels y[n]; c is 1/2, or 1 for `authors`.

    For one logit, [n, 1], this is c y + sigmoid(h).
    """
    h = torch.tensor(np.asarray(logits))
    if h.shape[1] == 1:
        return (_weight(kind) * torch.from_numpy(labels)[:, None] + h.sigmoid()).numpy()
    answers = h.softmax(1).numpy()
    answers[np.arange(len(labels)), labels] += np.float32(_weight(kind))
    return answers


def _weight(kind: str) -> float:
    """Return the weight of the cross-entropy of each of two models."""
    return 0.5 if kind == "paper" else 1.0


@cache
def taught_loss(kind: str) -> MakeLoss:
    """Return the loss of a model whose targets are `soft_targets`: c CE(h) + KL(teacher || h), less the teacher's entropy."""

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        return lambda z, targets: taught_objective(piece.logits(z), targets, kind)

    return make


def taught_objective(logits: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Return the mean over the batch of -sum_c targets log softmax(logits), both [B, C]."""
    logits = logits.float()
    if logits.shape[1] == 1:  # one logit means two classes, of which the other has logit 0
        logits, targets = F.pad(logits, (0, 1)), torch.cat([targets, _weight(kind) + 1 - targets], 1)
    return -(targets * logits.log_softmax(1)).sum(1).mean()
