"""SplitMix, the client's side: some of the narrow nets, each trained by its own cross-entropy on the same batches.

They have no weights in common, so that one step on the sum of their losses is a step of each.
"""

from dataclasses import replace

from torch import Tensor

from piecework.client_app.client import Client, Update
from piecework.client_app.trainers.whole.fedavg import train_whole
from piecework.models.mix import MixedHead
from piecework.training.attacks import Loss
from piecework.training.loop import PieceModel, classification_loss
from piecework.training.messages import Task


def mixed_loss(pieces: list[PieceModel]) -> Loss:
    """The sum of the nets' cross-entropies."""
    (piece,) = pieces
    head = piece.head
    assert isinstance(head, MixedHead)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return sum((classification_loss(logits, y) for logits in head.each(piece.features(z))), z.new_zeros(()).float())

    return loss


def train(task: Task, client: Client) -> Update:
    """Train the nets. Raises MemoryBudgetExceededError."""
    nets = task.variant.nets
    update = train_whole(task, client, mixed_loss)
    loss = update.metrics["train-loss"]
    assert isinstance(loss, float)
    return replace(update, metrics=update.metrics | {"train-loss": loss / len(nets)})
