"""The local training loop of all trainers: a piece of the model, a small SGD, and a class that runs epochs.

The functions for the setup and the step of a piece also run on fake tensors, which gives its cost (planning/step_cost.py).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import Blueprint, fit_features, isolate_rng, run_atoms, unset_weights
from piecework.models.memory_layout import channels_last
from piecework.models.recompute import recompute
from piecework.models.recompute_cheap import recompute_cheaply
from piecework.models.static_norms import count_first_alike
from piecework.models.step import Segment
from piecework.training.accelerator import CPU, release_cache
from piecework.training.adam import OPTIMISERS
from piecework.training.attacks import Attack, Gradient, Loss, Parts, by_backward, micro_batches, pgd, whole
from piecework.training.examples import Examples, batches
from piecework.training.memory_cap import MemoryCap, return_free_memory
from piecework.training.settings.shared import WAYS
from piecework.training.sgd import SGD, TrainingConfig

Load = Callable[[str], nn.Module]


class PieceModel:
    """Atoms and a head that a device holds at once.

    `head` is a unit: `head`, `exits.<i>` or `aux.<i>` for a head after atom i, or None for features alone. `optimiser` is the
    piece's optimiser if that is not SGD. `ways` are those of `memory.fit` that compute the same step.
    """

    optimiser: ClassVar["type[SGD] | None"] = None
    ways: ClassVar[tuple[str, ...]] = WAYS

    def __init__(self, blueprint: Blueprint, atoms: Sequence[int], head: str | None, load: Load) -> None:
        self.blueprint, self.atoms, self.head_unit = blueprint, tuple(atoms), head
        self.modules = {f"atoms.{index}": load(f"atoms.{index}") for index in atoms}
        self.head = load(head) if head else nn.Identity()
        self.recompute: tuple[Segment, ...] = ()
        self.cheap = False

    def units(self) -> dict[str, nn.Module]:
        """Return the modules by unit name, the head last."""
        return self.modules | ({self.head_unit: self.head} if self.head_unit else {})

    def train(self, mode: bool) -> None:
        """Set training or evaluation mode."""
        for module in self.units().values():
            module.train(mode)

    def features(self, z: Tensor) -> Tensor:
        """Return the output of the atoms for z[B, ...]."""
        modules, done = list(self.modules.values()), 0

        def run(first: int, last: int, z: Tensor) -> Tensor:
            return run_atoms(self.blueprint, self.atoms[first:last], modules[first:last], z)

        for first, last in self.recompute:
            z = recompute(partial(run, first, last), run(done, first, z), modules[first:last], cheap=self.cheap)
            done = last
        return run(done, len(modules), z)

    def logits(self, z: Tensor) -> Tensor:
        """Return logits[B, classes]; before the shared head, features skip the rest of the model by zero padding."""
        z = self.features(z)
        logits: Tensor = self.head(fit_features(z, self.blueprint.feature_shape) if self.head_unit == "head" else z)
        return logits

    def parameters(self) -> list[nn.Parameter]:
        """List all parameters in order."""
        return [p for module in self.units().values() for p in module.parameters()]

    def list_undecayed(self) -> list[nn.Parameter]:
        """List the parameters without weight decay."""
        return []

    def after_step(self) -> None:
        """Hook that changes parameters after each optimiser step; the default does nothing."""

    def set_attacked(self, attacked: bool) -> None:
        """Hook before attacked or clean examples are evaluated; the default treats them alike."""

    def before_attack(self, loss: Loss, z: Tensor, y: Tensor) -> None:
        """Hook for the clean examples of a batch in training before they are attacked; the default does nothing."""


Perturb = Callable[[Tensor, Tensor], Tensor]  # (input batch, labels) -> adversarial batch
MakeLoss = Callable[[list[PieceModel]], Loss]


def single_loss(pieces: list[PieceModel]) -> Loss:
    """Return the cross-entropy of one piece with its head."""
    (piece,) = pieces
    return lambda z, y: classification_loss(piece.logits(z), y)


def classification_loss(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of logits[B, classes] in float32; for one logit, [B, 1], the binary cross-entropy."""
    logits = logits.float()
    if logits.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(logits[:, 0], y.to(logits.dtype), reduction=reduction)
    return F.cross_entropy(logits, y, reduction=reduction)


