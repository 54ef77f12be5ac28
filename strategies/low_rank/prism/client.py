"""PriSM, the client's side (section 3.2.2): local training of a low-rank sub-model, also of OrthDrop's, which has other sizes.

U' and V' are the factors of a layer (models/low_rank.py), and lambda is `training.weight-decay`. Factors decay by Eq. 6: the
regulariser lambda / 2 ||U' V'||_F^2 = lambda / 2 tr(U'^T U' V' V'^T) is computed without the product U' V'. Its gradients are
lambda U' V' V'^T and lambda U'^T U' V'. All other parameters decay by lambda as usual. The norm of the whole gradient, with
that of the regulariser, can be bounded (`training.clip-norm`, 5 in the authors' code). Momentum starts at zero in every round;
in the authors' code it is carried over (`prism.server-momentum`, piecework.client_app.momentum).
"""

from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor, nn

from piecework.client_app.client import Client, Update
from piecework.client_app.momentum import CarriedMomentum, averaged_names
from piecework.client_app.whole import train_whole
from piecework.models.low_rank import Pair
from piecework.strategies.low_rank.prism.settings import PriSMSettings
from piecework.training.attacks import Loss
from piecework.training.loop import MakeLoss, PieceModel, classification_loss
from piecework.training.messages import Task, TaskConfig


@dataclass(frozen=True)
class PriSMTaskConfig(TaskConfig):
    """The server's instructions for a sub-model: `level` is the number of its keep ratio.

    Only the server uses `draw`, the number of the client whose choice of kernels this is.
    """

    level: int
    draw: int = 0


def frobenius(pair: Pair) -> Tensor:
    """Return ||U' V'||_F^2 of a layer, computed without the product U' V'."""
    v, u = (factor.flatten(1) for factor in pair.factors())
    return ((u.T @ u) * (v @ v.T)).sum()


class LowRankModel(PieceModel):
    """A sub-model whose factors decay by Eq. 6 instead of by the usual weight decay of single parameters."""

    def pairs(self) -> list[Pair]:
        """Return the factorised layers, in order."""
        return [each for unit in self.units().values() for each in unit.modules() if isinstance(each, Pair)]

    def list_undecayed(self) -> list[nn.Parameter]:
        """Return the factors, which Eq. 6 decays."""
        return [factor for pair in self.pairs() for factor in pair.factors()]


@cache
def low_rank_loss(decay: float) -> MakeLoss:
    """Return the loss: cross-entropy plus the regulariser of Eq. 6 with lambda = `decay`."""

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
    """Train the sub-model. Raises MemoryBudgetExceededError if it does not fit."""
    carried = (
        CarriedMomentum(client, averaged_names(client.blueprint))
        if client.settings.of(PriSMSettings).server_momentum
        else None
    )
    make_loss = low_rank_loss(client.training_config.weight_decay)
    update = train_whole(task, client, make_loss, LowRankModel, carried)
    return replace(update, units=[*update.units, *carried.units()]) if carried else update
