"""FedRBN (Hong et al., "Federated Robustness Propagation: Sharing Adversarial Robustness in Heterogeneous Federated Learning",
AAAI 2023), the client's side, as FedProphet compares with it.

The model has two sets of batch-norm statistics, for clean and for adversarial examples, and one of everything else. A client
with memory for an adversarial step trains adversarially. Each batch first passes through the model clean, which updates the
clean statistics. It is then attacked, and the model learns it with the adversarial set. Other clients train on clean examples
with the clean set.

The loss is (1 - q) CE(clean) + q CE(adversarial), q = 0.5; `fedrbn.clean-weight` is 1 - q. FedProphet's authors learn
adversarial examples alone (`fedrbn.clean-weight = 0`). Ours: the two gradients are computed one after the
other, so that their activations are never in memory together.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from piecework.client_app.client import Client, Update
from piecework.client_app.validation import cascade_of, validate
from piecework.client_app.whole import train_whole
from piecework.models.dual_norm import begin_adversarial, use
from piecework.models.work_item import Mode, register_mode
from piecework.strategies.whole.fedrbn.settings import FedRBNSettings
from piecework.training.answers import Metrics
from piecework.training.attacks import Loss
from piecework.training.loop import LocalTrainer, MakeLoss, PieceModel, single_loss
from piecework.training.messages import Task, TaskConfig
from piecework.training.setup import image_attack


@dataclass(frozen=True)
class FedRBNTaskConfig(TaskConfig):
    """The client's number, which only the server uses."""

    client: int


@register_mode
@dataclass(frozen=True)
class Clean(Mode):
    """Training on clean examples, while other clients train on adversarial ones."""

    clean: Literal[True]


class DualPiece(PieceModel):
    """A piece that uses one set of statistics for clean examples and the other for attacked ones (FedProphet's test).

    `clean_loss` is the clean part of a batch's loss in adversarial training.
    """

    clean_loss: Tensor

    def set_attacked(self, attacked: bool) -> None:
        """Select the set of statistics. An adversarial set that was never used starts as a copy of the clean one."""
        if attacked:
            begin_adversarial(self.units().values())
        use(self.units().values(), adversarial=attacked)


class CleanPiece(PieceModel):
    """A piece that uses the clean statistics for all examples."""


class AttackedPiece(DualPiece):
    """A piece that uses the adversarial statistics for all examples."""

    def set_attacked(self, attacked: bool) -> None:
        """Select the adversarial set, also for clean examples."""
        super().set_attacked(True)


BRANCHES: dict[str, type[PieceModel]] = {"oracle": DualPiece, "clean": CleanPiece, "adversarial": AttackedPiece}


@cache
def learner(clean_weight: float) -> type[DualPiece]:
    """Return the piece class for adversarial training in which clean examples have this weight in the loss."""

    class Learner(DualPiece):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            use(self.units().values(), adversarial=True)

        def before_attack(self, loss: Loss, z: Tensor, y: Tensor) -> None:
            """Update the clean statistics, and add the clean gradient; `loss` already has the weight 1 - `clean_weight`."""
            use(self.units().values(), adversarial=False)
            with torch.set_grad_enabled(clean_weight > 0):
                value = clean_weight / (1 - clean_weight) * loss(z, y)
            if clean_weight:
                value.backward()  # type: ignore[no-untyped-call]
            self.clean_loss = value.detach()
            use(self.units().values(), adversarial=True)

    return Learner


@cache
def adversarial_loss(clean_weight: float) -> MakeLoss:
    """Return the adversarial part of the loss. Its weight does not change the attack, which uses only signs of gradients."""
    if not clean_weight:
        return single_loss

    def make(pieces: list[PieceModel]) -> Loss:
        plain = single_loss(pieces)
        return lambda z, y: (1 - clean_weight) * plain(z, y)

    return make


class AdversarialTrainer(LocalTrainer):
    """Trains a learner. An adversarial set that was never used starts as a copy of the clean one."""

    def _begin(self) -> None:
        super()._begin()
        for piece in self.pieces:
            begin_adversarial(piece.units().values())

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        """Train on a batch. Returns the detached loss, including its clean part."""
        value = super()._step(z, y, rng)
        (piece,) = self.pieces
        assert isinstance(piece, DualPiece)
        return value + piece.clean_loss

    def finish(self) -> list[PieceModel]:
        """Return the trained pieces in evaluation mode, set to clean examples."""
        pieces = super().finish()
        for piece in pieces:
            piece.set_attacked(False)
        return pieces


def train(task: Task, client: Client) -> Update:
    """Train the whole model, adversarially if the task says so. A model that does not fit swaps."""
    if not task.adversarial:
        return train_whole(task, client, piece_class=DualPiece, mode=Clean(True), swaps=True)
    weight = client.settings.of(FedRBNSettings).clean_weight
    return train_whole(
        task,
        client,
        adversarial_loss(weight),
        learner(weight),
        make_trainer=AdversarialTrainer,
        swaps=True,
    )


def evaluate(task: Task, client: Client) -> Metrics:
    """Return loss and accuracy on the validation data, clean and under attack, with the set of `fedrbn.evaluation-branch`."""
    whole = tuple(range(len(client.blueprint.atoms)))
    attack = image_attack(client.settings, client.data, client.settings.evaluation.attack_steps)
    branch = BRANCHES[client.settings.of(FedRBNSettings).evaluation_branch]
    return validate(client, cascade_of(client, [whole], "head", held=True, piece_class=branch), attack)
