"""SplitMix, the client's side: some of the narrow nets, each trained by its own cross-entropy on the same batches.

They share nothing, so that one step on the sum of their losses is a step of each.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from client_app.attacks import Loss
from client_app.client import Client, Update
from client_app.setup import narrowed
from client_app.task import Metrics, OwnFields, Task
from client_app.trainers.fedavg import train_whole
from client_app.trainers.heterofl import WIDTH
from client_app.training import PieceModel, classification_loss
from client_app.validation import evaluate_whole
from models.mix import MixedHead, mixed


@dataclass(frozen=True)
class Orders(OwnFields):
    """What the server says: a net's share of the channels, and the numbers of the nets to train."""

    share: float
    nets: list[int]


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
    nets = mix(task, client)
    update = train_whole(task, client, (WIDTH, len(nets)), mixed_loss)
    loss = update.metrics["train-loss"]
    assert isinstance(loss, float)
    return replace(update, metrics=update.metrics | {"train-loss": loss / len(nets)})


def evaluate(task: Task, client: Client) -> Metrics:
    """Loss and accuracy of the nets' mean on the client's validation share."""
    mix(task, client)
    return evaluate_whole(task, client)


def mix(task: Task, client: Client) -> list[int]:
    """Let the client's model be the nets of its task."""
    orders, data = Orders.of(task), client.data
    client.blueprint = mixed(narrowed(client.settings, data.input_shape, data.num_classes, orders.share), orders.nets)
    return orders.nets
