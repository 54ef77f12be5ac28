"""SplitMix, the client's side: it trains some of the narrow nets, each by its own cross-entropy on the same batches.

The nets share no weights, so one step on the sum of their losses is a separate step for each.
"""

from dataclasses import replace

from torch import Tensor

from piecework.client_app.client import Client, Update
from piecework.client_app.whole import train_whole
from piecework.models.mix import Mix, MixedHead
from piecework.models.variant import Variant
from piecework.training.attacks import Loss
from piecework.training.loop import PieceModel, classification_loss
from piecework.training.messages import Task


def mixed_loss(pieces: list[PieceModel]) -> Loss:
    """Return the loss: the sum of the nets' cross-entropies."""
    (piece,) = pieces
    head = piece.head
    assert isinstance(head, MixedHead)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return sum((classification_loss(logits, y) for logits in head.each(piece.features(z))), z.new_zeros(()).float())

    return loss


def nets_of(variant: Variant) -> tuple[int, ...]:
    """Return the numbers of a variant's base nets."""
    return variant.find(Mix).nets


def train(task: Task, client: Client) -> Update:
    """Train the task's nets. Raises MemoryBudgetExceededError if they do not fit."""
    nets = nets_of(task.variant)
    update = train_whole(task, client, mixed_loss)
    loss = update.metrics["train-loss"]
    assert isinstance(loss, float)
    return replace(update, metrics=update.metrics | {"train-loss": loss / len(nets)})
