"""CoCoFL, the client's side: some consecutive layers of the whole network are trained, and the others are frozen in int8.

The layers before the trained ones only run forward. Those behind them also pass the gradient of the loss on, in int8, and get
none for their own weights. Only what is trained is sent back. The head is trained with the last layer, and otherwise frozen in
float32. A client that finds too little memory for the layers that it was given trains the cheapest layer.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from torch import nn

from piecework.client_app.client import Client, Update
from piecework.models.cascade import Blueprint
from piecework.models.int8 import find_pairs, to_int8
from piecework.models.partition import Piece, fits, format_ranges
from piecework.models.work_item import WorkItem
from piecework.training.loop import Load, LocalTrainer, PieceModel
from piecework.training.messages import Task, TaskConfig


@dataclass(frozen=True)
class CoCoFLTaskConfig(TaskConfig):
    """The server's instructions: runs of atoms to train, preferred first."""

    trained: list[list[int]]


@cache
def frozen_around(trained: Piece) -> type[PieceModel]:
    """Return the piece class for the whole network, in which only these atoms learn, and the head with the last one."""

    class FrozenAround(PieceModel):
        ways: ClassVar[tuple[str, ...]] = ()

        def __init__(self, blueprint: Blueprint, atoms: Piece, head: str | None, load: Load) -> None:
            self.frozen = [f"atoms.{atom}" for atom in atoms if atom not in trained]

            def load_small(unit: str) -> nn.Module:
                module = load(unit)
                if unit in self.frozen:
                    atom = int(unit.partition(".")[2])
                    to_int8(module, find_pairs(blueprint.atoms[atom].build, blueprint.shape_before(atom)))
                return module

            super().__init__(blueprint, atoms, head, load_small)
            if trained[-1] != len(blueprint.atoms) - 1:
                self.head.requires_grad_(False)
                self.frozen.append(head or "")

        def train(self, mode: bool) -> None:
            """Set the mode of what learns; what is frozen stays in evaluation mode."""
            super().train(mode)
            for unit in self.frozen:
                self.units()[unit].eval()

    return FrozenAround


def learned_units(blueprint: Blueprint, trained: Piece) -> list[str]:
    """Return the units that learn if these atoms are trained."""
    head = ["head"] if trained[-1] == len(blueprint.atoms) - 1 else []
    return [*(f"atoms.{atom}" for atom in trained), *head]


def train(task: Task, client: Client) -> Update:
    """Train some atoms of the network for the local epochs. Raises MemoryBudgetExceededError if that does not fit."""
    item = chosen(task, client)
    trained = item.learns or item.atoms

    def make() -> list[PieceModel]:
        piece_class = frozen_around(item.learns) if item.learns else PieceModel
        return [piece_class(client.blueprint, item.atoms, item.head, client.load())]

    trainer = LocalTrainer(make, client.config_of(item))
    for epoch in trainer.epochs():
        examples = client.local_data(0 if client.settings.memory.feature_cache else epoch)
        trainer.epoch(examples, client.rng("batches", 0, epoch), client.cap, f"train {format_ranges(trained)}")
    (model,) = trainer.finish()
    learned = learned_units(client.blueprint, trained)
    for unit in learned:
        client.store.save(unit, model.units()[unit], client.folder)
    metrics = client.evaluate(model.logits, client.validation, item.micro_batch)
    metrics |= {"train-loss": trainer.total_loss / trainer.seen, "predicted-peak": task.costs[item]}
    return Update(learned, metrics, [item], [trainer.seen])


def item_of(blueprint: Blueprint, trained: Piece) -> WorkItem:
    """Return the work item that trains these atoms of the whole network."""
    atoms = tuple(range(len(blueprint.atoms)))
    return WorkItem(atoms, learns=() if trained == atoms else trained)


def chosen(task: Task, client: Client) -> WorkItem:
    """Return the first work item of the task that fits. Raises MemoryBudgetExceededError."""
    for trained in CoCoFLTaskConfig.of(task).trained:
        item = item_of(client.blueprint, tuple(trained))
        if fits(task.needed_bytes(item), client.allowed):
            return item
    raise task.refusal(item, client.allowed, f"training {format_ranges(trained)} of the network")
