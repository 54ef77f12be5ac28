"""The bytes and FLOPs of a training step, and the bytes of a forward pass of frozen atoms, traced on fake tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from piecework.device_profiles.memory import FlopCount, PeakMemory, StepCost, trace
from piecework.models.cascade import Blueprint, can_fit, kept_places, outputs
from piecework.models.memory_layout import channels_last
from piecework.models.partition import Piece
from piecework.models.resizing import resize_one
from piecework.models.static_norms import measure_norms
from piecework.models.zoo import MODELS
from piecework.planning.now import tracing
from piecework.planning.part import Part
from piecework.training.attacks import Gradient, Loss, by_backward, micro_batches
from piecework.training.loop import (
    Load,
    MakeLoss,
    PieceModel,
    adversary,
    as_rows,
    in_precision,
    single_loss,
    start,
    train_step,
)
from piecework.training.scoring import score
from piecework.training.sgd import TrainingConfig


def fake_load(blueprint: Blueprint) -> Load:
    """Return a function that builds units in a device's memory format, with arbitrary weights, for tracing costs."""
    return lambda unit: channels_last(blueprint.build_unit(unit))


def has_own_layers(blueprint: Blueprint, training_config: TrainingConfig, *code: object) -> bool:
    """Return whether a plain float32 step consists of this package's layers and `code` alone, which `trace` can run faster."""
    if blueprint.zoo_name not in MODELS or training_config.precision != "float32" or training_config.recompute:
        return False
    found = [atom.build for atom in blueprint.atoms] + [*code]
    modules = [each.func.__module__ if isinstance(each, partial) else each.__module__ for each in found]
    return all(module.startswith("piecework.") for module in modules)


