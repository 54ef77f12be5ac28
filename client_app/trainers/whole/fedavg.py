"""Federated averaging, the client's side: local SGD on the whole model (McMahan et al., 2017, Algorithm 1).

A device whose budget does not allow the whole model says so; nothing is trained in its place. With `adversarial` it is local
adversarial training (Zizzo et al., "FAT: Federated Adversarial Training", 2020): PGD on the images, after `attack-warmup` clean
rounds.
"""

from collections.abc import Callable

from piecework.client_app.client import Client, Update
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.models.partition import Piece, fits
from piecework.training.loop import Carried, LocalTrainer, MakeLoss, PieceModel, single_loss
from piecework.training.messages import Task


def train(task: Task, client: Client) -> Update:
    """Train all atoms and the head together. Raises MemoryBudgetExceededError."""
    return train_whole(task, client, tuple(range(len(client.blueprint.atoms))))


def train_whole(
    task: Task,
    client: Client,
    piece: Piece,
    make_loss: MakeLoss = single_loss,
    piece_class: type[PieceModel] = PieceModel,
    carried: Carried | None = None,
    make_trainer: Callable[..., LocalTrainer] = LocalTrainer,
    *,
    swaps: bool = False,
) -> Update:
    """The same for a model that cost lists call `piece`; `swaps`: also where it does not fit."""
    needed = task.cost(piece)
    if not swaps and not fits(needed, client.allowed):
        raise MemoryBudgetExceededError(needed or task.reference, client.allowed, "training the whole model")
    atoms = tuple(range(len(client.blueprint.atoms)))

    def make() -> list[PieceModel]:
        return [piece_class(client.blueprint, atoms, "head", client.load())]

    trainer = make_trainer(make, client.training_config, make_loss, carried)
    for epoch in trainer.epochs():
        examples = client.share(0 if client.settings.feature_cache else epoch)
        trainer.epoch(examples, client.rng("batches", 0, epoch), client.cap, "train the whole model")
    (model,) = trainer.finish()
    client.save(model)
    metrics = client.evaluate(model.logits, client.validation)
    metrics |= {"train-loss": trainer.total_loss / trainer.seen, "predicted-peak": needed or 0}
    return Update([*model.units()], metrics, [piece], [trainer.seen])
