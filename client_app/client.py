"""What a trainer gets to work with, and what it gives back."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
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
    `local_data(fill)` are its training examples, augmented again for each fill; for STAGES alike in all rounds.
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
    local_data: Callable[[int], Examples]
    validation: Examples
    old_state: Path | None
    kept_round: int = 0
    device: torch.device = CPU
    _new_state: Path | None = field(default=None, repr=False)

    def rng(self, purpose: str, *parts: int) -> np.random.Generator:
        """A generator for a purpose in this round, on this client."""
        return generator(self.settings.seed, self.round, self.number, purpose, *parts)

    def new_state(self, *, empty: bool = False) -> Path:
        """The folder for what this client remembers after this round: with what it remembers now, or `empty`."""
        self._new_state = self._new_state or self.store.new_state(self.round, None if empty else self.old_state)
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

    def stream(self, piece: PieceModel, examples: Examples, part: str, to: int | None) -> Examples:
        """Return the features that frozen atoms make of examples for atom `to`, or the head, in a file of the store.

        The order is drawn again, so that batch statistics come from mixed batches; a last batch of one has none.
        """
        size, rng = self.training_config.batch_size, self.rng(f"stream {part}")
        single = self.settings.batch_statistics and len(examples) % size == 1
        features = in_precision(piece.features, self.training_config)
        shape = self.blueprint.feature_shape if to is None else self.blueprint.shape_before(to)
        order = list(batches(len(examples), size, rng, drop_single=single))
        if not order:
            return Examples(examples.read, examples.labels[:0], self.device)
        ends = np.cumsum([len(positions) for positions in order])
        reads = [(positions, np.arange(end - len(positions), end)) for positions, end in zip(order, ends, strict=True)]
        path, limit = self.store.feature_path(part), self.settings.memory.feature_cache_bytes
        rows = self.write_features(
            part,
            lambda inputs: fit_features(features(inputs), shape),
            examples,
            reads,
            lambda row: FeatureWriter(path, int(ends[-1]), row, limit),
        )
        return feature_examples(rows, examples.labels[np.concatenate(order)]).on(self.device)

    @torch.no_grad()
    def write_features(
        self,
        part: str,
        forward: Callable[[torch.Tensor], torch.Tensor],
        examples: Examples,
        reads: Iterable[tuple[np.ndarray, np.ndarray]],
        open_file: Callable[[tuple[int, ...]], FeatureWriter],
        around: Callable[[np.ndarray], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> np.ndarray:
        """Return what frozen atoms make of examples, in a file; one batch at a time is in memory.

        A batch of `reads` has the positions that are read together, and the rows of the file for the first of them. `open_file`
        gets the shape of a row, channels last. The atoms run within `around(positions)`.
        """
        writer = None
        for positions, rows in reads:
            with self.cap.first(f"stream {part}", len(positions)), around(positions):
                z = forward(examples.read(positions))
                block = (z.permute(0, 2, 3, 1) if z.dim() == 4 else z).contiguous().cpu().numpy()
            writer = writer or open_file(block.shape[1:])
            writer.put(rows, block[: len(rows)])
            del z, block
        assert writer is not None
        return writer.close()


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
