"""Federated averaging, the client's side: local SGD on the whole model (McMahan et al., 2017, Algorithm 1).

A device whose budget is too small for the whole model refuses the task; no smaller model is trained in its place. With
`training.adversarial`, training is adversarial (Zizzo et al., "FAT: Federated Adversarial Training", 2020): PGD on the images,
after `attack.warmup` clean rounds.
"""

from collections.abc import Callable

from piecework.client_app.client import Client, Update
from piecework.client_app.paged import train_paged
from piecework.models.partition import fits
from piecework.models.work_item import Mode, WorkItem
from piecework.training.loop import LocalTrainer, MakeLoss, OptimizerStateStore, PieceModel, single_loss
from piecework.training.messages import Task


def train(task: Task, client: Client) -> Update:
    """Train all atoms and the head together. Raises MemoryBudgetExceededError if they do not fit."""
    return train_whole(task, client)


def whole_network(task: Task, client: Client, doing: str, *, mode: Mode | None = None, swaps: bool = False) -> WorkItem:
    """Return the work item that trains all of a task's network, with a step that fits this client.

    With `swaps`, a network that does not fit is trained nevertheless; otherwise raises MemoryBudgetExceededError. `doing` says
    in the message what did not fit.
    """
    item = WorkItem(tuple(range(len(client.blueprint.atoms))), variant=task.variant, mode=mode)
    if not swaps and not fits(task.needed_bytes(item), client.allowed):
        raise task.refusal(item, client.allowed, doing)
    return task.fit_item(item, client.allowed)


def train_whole(
    task: Task,
    client: Client,
    make_loss: MakeLoss = single_loss,
    piece_class: type[PieceModel] = PieceModel,
    carried: OptimizerStateStore | None = None,
    make_trainer: Callable[..., LocalTrainer] = LocalTrainer,
    *,
    mode: Mode | None = None,
    swaps: bool = False,
) -> Update:
    """Train all of the task's network, with the strategy's own loss, piece class, carried momentum and trainer.

    `mode` is that of the work item. With `swaps`, a network that does not fit is trained nevertheless; otherwise raises
    MemoryBudgetExceededError. Raises ValueError for a paged step, which has the usual ones, beside any of one's own.
    """
    item = whole_network(task, client, "training the whole model", mode=mode, swaps=swaps)
    if item.pages:
        if (make_loss, piece_class, carried, make_trainer) != (single_loss, PieceModel, None, LocalTrainer):
            raise ValueError(
                "a paged step has the usual loss, pieces, momentum and trainer, and this method has its own: leave page out of "
                "memory.fit, and let the method's class say can = replace(..., pages=False)"
            )
        return train_paged(task, client, item)

    def make() -> list[PieceModel]:
        return [piece_class(client.blueprint, item.atoms, item.head, client.load())]

    trainer = make_trainer(make, client.config_of(item), make_loss, carried)
    for epoch in trainer.epochs():
        examples = client.local_data(0 if client.settings.memory.feature_cache else epoch)
        trainer.epoch(examples, client.rng("batches", 0, epoch), client.cap, "train the whole model")
    (model,) = trainer.finish()
    client.save(model)
    metrics = client.evaluate(model.logits, client.validation, item.micro_batch)
    metrics |= {"train-loss": trainer.total_loss / trainer.seen, "predicted-peak": task.costs.get(item, 0)}
    return Update([*model.units()], metrics, [item], [trainer.seen])
