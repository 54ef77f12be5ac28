"""The input of a trainer (`Client`) and its result (`Update`)."""

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
from piecework.models.step import with_step
from piecework.models.work_item import WorkItem
from piecework.training.accelerator import CPU
from piecework.training.answers import Metrics
from piecework.training.examples import Examples, batches, feature_examples
from piecework.training.loop import Load, PieceModel, as_rows, in_precision, load_for_device
from piecework.training.memory_cap import MemoryCap
from piecework.training.randomness import generator
from piecework.training.scoring import evaluate_examples, parts_of
from piecework.training.settings import Settings
from piecework.training.sgd import TrainingConfig

FIXED_FILL = -1  # the fill of `local_data` that is the same in all rounds, for stored features


@dataclass
class Client:
    """One client in one round. `budget` is its memory in bytes, and `allowed` adds the excess that the settings tolerate.

    `blueprint` is the network of the task, a variant of the run's own model `full`. `local_data(fill)` returns the training
    examples, augmented again for each fill; FIXED_FILL gives the same examples in all rounds. `old_state` is the folder
    with the client's state of an earlier round, if there is one. `folder` holds the model that is trained, if that is not the
    task's: another one of the client's own. `available` is the memory (bytes) that a device found free, if it measures itself.
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
    available: int | None = None
    folder: Path | None = None
    _new_state: Path | None = field(default=None, repr=False)

    def rng(self, purpose: str, *parts: int) -> np.random.Generator:
        """Return a random generator for one purpose, seeded by the run, this round and this client."""
        return generator(self.settings.seed, self.round, self.number, purpose, *parts)

    def new_state(self, *, empty: bool = False) -> Path:
        """Return the folder for this client's state after this round: a copy of its present state, or `empty`."""
        self._new_state = self._new_state or self.store.new_state(self.round, None if empty else self.old_state)
        return self._new_state

    def commit(self) -> None:
        """Make this round's state the newest, if the trainer wrote one."""
        if self._new_state is not None:
            self.store.commit_state(self._new_state, self.kept_round)

    def load(self) -> Load:
        """Return a function that loads units from the store: as the server sent them, or as saved since."""
        return load_for_device(self.blueprint, fill_from(self.store, self.folder), self.device)

    def save(self, piece: PieceModel) -> None:
        """Write a piece's units back to the store."""
        for unit, module in piece.units().items():
            self.store.save(unit, module, self.folder)

    def config_of(self, item: WorkItem) -> TrainingConfig:
        """Return the training config with the step of a work item."""
        return with_step(self.training_config, item)

    def evaluate(self, logits: Callable[[torch.Tensor], torch.Tensor], examples: Examples, at_once: int = 0) -> Metrics:
        """Return loss, accuracy and number of examples for a function that computes logits; no metrics without examples.

        Batches are those of training, of which `at_once` examples are computed at once, by default all. A batch of one example
        is not evaluated.
        """
        loss, correct, seen = evaluate_examples(
            in_precision(logits, self.training_config),
            examples,
            self.training_config.batch_size,
            self.rng("validate"),
            self.cap,
            at_once,
        )
        if not seen:
            return {}
        return {"val-loss": loss / seen, "val-accuracy": correct / seen, "val-examples": seen}

    def stream(
        self, piece: PieceModel, examples: Examples, part: str, to: int | None, micro_batch: int = 0
    ) -> Examples:
        """Compute a piece's features of examples, as input for atom `to` or the head (None), and return them from a file.

        The examples are in a new random order, so that batch statistics come from mixed batches. These are as large as those of
        training, of which `micro_batch` examples are computed at once, by default all. If batch norms use batch statistics, a
        last batch of one example is dropped. `part` names the file.
        """
        size, rng = self.training_config.batch_size, self.rng(f"stream {part}")
        single = self.settings.batch_statistics and len(examples) % size == 1
        features = in_precision(piece.features, self.training_config)
        shape = self.blueprint.feature_shape if to is None else self.blueprint.shape_before(to)
        mixed = batches(len(examples), size, rng, drop_single=single)
        order = [positions for batch in mixed for positions in parts_of(batch, micro_batch)]
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
            lambda row: FeatureWriter(path, int(ends[-1]), row, limit, feature_kind(self.settings)),
            rounded=self.settings.memory.features == "bfloat16",
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
        *,
        rounded: bool = False,
    ) -> np.ndarray:
        """Write the output of `forward` for all examples to a file, batch by batch, and return it memory-mapped.

        Each entry of `reads` has the positions of a batch and the rows of the file for them; surplus positions at the end of a
        batch are not written. `open_file` gets the shape of a row, channels last. `forward` runs within `around(positions)`.
        With `rounded`, the file has the bits of bfloat16.
        """
        writer = None
        for positions, rows in reads:
            with self.cap.first(f"stream {part}", len(positions)), around(positions):
                block = as_rows(forward(examples.read(positions)), rounded=rounded).cpu().numpy()
            writer = writer or open_file(block.shape[1:])
            writer.put(rows, block[: len(rows)])
            del block
        assert writer is not None
        return writer.close()


@dataclass(frozen=True)
class Update:
    """The result of a trainer: the units to upload, metrics, and the work items done.

    `seen` is the number of examples that each item was trained on: 50 examples in each of two epochs count as 100.
    """

    units: list[str]
    metrics: Metrics
    done: list[WorkItem]
    seen: list[int]


def feature_kind(settings: Settings) -> type[np.generic]:
    """Return the type of the values in files of features: float32, or uint16 with the bits of bfloat16."""
    return np.uint16 if settings.memory.features == "bfloat16" else np.float32


def fill_from(store: Store, folder: Path | None) -> Callable[[str, nn.Module], None]:
    """Return a function that fills a unit's module from a folder of the client's state, or from the task's model."""
    return lambda unit, module: store.load(unit, module, folder)
