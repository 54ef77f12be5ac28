"""Evaluate a cascade, which may be too large to train at once, on a client's validation data, clean and under attack.

The attack is end to end, from images to logits. Its gradient is computed piece by piece. A forward pass keeps the input of each
piece. The backward pass then goes from the last piece to the first and computes each piece again. The result is the gradient of
the whole cascade; it takes twice the forward passes, but only ever the activations of one piece. A client that cannot hold the
weights of all pieces beside them reads each piece from its store in turn, and writes the inputs of pieces there.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from math import ceil, prod
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from piecework.client_app.client import Client
from piecework.models.partition import Piece
from piecework.training.accelerator import to_device
from piecework.training.attacks import Attack, Gradient, pgd
from piecework.training.examples import Examples, batches
from piecework.training.loop import PieceModel, classification_loss, in_precision, predictions
from piecework.training.memory_cap import uncounted
from piecework.training.messages import Metrics, Task
from piecework.training.sgd import Segment


class StreamedCascade:
    """Pieces of a client's model in order, the last one with a head, in evaluation mode.

    With `held`, the weights of all pieces and their inputs stay in memory; otherwise they are read from the store in turn.
    `recompute` are the segments of pieces that are run again.
    """

    def __init__(
        self,
        client: Client,
        pieces: Sequence[Piece],
        head: str,
        *,
        held: bool,
        piece_class: type[PieceModel] = PieceModel,
        recompute: Mapping[Piece, tuple[Segment, ...]] = MappingProxyType({}),
    ) -> None:
        self.client, self.pieces, self.head, self.held = client, list(pieces), head, held
        self.piece_class, self.attacked, self.recompute = piece_class, False, recompute
        self.last = len(self.pieces) - 1
        self._loaded: dict[int, PieceModel] = {}
        self._inputs: dict[int, Tensor] = {}

    def _piece(self, number: int) -> PieceModel:
        if number not in self._loaded:
            if not self.held:
                self._loaded.clear()  # frees the last piece before the next one is built
            head = self.head if number == self.last else None
            piece = self.piece_class(self.client.blueprint, self.pieces[number], head, self.client.load())
            piece.train(False)
            piece.recompute = self.recompute.get(self.pieces[number], ())
            for parameter in piece.parameters():
                parameter.requires_grad_(False)
            self._loaded[number] = piece
        self._loaded[number].set_attacked(self.attacked)
        return self._loaded[number]

    def _keep(self, number: int, z: Tensor) -> None:
        """Keep the input of a piece. On disk, maps are channels last, which is their memory format."""
        if self.held:
            self._inputs[number] = z
        else:
            np.save(self._path(number), (z.permute(0, 2, 3, 1) if z.dim() == 4 else z).contiguous().cpu().numpy())

    def _kept(self, number: int) -> Tensor:
        if self.held:
            return self._inputs.pop(number)
        z = to_device(torch.from_numpy(np.load(self._path(number), allow_pickle=False)), self.client.device)
        return z.permute(0, 3, 1, 2) if z.dim() == 4 else z

    def _path(self, number: int) -> str:
        return str(self.client.store.task / f"input-{number}.npy")

    def _last_input(self, z: Tensor, *, keep: bool) -> Tensor:
        for number in range(self.last):
            if keep:
                self._keep(number, z)
            z = self._through(number, z)
        return z

    def _through(self, number: int, z: Tensor) -> Tensor:
        """Return the output of a piece, which is logits for the last one."""
        piece = self._piece(number)
        return in_precision(piece.logits if number == self.last else piece.features, self.client.training_config)(z)

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
            z = self._kept(number).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._through(number, z), z, gradient)
        return gradient


def held_bytes(client: Client, pieces: Sequence[Piece], micro_batch: int = 0) -> int:
    """Return the bytes that `held` takes besides the running piece: all weights, and the inputs of all pieces for a batch."""
    inputs = sum(prod(client.blueprint.shape_before(piece[0])) for piece in pieces)
    return sum(weight_bytes(client, piece) for piece in pieces) + 4 * batch_size(client, micro_batch) * inputs


def piece_bytes(client: Client, piece: Piece, cost: int, micro_batch: int = 0) -> int:
    """Return an upper bound of the bytes for validating a piece whose training step takes `cost` bytes.

    Both compute `micro_batch` examples at once, by default a batch of training.

    A small validation set fills only a part of a batch. The memory that does not grow with the batch is less than twice the
    weights: a layer's weights may be copied for its backward pass, and there are neither gradients of weights nor momentum.
    """
    weights = weight_bytes(client, piece)
    size = micro_batch or client.training_config.batch_size
    by_batch = max(0, cost - weights) * batch_size(client, micro_batch) / size
    return min(cost, 2 * weights + ceil(by_batch))


def weight_bytes(client: Client, piece: Piece) -> int:
    """Return the bytes of the files of a piece's atoms in the store."""
    return sum(path.stat().st_size for path in client.store.files(f"atoms.{atom}" for atom in piece))


