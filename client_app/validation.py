"""Evaluate a cascade, which may be too large to train at once, on a client's validation data, clean and under attack.

The attack is end to end, from images to logits. Its gradient is computed piece by piece (training/streamed.py). A client that
cannot hold the weights of all pieces reads each piece from its store in turn, and writes the inputs of pieces there.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count

import torch
from torch import Tensor

from piecework.client_app.client import Client
from piecework.models.partition import Piece
from piecework.training.answers import Metrics
from piecework.training.attacks import Attack, Gradient, pgd
from piecework.training.examples import Examples, batches
from piecework.training.loop import PieceModel
from piecework.training.memory_cap import has_plenty, pause_counting
from piecework.training.messages import Task
from piecework.training.pages import PageFiles
from piecework.training.scoring import parts_of, predictions, score
from piecework.training.streamed import InMemory, InPages, StreamedCascade


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
    inputs = InMemory() if held else InPages(PageFiles(client.store.task, cached=has_plenty()))
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
