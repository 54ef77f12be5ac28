"""A cascade of which one piece is in memory at a time, and the inputs of pieces, in memory or in files.

Pieces that are not held are loaded in turn, the next one perhaps while one is computed. A forward pass keeps the input of each
piece; a backward pass then goes from the last piece to the first and computes each piece again. The result is the gradient of
the whole cascade; it takes twice the forward passes, but only ever the activations of one piece. Validation under attack and
paged training use the same cascade.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.training.ahead import Ahead
from piecework.training.loop import Load, PieceModel, classification_loss, in_precision
from piecework.training.pages import Pages, packed
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


class InPages:
    """Keeps inputs among the pages of a step."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._form: dict[int, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def put(self, number: int, z: Tensor) -> None:
        """Keep the input z[B, ...] of a piece."""
        z = packed(z)
        self.pages.write(f"input-{number}", [z])
        # not a tensor on torch's meta device, which imports its compiler
        self._form[number] = z.shape, z.stride(), z.dtype

    def take(self, number: int) -> Tensor:
        """Return the input of a piece, which is not needed again."""
        shape, strides, kind = self._form.pop(number)
        z = torch.empty_strided(shape, strides, dtype=kind, device=self.pages.device)
        self.pages.read(f"input-{number}", [z])
        return z


class StreamedCascade:
    """Pieces of a model in order, the last one with a head, in evaluation mode.

    With `held`, the weights of all pieces stay in memory; otherwise `load` loads them in turn. `inputs` keeps their inputs.
    With `ahead`, the pages from which `load` reads, the next piece is read while one is computed.
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
        ahead: Pages | None = None,
    ) -> None:
        self.blueprint, self.pieces, self.head, self.load, self.held = blueprint, list(pieces), head, load, held
        self.training_config, self.inputs = training_config, inputs
        self.piece_class, self.attacked = piece_class, False
        self.last = len(self.pieces) - 1
        self._loaded: dict[int, PieceModel] = {}
        self._ahead = Ahead(ahead or Pages(), self._read)
        self._reads_ahead = ahead is not None

    def _read(self, number: int) -> PieceModel:
        head = self.head if number == self.last else None
        piece = self.piece_class(self.blueprint, self.pieces[number], head, self.load)
        piece.train(False)
        for parameter in piece.parameters():
            parameter.requires_grad_(False)
        return piece

    def _piece(self, number: int, following: int | None) -> PieceModel:
        if number not in self._loaded:
            if not self.held:
                self._loaded.clear()  # frees the last piece before the next one is built
            self._loaded[number] = self._ahead.take(number)
        if self._reads_ahead and following is not None:
            self._ahead.begin(following)
        self._loaded[number].set_attacked(self.attacked)
        return self._loaded[number]

    def _last_input(self, z: Tensor, *, keep: bool) -> Tensor:
        for number in range(self.last):
            if keep:
                self.inputs.put(number, z)
            z = self._through(number, z, number + 1)
        return z

    def _through(self, number: int, z: Tensor, following: int | None = None) -> Tensor:
        """Return the output of a piece, which is logits for the last one. `following` is the piece that comes next."""
        piece = self._piece(number, following)
        return in_precision(piece.logits if number == self.last else piece.features, self.training_config)(z)

    def release(self) -> None:
        """Drop the weights that are in memory."""
        self._loaded.clear()

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return logits[B, classes] of x[B, ...]."""
        with self._ahead:
            return self._through(self.last, self._last_input(x, keep=False))

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the cross-entropy with labels y[B] with respect to x[B, ...]."""
        with self._ahead:
            return self._gradient(x, y)

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = self._last_input(x, keep=True)
        z = z.detach().requires_grad_()
        loss = classification_loss(self._through(self.last, z, self._before(self.last)), y)
        (gradient,) = torch.autograd.grad(loss, z)
        del loss
        for number in reversed(range(self.last)):
            z = self.inputs.take(number).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._through(number, z, self._before(number)), z, gradient)
        return gradient

    def _before(self, number: int) -> int | None:
        return number - 1 if number else None
