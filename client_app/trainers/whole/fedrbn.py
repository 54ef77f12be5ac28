"""FedRBN (Hong et al., "Federated Robustness Propagation: Sharing Adversarial Robustness in Heterogeneous Federated Learning",
AAAI 2023), the client's side, as FedProphet compares with it.

The model has two sets of batch norm statistics, for clean and for adversarial examples, and all else once. A client with memory
for an adversarial step trains adversarially; each batch first goes through the model once clean, whose statistics take note of
it, then it is attacked and learnt with the adversarial set. Others train on clean examples, with the clean set.

Where FedProphet's authors learn adversarial examples alone, FedRBN's also learn the clean ones: (1 - q) CE(clean) + q
CE(adversarial), q = 0.5; `fedrbn.clean-weight` is 1 - q, by default 0. Ours: the two gradients are taken one after the other,
so that their activations are never held together.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piecework.client_app.client import Client, Update
from piecework.client_app.trainers.whole.fedavg import train_whole
from piecework.client_app.validation import validate
from piecework.models.dual_norm import begin_adversarial, use
from piecework.training.attacks import Loss
from piecework.training.loop import LocalTrainer, MakeLoss, PieceModel, single_loss
from piecework.training.messages import Metrics, Task, TaskConfig
from piecework.training.setup import image_attack


@dataclass(frozen=True)
class FedRBNTaskConfig(TaskConfig):
    """For the server itself: which client this is."""

    client: int


class DualPiece(PieceModel):
    """A piece that takes clean examples with one set of statistics and attacked ones with the other (FedProphet's test).

    `clean_loss`: where it learns of both, a batch's clean part of the loss.
    """

    clean_loss: Tensor

    def set_attacked(self, attacked: bool) -> None:
        """Use the set that is for them; where no adversarial example was ever met, that is the clean one."""
        if attacked:
            begin_adversarial(self.units().values())
        use(self.units().values(), adversarial=attacked)


class CleanPiece(PieceModel):
    """Clean statistics, whatever comes."""


class AttackedPiece(DualPiece):
    """Adversarial statistics, whatever comes."""

    def set_attacked(self, attacked: bool) -> None:
        """There is no difference."""
        super().set_attacked(True)


BRANCHES: dict[str, type[PieceModel]] = {"oracle": DualPiece, "clean": CleanPiece, "adversarial": AttackedPiece}


@cache
def learner(clean_weight: float) -> type[DualPiece]:
    """A piece in adversarial training, whose clean examples weigh so much."""

    class Learner(DualPiece):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            use(self.units().values(), adversarial=True)

        def before_attack(self, loss: Loss, z: Tensor, y: Tensor) -> None:
            """The clean set takes note of a batch; its gradient waits for the adversarial one's, whose weight `loss` has."""
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
    """The adversarial examples' part of the loss; an attack, which goes by signs, does not mind its weight."""
    if not clean_weight:
        return single_loss

    def make(pieces: list[PieceModel]) -> Loss:
        plain = single_loss(pieces)
        return lambda z, y: (1 - clean_weight) * plain(z, y)

    return make


class AdversarialTrainer(LocalTrainer):
    """A learner, whose adversarial set begins as the clean one where it was never used."""

    def _begin(self) -> None:
        super()._begin()
        for piece in self.pieces:
            begin_adversarial(piece.units().values())

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        """Train on a batch. Returns the detached loss, with its clean part."""
        value = super()._step(z, y, rng)
        (piece,) = self.pieces
        assert isinstance(piece, DualPiece)
        return value + piece.clean_loss

    def finish(self) -> list[PieceModel]:
        """As usual; what is asked of the pieces from now on is clean."""
        pieces = super().finish()
        for piece in pieces:
            piece.set_attacked(False)
        return pieces


def train(task: Task, client: Client) -> Update:
    """Train the whole model, swapping where it does not fit."""
    if not task.adversarial:
        return train_whole(task, client, piece_class=DualPiece, clean=True, swaps=True)
    weight = client.settings.fedrbn.clean_weight
    return train_whole(
        task,
        client,
        adversarial_loss(weight),
        learner(weight),
        make_trainer=AdversarialTrainer,
        swaps=True,
    )


def evaluate(task: Task, client: Client) -> Metrics:
    """Accuracy on this client's validation data, clean and under attack, by the statistics of `fedrbn.evaluation-branch`."""
    whole = tuple(range(len(client.blueprint.atoms)))
    attack = image_attack(client.settings, client.data, client.settings.evaluation.attack_steps)
    return validate(
        client, [whole], "head", attack, held=True, piece_class=BRANCHES[client.settings.fedrbn.evaluation_branch]
    )
