"""What a model scores on examples: its loss and its correct predictions."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from piecework.training.examples import Examples, batches
from piecework.training.loop import classification_loss
from piecework.training.memory_cap import MemoryCap


@torch.no_grad()
def evaluate_examples(
    logits: Callable[[Tensor], Tensor],
    examples: Examples,
    batch_size: int,
    rng: np.random.Generator,
    cap: MemoryCap,
    at_once: int = 0,
) -> tuple[float, int, int]:
    """Return the summed cross-entropy, the correct predictions and the examples seen.

    `at_once` examples of a batch are computed at once, by default all of it. A batch of one example is left out.
    """
    loss, correct, seen = 0.0, 0, 0
    for batch in batches(len(examples), batch_size, rng, drop_single=True):
        for positions in parts_of(batch, at_once):
            with cap.first("evaluate", len(positions)):
                found = score(logits(examples.read(positions)), examples.targets(positions))
                loss += float(found[0])
                correct += int(found[1])
            seen += len(positions)
    return loss, correct, seen


def score(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of logits[B, classes] with labels y[B], and the number of correct predictions."""
    return classification_loss(logits, y, "sum"), (predictions(logits) == y).sum()


def parts_of(positions: np.ndarray, at_once: int) -> list[np.ndarray]:
    """Cut positions[B] into parts of at most `at_once`, which differ by at most one, as a training step's; 0 = no cut."""
    return np.array_split(positions, -(-len(positions) // at_once)) if at_once else [positions]


def predictions(logits: Tensor) -> Tensor:
    """Return the predicted classes[B] of logits[B, classes]; for one logit, [B, 1], class 1 if it is positive."""
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)
