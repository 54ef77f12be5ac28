"""Evaluate a cascade, which may be too large to train at once, on a client's validation data, clean and under attack.

The attack is end to end, from images to logits. Its gradient is computed piece by piece. A forward pass keeps the input of each
piece. The backward pass then goes from the last piece to the first and computes each piece again. The result is the gradient of
the whole cascade; it takes twice the forward passes, but only ever the activations of one piece. A client that cannot hold the
weights of all pieces beside them reads each piece from its store in turn, and writes the inputs of pieces there.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from piecework.client_app.client import Client
from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.training.accelerator import to_device
from piecework.training.answers import Metrics
from piecework.training.attacks import Attack, Gradient, pgd
from piecework.training.examples import Examples, batches
from piecework.training.loop import Load, PieceModel, as_rows, classification_loss, in_precision
from piecework.training.memory_cap import pause_counting
from piecework.training.messages import Task
from piecework.training.scoring import parts_of, predictions, score
from piecework.training.sgd import TrainingConfig


class Inputs(Protocol):
    """Keeps the inputs of pieces from the forward pass to the backward pass."""

    def put(self, number: int, z: Tensor) -> None:
        """Keep the input z[B, ...] of a piece."""

    def take(self, number: int) -> Tensor:
        """Return the input of a piece, which is not needed again."""


class InMemory:
    """Keeps inputs in memory."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def put(self, number: int, z: Tensor) -> None:
        """Keep the input z[B, ...] of a piece."""
        self._kept[number] = z

    def take(self, number: int) -> Tensor:
        """Return the input of a piece, which is not needed again."""
        return self._kept.pop(number)


class OnDisk:
    """Keeps inputs in files of a folder, for a device. In the files, maps are channels last, which is their memory format."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device

    def put(self, number: int, z: Tensor) -> None:
        """Keep the input z[B, ...] of a piece."""
        np.save(self._path(number), as_rows(z, rounded=False).cpu().numpy())

    def take(self, number: int) -> Tensor:
        """Return the input of a piece, which is not needed again."""
        z = to_device(torch.from_numpy(np.load(self._path(number), allow_pickle=False)), self.device)
        return z.permute(0, 3, 1, 2) if z.dim() == 4 else z

    def _path(self, number: int) -> str:
        return str(self.folder / f"input-{number}.npy")


class StreamedCascade:
    """Pieces of a model in order, the last one with a head, in evaluation mode.

    With `held`, the weights of all pieces stay in memory; otherwise `load` loads them in turn. `inputs` keeps their inputs.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        pieces: Sequence[Piece],
        head: str,
        load: Load,
        training_config: TrainingConfig,
        inputs: Inputs,
        *,
        held: bool,
        piece_class: type[PieceModel] = PieceModel,
    ) -> None:
        self.blueprint, self.pieces, self.head, self.load, self.held = blueprint, list(pieces), head, load, held
        self.training_config, self.inputs = training_config, inputs
        self.piece_class, self.attacked = piece_class, False
        self.last = len(self.pieces) - 1
        self._loaded: dict[int, PieceModel] = {}

    def _piece(self, number: int) -> PieceModel:
        if number not in self._loaded:
            if not self.held:
                self._loaded.clear()  # frees the last piece before the next one is built
            head = self.head if number == self.last else None
            piece = self.piece_class(self.blueprint, self.pieces[number], head, self.load)
            piece.train(False)
            for parameter in piece.parameters():
                parameter.requires_grad_(False)
            self._loaded[number] = piece
        self._loaded[number].set_attacked(self.attacked)
        return self._loaded[number]

    def _last_input(self, z: Tensor, *, keep: bool) -> Tensor:
        for number in range(self.last):
            if keep:
                self.inputs.put(number, z)
            z = self._through(number, z)
        return z

    def _through(self, number: int, z: Tensor) -> Tensor:
        """Return the output of a piece, which is logits for the last one."""
        piece = self._piece(number)
        return in_precision(piece.logits if number == self.last else piece.features, self.training_config)(z)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return logits[B, classes] of x[B, ...]."""
        return self._through(self.last, self._last_input(x, keep=False))

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the cross-entropy with labels y[B] with respect to x[B, ...]."""
        with torch.no_grad():
            z = self._last_input(x, keep=True)
        z = z.detach().requires_grad_()
        loss = classification_loss(self._through(self.last, z), y)
        (gradient,) = torch.autograd.grad(loss, z)
        del loss
        for number in reversed(range(self.last)):
            z = self.inputs.take(number).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._through(number, z), z, gradient)
        return gradient


