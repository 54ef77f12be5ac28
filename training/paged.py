"""A training step of a whole cascade of which one segment of atoms is in memory at a time: the plain step, bit for bit.

With the segments s = 1 .. S of a cascade, whose last one has the head, and the input z_1 = x of the first, a step

    for s = 1 .. S - 1:   reads the weights of s, computes z_{s+1} = f_s(z_s), keeps z_s and drops s
    for s = S:            reads the weights, computes the loss and its gradient g_S with respect to z_S
    for s = S - 1 .. 1:   reads the weights, computes f_s(z_s) again with the random numbers of the first time, and from
                          g_{s+1} the gradients of the weights and g_s

and moves each parameter as soon as its gradient is complete, with the optimiser's state of the pages. Weights, buffers and this
state are then written back. Buffers such as running statistics move once, in the second run. Micro-batches run inside a
segment: whole batches are kept between segments, and gradients add up within one.

MeBP (Song and Xu, 2025, arXiv 2510.03425) trains language models on phones like this; here segments are planned
(planning/page_plan.py) and every byte is counted.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.models.recompute_cheap import recompute_cheaply
from piecework.models.replayed_random import RandomState
from piecework.models.static_norms import count_first_alike
from piecework.training.adam import OPTIMISERS
from piecework.training.attacks import Gradient, Parts, micro_batches, pgd
from piecework.training.loop import Load, PieceModel, classification_loss
from piecework.training.pages import Pages
from piecework.training.sgd import TrainingConfig, stored_tensor
from piecework.training.streamed import InMemory, InPages, StreamedCascade

STATE = ".state"  # follows a parameter's name in that of the page with the optimiser's state of it


def segments_of(atoms: Sequence[int], training_config: TrainingConfig) -> list[Piece]:
    """Return the atoms of each segment of a paged step. Raises ValueError if they are not all atoms in order."""
    pages = training_config.pages
    if [0, *(last for _, last in pages)] != [*(first for first, _ in pages), len(atoms)]:
        raise ValueError(f"pages are {pages}: expected segments of all {len(atoms)} atoms, one after another")
    return [tuple(atoms[first:last]) for first, last in pages]


class PagedCascade:
    """Trains a cascade one segment at a time. `load` builds a unit with its first weights; `pages` has the later ones.

    Raises ValueError for a config with `clip_norm`, because clipping needs the norm of all gradients at once.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        atoms: Sequence[int],
        head: str,
        load: Load,
        training_config: TrainingConfig,
        pages: Pages,
        piece_class: type[PieceModel] = PieceModel,
    ) -> None:
        if training_config.clip_norm:
            raise ValueError(f"clip_norm = {training_config.clip_norm:g}: a paged step never has all gradients at once")
        self.blueprint, self.head, self.training_config, self.pages = blueprint, head, training_config, pages
        self.segments = segments_of(atoms, training_config)
        self.last, self.piece_class, self._load = len(self.segments) - 1, piece_class, load
        self.parts = micro_batches(training_config.micro_batch)
        self.young = training_config.attack is None  # attacks read running statistics, which must not change abruptly
        self._inputs = InPages(pages) if training_config.spilled else InMemory()
        # evaluates, and attacks, in evaluation mode
        self.streamed = StreamedCascade(
            blueprint,
            self.segments,
            head,
            self.load_unit,
            training_config,
            self._inputs,
            held=False,
            piece_class=piece_class,
        )

    def load_unit(self, unit: str) -> nn.Module:
        """Return a unit with its present weights."""
        module = self._load(unit)
        if self.pages.holds(unit):
            self.pages.read(unit, _state(module))
        return module

    def segment(self, number: int) -> PieceModel:
        """Return a segment in training mode, read from its pages."""
        self.streamed.release()
        piece = self.piece_class(
            self.blueprint, self.segments[number], self.head if number == self.last else None, self.load_unit
        )
        piece.train(True)
        piece.cheap = self.training_config.cheap
        if self.young:
            count_first_alike(piece.units().values())
        return piece

    def attack(
        self, x: Tensor, y: Tensor, seed: int, wrap: Callable[[Gradient], Gradient] = lambda gradient: gradient
    ) -> Tensor:
        """Return adversarial examples for x[B, ...], whose gradients page through the cascade; `wrap` may count them."""
        assert self.training_config.attack is not None
        generator, gradient = torch.Generator().manual_seed(seed), wrap(self.streamed.gradient)
        attacked = pgd(gradient, x, y, self.training_config.attack, generator, self.parts)
        self.streamed.release()
        return attacked

    def step(self, x: Tensor, y: Tensor, parts: Parts | None = None) -> Tensor:
        """Take a step on x[B, ...] with labels y[B]; return the detached loss. `parts` replaces the cut into micro-batches."""
        parts = parts or self.parts
        z, states = x, list[RandomState]()
        for number in range(self.last):
            if number:  # the caller holds x anyway
                self._inputs.put(number, z)
            states.append(RandomState(self.pages.device))
            z = self._forward(number, z, parts)
        loss, passed = self._learn(z, y, parts)
        del z
        for number in reversed(range(self.last)):
            with states.pop().restored():
                self._pass_back(number, self._inputs.take(number) if number else x, passed, parts)
        return loss

    def _forward(self, number: int, z: Tensor, parts: Parts) -> Tensor:
        piece, out, at = self.segment(number), None, 0
        for (part,) in parts(z):
            # not under no_grad, for which an LSTM has another kernel, with other rounding
            with self._precision(z), saved_tensors_hooks(_drop, _not_kept):
                found = piece.features(part).detach()
            if len(part) == len(z):
                return found
            out = _batch_like(found, len(z)) if out is None else out
            out[at : at + len(part)] = found
            at += len(part)
        assert out is not None
        return out

    def _learn(self, z: Tensor, y: Tensor, parts: Parts) -> tuple[Tensor, list[Tensor]]:
        """Move the last segment. Return the loss, and a list of the gradient with respect to the segment's input z[B, ...]."""
        piece = self.segment(self.last)
        self._move_when_complete(piece)
        total, upstream = None, _Upstream(z, needed=self.last > 0)
        for part, labels in parts(z, y):
            with self._precision(z), recompute_cheaply(piece.cheap):
                value = classification_loss(piece.logits(upstream.watch(part)), labels)
            if len(part) < len(z):
                value = value * (len(part) / len(z))
            value.backward()  # type: ignore[no-untyped-call]
            total = value.detach() if total is None else total + value.detach()
            del value
        self._write_back(piece)
        assert total is not None
        return total, upstream.taken

    def _pass_back(self, number: int, z: Tensor, passed: list[Tensor], parts: Parts) -> None:
        """Move a segment; `passed` has the gradient with respect to its output, and gets that with respect to its input."""
        piece = self.segment(number)
        self._move_when_complete(piece)
        upstream = _Upstream(z, needed=number > 0)
        for part, *incoming in parts(z, *passed):
            if len(part) == len(z):
                passed.clear()  # the backward pass frees it as soon as it can
            with self._precision(z), recompute_cheaply(piece.cheap):
                end = _Begin.apply(piece.features(upstream.watch(part)), incoming)
            if end.requires_grad:  # else the first segment has nothing to learn
                end.backward()
        self._write_back(piece)
        passed[:] = upstream.taken

    def _precision(self, z: Tensor) -> torch.autocast:
        return torch.autocast(z.device.type, torch.bfloat16, enabled=self.training_config.precision == "bfloat16")

    def _move_when_complete(self, piece: PieceModel) -> None:
        if self.training_config.micro_batch:
            return  # gradients add up first
        for name, parameter, decayed in _named(piece):
            hook = partial(self._move, name, decayed)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _move(self, name: str, decayed: bool, parameter: Tensor) -> None:
        """Move one parameter, with the optimiser's state of its page, and free its gradient."""
        assert isinstance(parameter, nn.Parameter)
        kind = self.piece_class.optimiser or OPTIMISERS[self.training_config.optimiser]
        optimiser = kind([parameter], self.training_config, [] if decayed else [parameter])
        state = [stored_tensor(held) for kept in optimiser.state().values() for held in kept]
        page = f"{name}{STATE}"
        if state and self.pages.holds(page):
            self.pages.read(page, state)
        optimiser.step()
        if state:
            self.pages.write(page, state)

    def _write_back(self, piece: PieceModel) -> None:
        if self.training_config.micro_batch:
            for name, parameter, decayed in _named(piece):
                if parameter.grad is not None:
                    self._move(name, decayed, parameter)
        piece.after_step()
        for unit, module in piece.units().items():
            self.pages.write(unit, _state(module))


