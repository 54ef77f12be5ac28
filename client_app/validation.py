"""How a cascade that a client may not train at once does on the client's own validation data, clean and under attack.

The attack is end to end, from images to logits. Its gradient comes through the pieces one after another: forward, keeping what
goes into each piece, then back from the last to the first, each piece computed again. That is the gradient of the whole cascade
for twice the forward passes, and never needs the activations of more than a piece. A client that cannot hold all weights beside
them reads each piece from its store when it is its turn, and writes what goes into it there.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from math import ceil, prod

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


class StreamedCascade:
    """Pieces of a client's model in order, the last one with a head, in evaluation mode; with `held`, all stay in memory."""

    def __init__(
        self,
        client: Client,
        pieces: Sequence[Piece],
        head: str,
        *,
        held: bool,
        piece_class: type[PieceModel] = PieceModel,
    ) -> None:
        self.client, self.pieces, self.head, self.held = client, list(pieces), head, held
        self.piece_class, self.attacked = piece_class, False
        self.last = len(self.pieces) - 1
        self._loaded: dict[int, PieceModel] = {}
        self._inputs: dict[int, Tensor] = {}

    def _piece(self, number: int) -> PieceModel:
        if number not in self._loaded:
            if not self.held:
                self._loaded.clear()  # before the next one is built
            head = self.head if number == self.last else None
            piece = self.piece_class(self.client.blueprint, self.pieces[number], head, self.client.load())
            piece.train(False)
            for parameter in piece.parameters():
                parameter.requires_grad_(False)
            self._loaded[number] = piece
        self._loaded[number].set_attacked(self.attacked)
        return self._loaded[number]

    def _keep(self, number: int, z: Tensor) -> None:
        """Keep what goes into a piece, in the memory format that it has."""
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
        """What a piece makes of its input: logits where it is the last."""
        piece = self._piece(number)
        return in_precision(piece.logits if number == self.last else piece.features, self.client.training_config)(z)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Logits[B, classes] of x[B, ...]."""
        return self._through(self.last, self._last_input(x, keep=False))

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of the cross-entropy by x."""
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


def held_bytes(client: Client, pieces: Sequence[Piece]) -> int:
    """Bytes of the weights of all pieces, and of what goes into each for a batch: what `held` takes besides a piece at work."""
    inputs = sum(prod(client.blueprint.shape_before(piece[0])) for piece in pieces)
    return sum(weight_bytes(client, piece) for piece in pieces) + 4 * batch_size(client) * inputs


def piece_bytes(client: Client, piece: Piece, cost: int) -> int:
    """At most what a piece takes to validate whose training step takes `cost` bytes.

    A small validation set fills only a part of a batch. What does not go with the batch is less than twice the weights: a
    layer's may be copied for its backward pass, and there are neither gradients of weights nor momentum.
    """
    weights = weight_bytes(client, piece)
    by_batch = max(0, cost - weights) * batch_size(client) / client.training_config.batch_size
    return min(cost, 2 * weights + ceil(by_batch))


def weight_bytes(client: Client, piece: Piece) -> int:
    """Of the files of a piece's atoms."""
    return sum((client.store.model / f"atoms.{atom}.safetensors").stat().st_size for atom in piece)


def batch_size(client: Client) -> int:
    """Images of the largest batch that is validated at once."""
    return min(client.training_config.batch_size, len(client.validation))


def validate(
    client: Client,
    pieces: Sequence[Piece],
    head: str,
    attack: Attack,
    *,
    held: bool,
    piece_class: type[PieceModel] = PieceModel,
) -> Metrics:
    """Loss and accuracy on the client's validation data, and accuracy under the attack; nothing where there are none.

    `held`: the weights of all pieces stay in memory.
    """
    cascade = StreamedCascade(client, pieces, head, held=held, piece_class=piece_class)
    examples, rng = client.validation, client.rng("validate")
    loss, correct, robust, seen = 0.0, 0, 0, 0
    alone = client.settings.batch_statistics  # an example alone has no statistics
    for positions in batches(len(examples), client.training_config.batch_size, rng, drop_single=alone):
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
    """The same gradient, of which only the first run is counted: attack steps are all alike, and counting takes longer than
    small models do.
    """
    runs = count()

    def again(z: Tensor, y: Tensor) -> Tensor:
        with uncounted() if next(runs) else nullcontext():
            return gradient(z, y)

    return again


def evaluate_whole(_: Task, client: Client) -> Metrics:
    """Loss and accuracy of the whole model on the client's validation data, streamed atom by atom."""
    return evaluate_cascade(client, range(len(client.blueprint.atoms)))


def evaluate_cascade(client: Client, atoms: Sequence[int]) -> Metrics:
    """Loss and accuracy of these atoms and the model's head on the client's validation data, one atom in memory at a time."""
    examples = behind(client, client.validation, atoms[:-1], atoms[-1], "evaluate")
    piece = PieceModel(client.blueprint, atoms[-1:], "head", client.load())
    piece.train(False)
    return client.evaluate(piece.logits, examples)


def behind(client: Client, examples: Examples, atoms: Sequence[int], to: int | None, part: str) -> Examples:
    """What atoms in evaluation mode make of examples for the atom `to`, or the head; one is in memory at a time."""
    piece = None
    for atom, following in zip(atoms, [*atoms, to][1:], strict=True):
        del piece  # before the next one is built
        piece = PieceModel(client.blueprint, [atom], None, client.load())
        piece.train(False)
        examples = client.stream(piece, examples, f"{part}-{atom}", following)
    return examples