def train_step(
    loss: Loss, optimiser: SGD, z: Tensor, y: Tensor, perturb: Perturb | None = None, parts: Parts = whole
) -> Tensor:
    """Run forward, backward and update, on perturbed examples if `perturb` is given. Returns the detached loss.

    The examples of each of the `parts` of the batch are computed at once. The gradients are those of the whole batch if the
    loss is a mean over examples. Batch norms take the statistics of the examples that are computed together.
    """
    if perturb is not None:
        z = perturb(z, y)
    total: Tensor | None = None
    for part, labels in parts(z, y):
        value = loss(part, labels)
        if len(part) < len(z):
            value = value * (len(part) / len(z))
        value.backward()  # type: ignore[no-untyped-call]
        total = value.detach() if total is None else total + value.detach()
        del value  # otherwise the next forward pass would hold it too
    optimiser.step()
    assert total is not None
    return total


class OptimizerStateStore(Protocol):
    """Carries optimiser buffers over from round to round, where momentum does not begin at zero."""

    def restore(self, pieces: list[PieceModel], optimiser: SGD) -> None:
        """Restore the buffers before the first step."""

    def keep(self, pieces: list[PieceModel], optimiser: SGD) -> None:
        """Keep the buffers after the last step."""


class LocalTrainer:
    """Trains pieces on a device. They are built with the first batch, so that the accounting includes them."""

    def __init__(
        self,
        make: Callable[[], list[PieceModel]],
        training_config: TrainingConfig,
        make_loss: MakeLoss = single_loss,
        carried: OptimizerStateStore | None = None,
    ) -> None:
        self._make, self.training_config, self._make_loss, self._carried = make, training_config, make_loss, carried
        self.pieces: list[PieceModel] = []
        self.total_loss, self.seen, self.batches = 0.0, 0, 0
        self._paused: Path | None = None
        self._parts = micro_batches(training_config.micro_batch)
        self._young = training_config.attack is None  # attacks read running statistics, which must not change abruptly

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs to run; the last one ends with the last iteration."""
        iterations = self.training_config.iterations
        for epoch in count():
            if (
                epoch >= self.training_config.epochs
                if not iterations
                else self.batches >= iterations or epoch > self.batches
            ):
                return
            yield epoch

    def epoch(self, examples: Examples, rng: np.random.Generator, cap: MemoryCap, phase: str) -> None:
        """Run one pass over the examples in random batches, or the remaining iterations."""
        total = torch.zeros((), device=examples.device)
        left = self.training_config.iterations - self.batches if self.training_config.iterations else None
        with isolate_rng(_dropout_seed(rng)):
            for positions in islice(
                batches(len(examples), self.training_config.batch_size, rng, drop_single=True), left
            ):
                with cap.first(phase, *self._form(), len(positions)):
                    if not self.pieces:
                        self._begin()
                    value = self._step(examples.read(positions), examples.targets(positions), rng)
                total += value * len(positions)
                del value  # otherwise the next step would hold and count it too
                self.seen += len(positions)
                self.batches += 1
        self.total_loss += float(total)

    def _form(self) -> Sequence[int]:
        """Return a key that differs between steps of different memory."""
        return ()

    def _step(self, z: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        """Train on a batch. Returns the detached loss."""
        if self._young:
            self._young = count_first_alike(unit for piece in self.pieces for unit in piece.units().values())
        return train_step(self._loss, self.optimiser, z, y, self._perturb(rng), self._parts)

    def _begin(self) -> None:
        self.pieces = self._make()
        self._loss, self.optimiser = start(self.pieces, self.training_config, self._make_loss)
        if self._paused is not None:
            self.optimiser.load(self._paused)
        elif self._carried is not None:
            self._carried.restore(self.pieces, self.optimiser)
        return_free_memory()  # otherwise the heap keeps the memory that loading freed, in addition to training's

    def _perturb(self, rng: np.random.Generator) -> Perturb | None:
        if self.training_config.attack is None:
            return None
        return adversary(
            self.pieces, self._loss, self.training_config.attack, int(rng.integers(2**63)), parts=self._parts
        )

    def pause(self, folder: Path) -> None:
        """Free the memory: write the optimiser's state to a folder and drop the pieces, which must have been saved before.

        The next epoch makes them again.
        """
        self.optimiser.save(folder)
        self._paused = folder
        self.pieces = []
        del self.optimiser, self._loss
        release_cache()

    def finish(self) -> list[PieceModel]:
        """Drop the optimiser and return the pieces in evaluation mode. Raises ValueError if nothing was trained."""
        if not self.pieces:
            raise ValueError("no batch of two examples or more to train on")
        if self._carried is not None:
            self._carried.keep(self.pieces, self.optimiser)
        del self.optimiser, self._loss
        for piece in self.pieces:
            piece.train(False)
        return self.pieces


def _dropout_seed(rng: np.random.Generator) -> int:
    """Return a seed for torch's global generator, from which dropout draws; the state of `rng` does not change."""
    sequence = rng.bit_generator.seed_seq
    assert isinstance(sequence, np.random.SeedSequence)
    return int(sequence.generate_state(2, np.uint64)[1] >> 1)


