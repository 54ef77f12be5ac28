"""Train a whole model whose step pages through its segments (training/paged.py)."""

import shutil

import numpy as np
from torch import Tensor, nn

from piecework.client_app.client import Client, Update, fill_from
from piecework.models.work_item import WorkItem
from piecework.training.loop import LocalTrainer, load_for_device
from piecework.training.memory_cap import has_plenty
from piecework.training.messages import Task
from piecework.training.paged import PagedCascade
from piecework.training.pages import PageFiles
from piecework.training.sgd import TrainingConfig


class PagedTrainer(LocalTrainer):
    """Trains a paged cascade, of which nothing stays in memory between two batches."""

    def __init__(self, cascade: PagedCascade, training_config: TrainingConfig) -> None:
        super().__init__(list, training_config)
        self.cascade = cascade

    def _begin(self) -> None:
        """Do nothing: each segment is built when it is needed."""

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        if self.training_config.attack is not None:
            z = self.cascade.attack(z, y, int(rng.integers(2**63)))
        return self.cascade.step(z, y)


def train_paged(task: Task, client: Client, item: WorkItem) -> Update:
    """Train the item's network with a paged step. Its units are in the client's store afterwards."""
    folder, config = client.store.task / "pages", client.config_of(item)
    pages = PageFiles(folder, client.device, cached=has_plenty())

    def first_weights(unit: str, module: nn.Module) -> None:
        if not pages.holds(unit):  # which it is read from otherwise
            fill_from(client.store, client.folder)(unit, module)
            pages.bytes_read += sum(value.numel() * value.element_size() for value in module.state_dict().values())

    load = load_for_device(client.blueprint, first_weights, client.device)
    cascade = PagedCascade(client.blueprint, item.atoms, item.head, load, config, pages)
    trainer = PagedTrainer(cascade, config)
    for epoch in trainer.epochs():
        examples = client.local_data(0 if client.settings.memory.feature_cache else epoch)
        trainer.epoch(examples, client.rng("batches", 0, epoch), client.cap, "train the whole model in pages")
    if not trainer.batches:
        raise ValueError("no batch of two examples or more to train on")
    cascade.streamed.release()
    units = _save(client, cascade, item)
    moved = {"disk-read": pages.bytes_read, "disk-written": pages.bytes_written}
    shutil.rmtree(folder)
    metrics = client.evaluate(cascade.streamed.logits, client.validation, item.micro_batch)
    metrics |= {"train-loss": trainer.total_loss / trainer.seen, "predicted-peak": task.costs.get(item, 0)}
    return Update(units, metrics | moved, [item], [trainer.seen])


def _save(client: Client, cascade: PagedCascade, item: WorkItem) -> list[str]:
    """Write the pages to the store, one unit after another, and return the units."""
    units = [*(f"atoms.{atom}" for atom in item.atoms), item.head]
    for unit in units:
        client.store.save(unit, cascade.load_unit(unit), client.folder)
    return units