def batch_size(client: Client, micro_batch: int = 0) -> int:
    """Return the number of examples in the largest validation batch."""
    return min(micro_batch or client.training_config.batch_size, len(client.validation))


def validate(
    client: Client,
    pieces: Sequence[Piece],
    head: str,
    attack: Attack,
    *,
    held: bool,
    piece_class: type[PieceModel] = PieceModel,
    micro_batch: int = 0,
    recompute: Mapping[Piece, tuple[Segment, ...]] = MappingProxyType({}),
) -> Metrics:
    """Return loss and accuracy on the client's validation data, and accuracy under the attack; no metrics without data.

    With `held`, the weights of all pieces stay in memory. `micro_batch` examples are computed at once, by default a batch, and
    the segments of pieces in `recompute` are run again for the attack's gradients.
    """
    cascade = StreamedCascade(client, pieces, head, held=held, piece_class=piece_class, recompute=recompute)
    examples, rng = client.validation, client.rng("validate")
    loss, correct, robust, seen = 0.0, 0, 0, 0
    alone = client.settings.batch_statistics  # a batch of one example has no batch statistics
    size = micro_batch or client.training_config.batch_size
    for positions in batches(len(examples), size, rng, drop_single=alone):
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        with client.cap.first("validate", len(positions)):
            x, y = examples.read(positions), examples.targets(positions)
            cascade.attacked = False
            clean = cascade.logits(x)
            loss += float(classification_loss(clean, y, "sum"))
            correct += int((predictions(clean) == y).sum())
            cascade.attacked = True
            attacked = cascade.logits(pgd(counted_once(cascade.gradient), x, y, attack, generator))
            robust += int((predictions(attacked) == y).sum())
        seen += len(positions)
    if not seen:
        return {}
    return {
        "val-loss": loss / seen,
        "val-accuracy": correct / seen,
        "val-adversarial-accuracy": robust / seen,
        "val-examples": seen,
    }


def counted_once(gradient: Gradient) -> Gradient:
    """Return the gradient function with only its first run in the memory accounting.

    All steps of an attack use the same memory, and counting takes longer than a small model itself.
    """
    runs = count()

    def again(z: Tensor, y: Tensor) -> Tensor:
        with uncounted() if next(runs) else nullcontext():
            return gradient(z, y)

    return again


def evaluate_whole(_: Task, client: Client) -> Metrics:
    """Return loss and accuracy of the whole model on the client's validation data, with one atom in memory at a time."""
    return evaluate_cascade(client, range(len(client.blueprint.atoms)))


def evaluate_cascade(client: Client, atoms: Sequence[int]) -> Metrics:
    """Return loss and accuracy of these atoms and the model's head on the validation data; one atom is in memory at a time."""
    examples = behind(client, client.validation, atoms[:-1], atoms[-1], "evaluate")
    piece = PieceModel(client.blueprint, atoms[-1:], "head", client.load())
    piece.train(False)
    return client.evaluate(piece.logits, examples)


def behind(client: Client, examples: Examples, atoms: Sequence[int], to: int | None, part: str) -> Examples:
    """Return the features of examples behind atoms in evaluation mode, for the atom `to` or the head (None).

    One atom is in memory at a time. `part` names the feature files.
    """
    piece = None
    for atom, following in zip(atoms, [*atoms, to][1:], strict=True):
        del piece  # frees the last piece before the next one is built
        piece = PieceModel(client.blueprint, [atom], None, client.load())
        piece.train(False)
        examples = client.stream(piece, examples, f"{part}-{atom}", following)
    return examples
