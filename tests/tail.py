"""A system for tests that needs frozen units: the first two atoms stay as they were, the rest of the model is trained."""

from dataclasses import replace

from piecework.client_app.client import Client, Update
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.loop import LocalTrainer, PieceModel
from piecework.training.messages import Task

FROZEN = ("atoms.0", "atoms.1")
TRAINED = WorkItem((2, 3, 4))


class Tail(FedAvg):
    """The server's side."""

    name = "tail"

    def assign(self, ctx: Context) -> Assignment:
        return Assignment((TRAINED,), {TRAINED: self.cut.bytes(TRAINED)}, frozen=FROZEN)


class WholeTail(Tail):
    """The same, sending everything in every task."""

    def assign(self, ctx: Context) -> Assignment:
        return replace(super().assign(ctx), frozen=())


def train(task: Task, client: Client) -> Update:
    """The client's side: features of the frozen atoms, then the others on them."""
    prefix = PieceModel(client.blueprint, [0, 1], None, client.load())
    prefix.train(False)
    examples = client.stream(prefix, client.local_data(0), "prefix", 2)
    validation = client.stream(prefix, client.validation, "validation", 2)
    del prefix
    trainer = LocalTrainer(
        lambda: [PieceModel(client.blueprint, TRAINED.atoms, "head", client.load())], client.training_config
    )
    trainer.epoch(examples, client.rng("batches"), client.cap, "train")
    (piece,) = trainer.finish()
    client.save(piece)
    metrics = client.evaluate(piece.logits, validation) | {"train-loss": trainer.total_loss / trainer.seen}
    return Update([*piece.units()], metrics, [TRAINED], [trainer.seen])
