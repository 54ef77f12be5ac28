"""What a trainer gets to work with, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from piecework.client_app.store import FeatureWriter, Store
from piecework.federated_data.datasets import ArrayDataset
from piecework.models.cascade import Blueprint, fit_features
from piecework.models.work_item import WorkItem
from piecework.training.accelerator import CPU
from piecework.training.examples import Examples, batches, feature_examples
from piecework.training.loop import Load, PieceModel, TrainingConfig, evaluate_examples, in_precision, load_for_device
from piecework.training.memory_cap import MemoryCap
from piecework.training.messages import Metrics
from piecework.training.randomness import generator
from piecework.training.settings import Settings

STAGES = -1  # a fill


@dataclass
class Client:
    """One client in one round. `budget` and what a cut may use, `allowed`, are bytes.

    `blueprint` is the network of its task, `full` the run's own model, of which that is a variant.
    `share(fill)` is its training share, augmented again for each fill; for STAGES alike in all rounds.
    """

    number: int
    round: int
    budget: int
    allowed: int
    settings: Settings
    data: ArrayDataset
    blueprint: Blueprint
    full: Blueprint
    store: Store
    cap: MemoryCap
    training_config: TrainingConfig
    share: Callable[[int], Examples]
    validation: Examples
    old_state: Path | None
    kept_round: int = 0
    device: torch.device = CPU
    _new_state: Path | None = field(default=None, repr=False)

    def rng(self, purpose: str, *parts: int) -> np.random.Generator:
        """A generator for a purpose in this round, on this client."""
        return generator(self.settings.seed, self.round, self.number, purpose, *parts)

    def new_state(self, *, anew: bool = False) -> Path:
        """The folder for what this client remembers after this round: with what it remembers now, or `anew` empty."""
        self._new_state = self._new_state or self.store.new_state(self.round, None if anew else self.old_state)
        return self._new_state

    def commit(self) -> None:
        """Make this round's state, if there is one, the newest."""
        if self._new_state is not None:
            self.store.commit_state(self._new_state, self.kept_round)

    def load(self) -> Load:
        """Units as the server sent them, or as they were trained since."""
        return load_for_device(self.blueprint, self.store.load, self.device)

    def save(self, piece: PieceModel) -> None:
        """Write a piece's units back to the store."""
        for unit, module in piece.units().items():
            self.store.save(unit, module)

    def evaluate(self, logits: Callable[[torch.Tensor], torch.Tensor], examples: Examples) -> Metrics:
        """Validation metrics of the model as it stands after training; nothing where there are no examples."""
        loss, correct, seen = evaluate_examples(
            in_precision(logits, self.training_config),
            examples,
            self.training_config.batch_size,
            self.rng("validate"),
            self.cap,
        )
        if not seen:
            return {}
        return {"val-loss": loss / seen, "val-accuracy": correct / seen, "val-examples": seen}

    @torch.no_grad()
    def stream(self, piece: PieceModel, examples: Examples, part: str, to: int | None) -> Examples:
        """The features that frozen atoms make of examples for atom `to`, or the head, batch by batch into a file of the store.

        The order is drawn again, so that batch statistics come from mixed batches; a last batch of one has none.
        """
        single = self.settings.batch_statistics and len(examples) % self.training_config.batch_size == 1
        labels, writer, forward = [], None, in_precision(piece.features, self.training_config)
        shape = self.blueprint.feature_shape if to is None else self.blueprint.shape_before(to)
        for positions in batches(
            len(examples), self.training_config.batch_size, self.rng(f"stream {part}"), drop_single=single
        ):
            with self.cap.first(f"stream {part}", len(positions)):
                z = fit_features(forward(examples.read(positions)), shape)
                block = (z.permute(0, 2, 3, 1) if z.dim() == 4 else z).contiguous().cpu().numpy()
            if writer is None:
                path = self.store.feature_path(part)
                writer = FeatureWriter(
                    path, len(examples) - single, block.shape[1:], self.settings.memory.feature_cache_bytes
                )
            writer.append(block)
            labels.append(examples.labels[positions])
            del z, block
        if writer is None:
            return Examples(examples.read, examples.labels[:0], self.device)
        return feature_examples(writer.close(), np.concatenate(labels)).on(self.device)


@dataclass(frozen=True)
class Update:
    """What a trainer gives back: the units to upload, metrics, the work items done, and on how many examples each was trained.

    An item that sees 50 examples in each of two epochs counts 100.
    """

    units: list[str]
    metrics: Metrics
    done: list[WorkItem]
    seen: list[int]


def fill_from(store: Store, folder: Path) -> Callable[[str, nn.Module], None]:
    """Fill units from a folder of the client's state."""
    return lambda unit, module: store.load(unit, module, folder)