def attack_batch(
    cascade: StreamedCascade, x: Tensor, y: Tensor, attack: Attack, generator: torch.Generator, gradient: Gradient
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed cross-entropy of x[B, ...] with labels y[B], and the correct predictions, clean and attacked.

    `gradient` is that of the cascade.
    """
    cascade.attacked = False
    clean = cascade.logits(x)
    loss, correct = score(clean, y)
    cascade.attacked = True
    attacked = cascade.logits(pgd(gradient, x, y, attack, generator))
    return loss, correct, (predictions(attacked) == y).sum()


def cascade_of(
    client: Client, pieces: Sequence[Piece], head: str, *, held: bool, piece_class: type[PieceModel] = PieceModel
) -> StreamedCascade:
    """Return pieces of a client's model, of which those that are not `held` are in its store, as are their inputs."""
    inputs = InMemory() if held else OnDisk(client.store.task, client.device)
    load, training_config = client.load(), client.training_config
    return StreamedCascade(
        client.blueprint, pieces, head, load, training_config, inputs, held=held, piece_class=piece_class
    )


def validate(client: Client, cascade: StreamedCascade, attack: Attack, at_once: int = 0) -> Metrics:
    """Return loss and accuracy on the client's validation data, and accuracy under the attack; no metrics without data.

    `at_once` examples of a batch are computed at once, by default all. The attack starts at the same places.
    """
    examples, rng = client.validation, client.rng("validate")
    loss, correct, robust, seen = 0.0, 0, 0, 0
    alone = client.settings.batch_statistics  # a batch of one example has no batch statistics
    for batch in batches(len(examples), client.training_config.batch_size, rng, drop_single=alone):
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        for positions in parts_of(batch, at_once):
            with client.cap.first("validate", len(positions)):
                x, y = examples.read(positions), examples.targets(positions)
                found = attack_batch(cascade, x, y, attack, generator, count_once(cascade.gradient))
            loss, correct, robust = loss + float(found[0]), correct + int(found[1]), robust + int(found[2])
        seen += len(batch)
    if not seen:
        return {}
    return {
        "val-loss": loss / seen,
        "val-accuracy": correct / seen,
        "val-adversarial-accuracy": robust / seen,
        "val-examples": seen,
    }


def count_once(gradient: Gradient) -> Gradient:
    """Return the gradient function with only its first run in the memory accounting.

    All steps of an attack use the same memory, and counting takes longer than a small model itself.
    """
    runs = count()

    def again(z: Tensor, y: Tensor) -> Tensor:
        with pause_counting() if next(runs) else nullcontext():
            return gradient(z, y)

    return again


def evaluate_whole(task: Task, client: Client) -> Metrics:
    """Return loss and accuracy of the whole model on the client's validation data, with one atom in memory at a time."""
    return evaluate_cascade(task, client, range(len(client.blueprint.atoms)))


def evaluate_cascade(task: Task, client: Client, atoms: Sequence[int]) -> Metrics:
    """Return loss and accuracy of these atoms and the model's head on the validation data; one atom is in memory at a time.

    Raises MemoryBudgetExceededError if no step that the task lists fits.
    """
    if not len(client.validation):
        return {}
    step = task.choose_evaluation(client.allowed, "evaluating the model, one atom at a time,")
    examples = behind(client, client.validation, atoms[:-1], atoms[-1], "evaluate", step.examples)
    piece = PieceModel(client.blueprint, atoms[-1:], "head", client.load())
    piece.train(False)
    return client.evaluate(piece.logits, examples, step.examples) | {"predicted-peak": step.bytes}


def behind(
    client: Client, examples: Examples, atoms: Sequence[int], to: int | None, part: str, at_once: int = 0
) -> Examples:
    """Return the features of examples behind atoms in evaluation mode, for the atom `to` or the head (None).

    One atom is in memory at a time, and computes `at_once` examples at once, by default a batch. `part` names the feature
    files.
    """
    piece = None
    for atom, following in zip(atoms, [*atoms, to][1:], strict=True):
        del piece  # frees the last piece before the next one is built
        piece = PieceModel(client.blueprint, [atom], None, client.load())
        piece.train(False)
        examples = client.stream(piece, examples, f"{part}-{atom}", following, at_once)
    return examples