def piece_cost(
    blueprint: Blueprint,
    atoms: Sequence[int],
    head: str,
    training_config: TrainingConfig,
    copies: int = 1,
    make_loss: MakeLoss = single_loss,
    *,
    targets: bool = False,
    piece_class: type[PieceModel] = PieceModel,
) -> StepCost:
    """Return the bytes and FLOPs of one training step of a piece, or of `copies` of it that learn together.

    With `targets`, the piece learns logits instead of labels.
    """
    tracing(blueprint.name)
    attack, attack_flops, traced = training_config.attack, FlopCount(), [0]

    def first_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        # All micro-batches after the second are like the second, which finds gradients of the first.
        parts = list(islice(micro_batches(training_config.micro_batch)(*tensors), 2))
        traced[0] = sum(len(part[0]) for part in parts)
        yield from parts

    def work() -> None:
        attack_flops.total = 0
        pieces = [piece_class(blueprint, tuple(atoms), head, fake_load(blueprint)) for _ in range(copies)]
        loss, optimiser = start(pieces, training_config, make_loss)
        perturb = None
        if attack is not None:
            # All attack steps are equal: one is traced, and the others take no more memory and the same FLOPs.
            gradient = partial(count_gradient, flops=attack_flops)
            perturb = adversary(pieces, loss, replace(attack, steps=1), 0, gradient, first_parts)
        z, y = fake_examples(pieces[0], training_config.batch_size, targets=targets)
        train_step(loss, optimiser, z, y, perturb, first_parts)

    cost = trace(work, own_layers=has_own_layers(blueprint, training_config, piece_class, make_loss))
    further = attack.steps - 1 if attack is not None else 0
    flops = cost.flops + further * attack_flops.total
    return StepCost(cost.peak_bytes, flops * training_config.batch_size // traced[0])


@dataclass(frozen=True)
class ActivationProfile:
    """Bytes of a plain step, by the position of the atom: what its forward pass keeps, with its output; the output; the peak.

    `peaks` are of all live bytes while the gradient passes an atom, and last, from the head's forward pass to its gradient.
    """

    kept: tuple[int, ...]
    outputs: tuple[int, ...]
    peaks: tuple[int, ...]


def activation_profile(part: Part, training_config: TrainingConfig) -> ActivationProfile:
    """Return what a plain step of a part keeps of each atom, and its peaks while the gradient passes them."""
    tracing(part.blueprint.name)
    memory = PeakMemory()
    kept, outputs, peaks = list[int](), list[int](), list[int]()

    def on_entry(*_: object) -> None:
        kept.append(-memory.live)

    def on_exit(_: nn.Module, inputs: object, z: Tensor) -> None:
        kept[-1] += memory.live
        outputs.append(z.untyped_storage().nbytes())
        if z.requires_grad:
            z.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        memory.peak = memory.live

    def on_gradient(_: object) -> None:
        peaks.append(memory.peak)
        memory.peak = memory.live

    def work() -> None:
        for each in (kept, outputs, peaks):
            each.clear()
        piece = part.piece_class(part.blueprint, part.atoms, part.head, fake_load(part.blueprint))
        loss, optimiser = start([piece], training_config, part.make_loss)
        for module in piece.modules.values():
            module.register_forward_pre_hook(on_entry)
            module.register_forward_hook(on_exit)
        z, y = fake_examples(piece, training_config.batch_size, targets=part.targets)
        loss(z, y).backward()  # type: ignore[no-untyped-call]
        on_gradient(z)
        optimiser.step()

    own = has_own_layers(part.blueprint, training_config, part.piece_class, part.make_loss)
    trace(work, memory, own_layers=own)
    passed = [*reversed(peaks[1:]), peaks[0]]
    frozen = [passed[0]] * (len(kept) + 1 - len(passed))  # no gradient passes the first atoms if they do not learn
    return ActivationProfile(tuple(kept), tuple(outputs), (*frozen, *passed))


def stream_cost(
    blueprint: Blueprint,
    atoms: Piece,
    training_config: TrainingConfig,
    *,
    training: bool = False,
    measured: bool = False,
    rounded: bool = False,
    head: str | None = None,
) -> int:
    """Return the peak bytes of frozen atoms that compute features of a batch, or logits and their loss if `head` is given.

    `training`: they run in training mode. `measured`: their batch norms measure statistics meanwhile. `rounded`: features are
    read and written in bfloat16.
    """
    tracing(blueprint.name)

    @torch.no_grad()
    def work() -> None:
        piece = PieceModel(blueprint, atoms, head, fake_load(blueprint))
        piece.train(training)
        if measured:
            measure_norms(piece.units().values())
        size, forward = training_config.batch_size, piece.features if head is None else piece.logits
        z = in_precision(forward, training_config)(read_batch(blueprint, atoms[0], size, rounded=rounded))
        if head is None:
            as_rows(z, rounded=rounded)
        else:
            score(z, torch.zeros(size, dtype=torch.int64))

    return trace(work, own_layers=has_own_layers(blueprint, training_config)).peak_bytes


def read_batch(blueprint: Blueprint, atom: int, batch_size: int, *, rounded: bool) -> Tensor:
    """Return `fake_batch` as it is read: images from bytes, and `rounded` features from bfloat16, which both take memory.

    `fake_batch` has resized images as they are read.
    """
    if (atom == 0 and (blueprint.reads != "images" or blueprint.stored_shape)) or (atom and not rounded):
        return fake_batch(blueprint, atom, batch_size)
    return fake_batch(blueprint, atom, batch_size, torch.bfloat16 if atom else torch.uint8).float()


def count_gradient(loss: Loss, flops: FlopCount) -> Gradient:
    """Return the gradient function of a loss with respect to its input, which adds its FLOPs to `flops`."""
    gradient = by_backward(loss)

    def count(z: Tensor, y: Tensor) -> Tensor:
        with flops:
            return gradient(z, y)

    return count


def fake_examples(piece: PieceModel, batch_size: int, *, targets: bool) -> tuple[Tensor, Tensor]:
    """Return a batch of a piece, and its labels[B], or with `targets` the logits[B, classes] that it learns."""
    z = fake_batch(piece.blueprint, piece.atoms[0] if piece.atoms else None, batch_size)
    shape = (batch_size, outputs(piece.head)) if targets else (batch_size,)
    return z, torch.zeros(shape, dtype=torch.float32 if targets else torch.int64)


def fake_batch(blueprint: Blueprint, atom: int | None, batch_size: int, kind: torch.dtype = torch.float32) -> Tensor:
    """Return an input batch of an atom, or of the head if `atom` is None, in the format of `Examples`, with values of a `kind`.

    Images and feature maps are [B, H, W, C] in memory, viewed as [B, C, H, W]. Other inputs are [B, ...]: features, or tokens.
    If images are resized, this takes the memory of reading them, also for an atom that is given images because those before it
    are left out.
    """
    shape = blueprint.feature_shape if atom is None else blueprint.shape_before(atom)
    if len(shape) == 3:
        batch = torch.empty(batch_size, *shape[1:], shape[0], dtype=kind)
        if blueprint.stored_shape and atom is not None and can_fit(blueprint.input_shape, shape):
            size = blueprint.input_shape[1:]
            places = [kept_places(have, want) for have, want in zip(size, shape[1:], strict=True)]
            resize_one(batch, blueprint.stored_shape, size, places)
        return batch.permute(0, 3, 1, 2)
    tokens = atom == 0 and blueprint.vocabulary > 0
    return torch.empty(batch_size, *shape, dtype=torch.int64 if tokens else kind)