class _Upstream:
    """The gradient of a segment with respect to its input z[B, ...], put together from those of micro-batches."""

    def __init__(self, z: Tensor, *, needed: bool) -> None:
        self.size, self.needed = len(z), needed
        self.taken: list[Tensor] = []
        self._at = 0

    def watch(self, part: Tensor) -> Tensor:
        """Return a micro-batch whose gradient is to be taken."""
        part = part.detach()
        return _Catch.apply(part.requires_grad_(), self) if self.needed else part

    def take(self, gradient: Tensor) -> None:
        """Take the gradient with respect to the next micro-batch."""
        if len(gradient) == self.size:
            self.taken.append(gradient)
            return
        if not self.taken:
            self.taken.append(_batch_like(gradient, self.size))
        self.taken[0][self._at : self._at + len(gradient)] = gradient
        self._at += len(gradient)


class _Catch(torch.autograd.Function):
    """Hands on a gradient as it arrives; as the `grad` of a leaf, it might be copied to another memory format."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor, upstream: _Upstream) -> Tensor:
        ctx.upstream = upstream  # type: ignore[attr-defined]
        return z.view_as(z)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[None, None]:
        ctx.upstream.take(gradients[0])  # type: ignore[attr-defined]
        return None, None


class _Begin(torch.autograd.Function):
    """Begins a backward pass with a gradient that nothing else holds; torch.autograd.backward would hold it to its end."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient  # type: ignore[attr-defined]
        return z.new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None  # type: ignore[attr-defined]


def _drop(_: Tensor) -> None:
    """Keep nothing for a backward pass."""


def _not_kept(_: None) -> Tensor:
    raise RuntimeError("the first run of a segment is not differentiated")


def _named(piece: PieceModel) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield the parameters that learn, each once, with their global names and whether weight decay applies to them."""
    undecayed = {id(parameter) for parameter in piece.list_undecayed()}
    for unit, module in piece.units().items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield f"{unit}.{name}", parameter, id(parameter) not in undecayed


def _state(module: nn.Module) -> list[Tensor]:
    return list(module.state_dict().values())


def _batch_like(part: Tensor, size: int) -> Tensor:
    """Return room for a batch in the format of a micro-batch."""
    channels_last = part.dim() == 4 and part.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((size, *part.shape[1:]), dtype=part.dtype, device=part.device, memory_format=layout)
