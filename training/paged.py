"""A training step of a whole cascade of which one segment of atoms is in memory at a time: the plain step, bit for bit.

With the segments s = 1 .. S of a cascade, whose last one has the head, and the input z_1 = x of the first, a step

    for s = 1 .. S - 1:   reads the weights of s, computes z_{s+1} = f_s(z_s), keeps z_s and drops s
    for s = S:            reads the weights, computes the loss and its gradient g_S with respect to z_S
    for s = S - 1 .. 1:   reads the weights, computes f_s(z_s) again with the random numbers of the first time, and from
                          g_{s+1} the gradients of the weights and g_s

and moves each parameter as soon as its gradient is complete, with the optimiser's state of the pages. Weights, buffers and this
state are then written back. Buffers such as running statistics move once, in the second run. Micro-batches run inside a
segment: whole batches are kept between segments, and gradients add up within one.

A step may read ahead: while one segment is computed, a second thread reads the next one, in the second half with all the
optimiser's state that it will move. Two segments are in memory then, from a moment that does not depend on the disk.

MeBP (Song and Xu, 2025, arXiv 2510.03425) trains language models on phones like this; here segments are planned
(planning/page_plan.py) and every byte is counted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from piecework.training.ahead import Ahead
from piecework.training.attacks import Gradient, Parts, micro_batches, pgd
from piecework.training.loop import Load, PieceModel, classification_loss
from piecework.training.pages import Pages
from piecework.training.sgd import SGD, TrainingConfig, stored_tensor
from piecework.training.streamed import InMemory, InPages, StreamedCascade
from piecework.training.upstream import Begin, Upstream, batch_like

STATE = ".state"  # follows a parameter's name in that of the page with the optimiser's state of it


def segments_of(atoms: Sequence[int], training_config: TrainingConfig) -> list[Piece]:
    """Return the atoms of each segment of a paged step. Raises ValueError if they are not all atoms in order."""
    pages = training_config.pages
    if [0, *(last for _, last in pages)] != [*(first for first, _ in pages), len(atoms)]:
        raise ValueError(f"pages are {pages}: expected segments of all {len(atoms)} atoms, one after another")
    return [tuple(atoms[first:last]) for first, last in pages]


@dataclass(frozen=True)
class Loaded:
    """A segment in memory. `ready` has optimisers that were read ahead, by the names of their parameters, until they move."""

    piece: PieceModel
    ready: dict[str, SGD]


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
            ahead=pages if training_config.ahead else None,
        )
        self._ahead = Ahead(pages, self._read)
        self._ready: dict[str, SGD] = {}  # those of the segment that moves

    def load_unit(self, unit: str) -> nn.Module:
        """Return a unit with its present weights."""
        module = self._load(unit)
        if self.pages.holds(unit):
            self.pages.read(unit, _state(module))
        return module

    def _read(self, key: tuple[int, bool]) -> Loaded:
        """Return a segment by its number and whether it moves; with the optimiser's state if the step reads ahead."""
        number, moves = key
        head = self.head if number == self.last else None
        piece = self.piece_class(self.blueprint, self.segments[number], head, self.load_unit)
        moving = _named(piece) if self.training_config.ahead and moves else ()
        return Loaded(piece, {name: self._optimiser(name, parameter, decayed) for name, parameter, decayed in moving})

    def _take(self, number: int, *, moves: bool) -> Loaded:
        """Return a segment in training mode, read from its pages, and begin to read the one that comes after it."""
        self.streamed.release()
        loaded = self._ahead.take((number, moves))
        self._ready = loaded.ready
        loaded.piece.train(True)
        # a run that is not differentiated would keep something
        loaded.piece.cheap = self.training_config.cheap and moves
        if self.young:
            count_first_alike(loaded.piece.units().values())
        following = number - 1 if moves else number + 1
        if self.training_config.ahead and following >= 0:
            self._ahead.begin((following, moves or following == self.last))
        return loaded

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
        try:
            with self._ahead:
                return self._step(x, y, parts or self.parts)
        finally:
            self._ready.clear()  # after an error, hooks would hold these optimisers, whose parameters hold the hooks

    def _step(self, x: Tensor, y: Tensor, parts: Parts) -> Tensor:
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
        piece, out, at = self._take(number, moves=False).piece, None, 0
        for (part,) in parts(z):
            # not under no_grad, for which an LSTM has another kernel, with other rounding
            with self._precision(), saved_tensors_hooks(_drop, _not_kept):
                found = piece.features(part).detach()
            if len(part) == len(z):
                return found
            out = batch_like(found, len(z)) if out is None else out
            out[at : at + len(part)] = found
            at += len(part)
        assert out is not None
        return out

    def _learn(self, z: Tensor, y: Tensor, parts: Parts) -> tuple[Tensor, list[Tensor]]:
        """Move the last segment. Return the loss, and a list of the gradient with respect to the segment's input z[B, ...]."""
        loaded = self._take(self.last, moves=True)
        self._move_when_complete(loaded)
        total, upstream = None, Upstream(z, needed=self.last > 0)
        for part, labels in parts(z, y):
            with self._precision(), recompute_cheaply(loaded.piece.cheap):
                value = classification_loss(loaded.piece.logits(upstream.watch(part)), labels)
            if len(part) < len(z):
                value = value * (len(part) / len(z))
            value.backward()  # type: ignore[no-untyped-call]
            total = value.detach() if total is None else total + value.detach()
            del value
        self._write_back(loaded)
        assert total is not None
        return total, upstream.taken

    def _pass_back(self, number: int, z: Tensor, passed: list[Tensor], parts: Parts) -> None:
        """Move a segment; `passed` has the gradient with respect to its output, and gets that with respect to its input."""
        loaded = self._take(number, moves=True)
        self._move_when_complete(loaded)
        upstream = Upstream(z, needed=number > 0)
        for part, *incoming in parts(z, *passed):
            if len(part) == len(z):
                passed.clear()  # the backward pass frees it as soon as it can
            with self._precision(), recompute_cheaply(loaded.piece.cheap):
                end = Begin.apply(loaded.piece.features(upstream.watch(part)), incoming)
            if end.requires_grad:  # else the first segment has nothing to learn
                end.backward()
        self._write_back(loaded)
        passed[:] = upstream.taken

    def _precision(self) -> torch.autocast:
        return torch.autocast(
            self.pages.device.type, torch.bfloat16, enabled=self.training_config.precision == "bfloat16"
        )

    def _move_when_complete(self, loaded: Loaded) -> None:
        if self.training_config.micro_batch:
            return  # gradients add up first
        for name, parameter, decayed in _named(loaded.piece):
            hook = partial(self._move, loaded.ready, name, decayed)  # not `loaded`, which has the parameter
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _optimiser(self, name: str, parameter: nn.Parameter, decayed: bool) -> SGD:
        """Return a parameter's optimiser, with the state of its page."""
        kind = self.piece_class.optimiser or OPTIMISERS[self.training_config.optimiser]
        optimiser = kind([parameter], self.training_config, [] if decayed else [parameter])
        if (state := _kept(optimiser)) and self.pages.holds(page := _page(name)):
            self.pages.read(page, state)
        return optimiser

    def _move(self, ready: dict[str, SGD], name: str, decayed: bool, parameter: Tensor) -> None:
        """Move one parameter, free its gradient, and write the optimiser's state to its page."""
        assert isinstance(parameter, nn.Parameter)
        optimiser = ready.pop(name, None) or self._optimiser(name, parameter, decayed)
        optimiser.step()
        if state := _kept(optimiser):
            self.pages.write(_page(name), state)

    def _write_back(self, loaded: Loaded) -> None:
        if self.training_config.micro_batch:
            for name, parameter, decayed in _named(loaded.piece):
                if parameter.grad is not None:
                    self._move(loaded.ready, name, decayed, parameter)
        loaded.ready.clear()  # of parameters without a gradient, whose hooks would hold them
        loaded.piece.after_step()
        for unit, module in loaded.piece.units().items():
            self.pages.write(unit, _state(module))


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


def _kept(optimiser: SGD) -> list[Tensor]:
    """Return what an optimiser keeps between steps."""
    return [stored_tensor(held) for kept in optimiser.state().values() for held in kept]


def _page(parameter: str) -> str:
    return f"{parameter}{STATE}"
