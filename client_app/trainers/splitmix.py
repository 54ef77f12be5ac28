"""SplitMix, the client's side: some of the narrow nets, each trained by its own cross-entropy on the same batches.

They share nothing, so that one step on the sum of their losses is a step of each.
"""

from dataclasses import replace

from torch import Tensor

from client_app.attacks import Loss
from client_app.client import Client, Update
from client_app.task import Task
from client_app.trainers.fedavg import train_whole
from client_app.trainers.heterofl import WIDTH
from client_app.training import PieceModel, classification_loss
from models.mix import MixedHead


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
    update = train_whole(task, client, (WIDTH, len(nets)), mixed_loss)
    loss = update.metrics["train-loss"]
    assert isinstance(loss, float)
    return replace(update, metrics=update.metrics | {"train-loss": loss / len(nets)})