def as_rows(z: Tensor, *, rounded: bool) -> Tensor:
    """Return features z[B, ...] as files have them: maps are channels last. With `rounded`, the bits of bfloat16."""
    z = (z.permute(0, 2, 3, 1) if z.dim() == 4 else z).contiguous()
    return z.bfloat16().view(torch.uint16) if rounded else z


def start(pieces: list[PieceModel], training_config: TrainingConfig, make_loss: MakeLoss) -> tuple[Loss, SGD]:
    """Set up a step: training mode, one optimiser over all pieces, and the loss."""
    for piece in pieces:
        piece.train(True)
        piece.recompute, piece.cheap = training_config.recompute, training_config.cheap
    loss = make_loss(pieces)
    if training_config.cheap:
        loss = kept_cheaply(loss)
    return (
        in_bfloat16(loss) if training_config.precision == "bfloat16" else loss,
        (pieces[0].optimiser or OPTIMISERS[training_config.optimiser])(
            [p for piece in pieces for p in piece.parameters() if p.requires_grad],
            training_config,
            [p for piece in pieces for p in piece.list_undecayed()],
            [piece.after_step for piece in pieces],
        ),
    )


def kept_cheaply(loss: Loss) -> Loss:
    """Return the same loss, whose backward pass keeps little of norms and activations, those of heads and exits too."""

    def cheap(z: Tensor, y: Tensor) -> Tensor:
        with recompute_cheaply():
            return loss(z, y)

    return cheap


def in_bfloat16(loss: Loss) -> Loss:
    """Return the same loss with its forward pass in bfloat16, where torch's autocast considers that safe."""

    def cast(z: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(z.device.type, torch.bfloat16):
            return loss(z, y)

    return cast


def in_precision(function: Callable[[Tensor], Tensor], training_config: TrainingConfig) -> Callable[[Tensor], Tensor]:
    """Return a forward pass in training precision for evaluation, so that it fits the same devices. It returns float32."""
    if training_config.precision == "float32":
        return function

    def cast(z: Tensor) -> Tensor:
        with torch.autocast(z.device.type, torch.bfloat16):
            return function(z).float()

    return cast


def adversary(
    pieces: list[PieceModel],
    loss: Loss,
    attack: Attack,
    seed: int,
    gradient: Callable[[Loss], Gradient] = by_backward,
    parts: Parts = whole,
) -> Perturb:
    """Return a function that attacks pieces in evaluation mode, so that batch norms do not move.

    It leaves the pieces in training mode.
    """

    def perturb(z: Tensor, y: Tensor) -> Tensor:
        for piece in pieces:
            piece.before_attack(loss, z, y)
            piece.train(False)
        adversarial = pgd(gradient(loss), z, y, attack, torch.Generator().manual_seed(seed), parts)
        for piece in pieces:
            piece.train(True)
        return adversarial

    return perturb


def load_for_device(blueprint: Blueprint, fill: Callable[[str, nn.Module], None], device: torch.device = CPU) -> Load:
    """Return a function that builds a unit on the device with its weights and leaves torch's global generator unchanged."""

    def load(unit: str) -> nn.Module:
        with isolate_rng(0), unset_weights():
            module = channels_last(blueprint.build_unit(unit))
        fill(unit, module)
        return module.to(device)

    return load
