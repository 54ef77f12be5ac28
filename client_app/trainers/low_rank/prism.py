"""PriSM, the client's side (section 3.2.2): local training of a sub-model of low rank, or of OrthDrop's, which has other sizes.

u', v': the factors of a layer (models/low_rank.py). lambda: `training.weight-decay`. What is not a factor decays by lambda as
usual, factors by Eq. 6: lambda / 2 ||U' V'||_F^2 = lambda / 2 tr(U'^T U' V' V'^T), which needs no U' V'. Its gradient is lambda
U' V' V'^T and lambda U'^T U' V'; the norm of the whole gradient, this included, may be bounded (`training.clip-norm`, 5 in the
authors' code). Momentum begins at zero in every round; in the authors' code it goes on (`prism.server-momentum`,
piecework.client_app.momentum).
"""

from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor, nn

from piecework.client_app.client import Client, Update
from piecework.client_app.momentum import CarriedMomentum, averaged
from piecework.client_app.trainers.whole.fedavg import train_whole
from piecework.models.low_rank import Pair
from piecework.training.attacks import Loss
from piecework.training.loop import MakeLoss, PieceModel, classification_loss
from piecework.training.messages import Task, TaskConfig


@dataclass(frozen=True)
class PriSMTaskConfig(TaskConfig):
    """What the server says of a sub-model: the number of its keep ratio.

    `draw` is for the server alone: which of the clients' choices of kernels this is.
    """

    level: int
    draw: int = 0


def frobenius(pair: Pair) -> Tensor:
    """||U' V'||_F^2 of a layer."""
    v, u = (factor.flatten(1) for factor in pair.factors())
    return ((u.T @ u) * (v @ v.T)).sum()


class LowRankModel(PieceModel):
    """A sub-model, whose factors decay by Eq. 6 and not one by one."""

    def pairs(self) -> list[Pair]:
        """The factorised layers, in order."""
        return [each for unit in self.units().values() for each in unit.modules() if isinstance(each, Pair)]

    def undecayed(self) -> list[nn.Parameter]:
        """The factors."""
        return [factor for pair in self.pairs() for factor in pair.factors()]


@cache
def low_rank_loss(decay: float) -> MakeLoss:
    """Cross-entropy and Eq. 6, lambda = `decay`."""

    def make(pieces: list[PieceModel]) -> Loss:
        (piece,) = pieces
        assert isinstance(piece, LowRankModel)
        pairs = piece.pairs() if decay else []

        def loss(z: Tensor, y: Tensor) -> Tensor:
            value = classification_loss(piece.logits(z), y)
            for pair in pairs:
                value = value + decay / 2 * frobenius(pair)
            return value

        return loss

    return make


def train(task: Task, client: Client) -> Update:
    """Train the sub-model. Raises MemoryBudgetExceededError."""
    carried = CarriedMomentum(client, averaged(client.blueprint)) if client.settings.prism.server_momentum else None
    make_loss = low_rank_loss(client.training_config.weight_decay)
    update = train_whole(task, client, make_loss, LowRankModel, carried)
    return replace(update, units=[*update.units, *carried.units()]) if carried else update
