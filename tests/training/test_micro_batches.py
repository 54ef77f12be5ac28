"""Micro-batches and recomputation: the gradients of the plain step, and the bytes that were traced."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MODELLED_CPU, a_training_config
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_helpers import NARROW, ONE_A_FAMILY, SHALLOW, blueprint_of, examples_for

from piecework.device_profiles.memory import StepCost
from piecework.models.cascade import Blueprint, isolate_rng
from piecework.planning.step_cost import fake_load, piece_cost
from piecework.training.attacks import Attack, Loss, micro_batches
from piecework.training.loop import LocalTrainer, PieceModel, adversary, single_loss, start, train_step
from piecework.training.memory_cap import MemoryCap
from piecework.training.sgd import SGD, TrainingConfig

GROUPED = ("cnn3", "conv4", "convnet", "cnn-femnist", "preresnet20", "resnet18", "resnet18-preact", "vgg11")
BATCH = 5  # in micro-batches of two: 2, 2 and 1


class Gradients(SGD):
    """Keeps the gradients of its step."""

    def step(self) -> None:
        self.seen = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        super().step()


class Piece(PieceModel):
    optimiser = Gradients


def segments(blueprint: Blueprint, size: int = 2) -> tuple[tuple[int, int], ...]:
    """Runs of `size` atoms, without the last one."""
    ends = len(blueprint.atoms) - 1
    return tuple((first, min(first + size, ends)) for first in range(0, ends, size))


def again(blueprint: Blueprint) -> tuple[dict[str, Any], ...]:
    """The steps that compute again what they do not keep: segments, norms and activations, and both."""
    return {"recompute": segments(blueprint)}, {"cheap": True}, {"recompute": segments(blueprint), "cheap": True}


def step_of(
    blueprint: Blueprint, training_config: TrainingConfig, *, frozen: bool = False, double: bool = False
) -> tuple[float, list[Any], list[Tensor]]:
    """Loss, gradients and buffers of one step from the same weights on the same batch.

    `frozen`: batch norms use running statistics and nothing is dropped, because both are of other examples in a micro-batch.
    `double`: in float64, where sums in another order hardly differ.
    """
    with isolate_rng(7):
        dtype = torch.float64 if double else torch.float32
        load = (lambda unit: blueprint.build_unit(unit).double()) if double else blueprint.build_unit
        pieces: list[PieceModel] = [Piece(blueprint, range(len(blueprint.atoms)), "head", load)]
        loss, optimiser = start(pieces, training_config, in_double if double else single_loss)
        examples = examples_for(blueprint, 0, BATCH)
        z, y = examples.read(np.arange(BATCH)), examples.targets(np.arange(BATCH))
        z = z.to(dtype) if z.is_floating_point() else z
        for layer in (layer for module in pieces[0].units().values() for layer in module.modules()):
            if frozen and isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.Dropout):
                layer.eval()
        parts = micro_batches(training_config.micro_batch)
        perturb = None
        if training_config.attack is not None:
            perturb = adversary(pieces, loss, training_config.attack, 3, parts=parts)
        value = train_step(loss, optimiser, z, y, perturb, parts)
        assert isinstance(optimiser, Gradients)
        return float(value), optimiser.seen, [b for module in pieces[0].units().values() for b in module.buffers()]


def in_double(pieces: list[PieceModel]) -> Loss:
    (piece,) = pieces
    return lambda z, y: (
        F.cross_entropy(piece.logits(z), y)
        if piece.blueprint.num_classes > 2
        else F.binary_cross_entropy_with_logits(piece.logits(z)[:, 0], y.double())
    )


def same(one: list[Any], other: list[Any], rel: float) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(
        (a is None and b is None) or float((a - b).double().norm()) <= rel * float(a.double().norm()) + 1e-12
        for a, b in pairs
    )


@pytest.mark.parametrize("name", ONE_A_FAMILY)
def test_gradients_are_those_of_the_plain_step(name: str) -> None:
    """Of micro-batches, of recomputed segments, and of both; dropout draws the same numbers in both forward passes."""
    blueprint = blueprint_of(name, **NARROW[name] | {"batch_norm": "running"})
    plain = a_training_config(BATCH)
    loss, gradients, buffers = step_of(blueprint, plain)
    assert any(g is not None and float(g.double().norm()) > 0 for g in gradients)
    for fit in again(blueprint):
        value, found, moved = step_of(blueprint, replace(plain, **fit))
        assert (value, same(gradients, found, 0.0), same(buffers, moved, 0.0)) == (loss, True, True)
    for double, accuracy in ((False, 1e-5), (True, 1e-12)):
        loss, gradients, _ = step_of(blueprint, plain, frozen=True, double=double)
        for fit in ({"micro_batch": 2}, {"micro_batch": 2} | again(blueprint)[-1]):
            value, found, _ = step_of(blueprint, replace(plain, **fit), frozen=True, double=double)
            assert value == pytest.approx(loss, rel=1e-6)
            assert same(gradients, found, accuracy)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED)
def test_group_norms_do_not_mind_micro_batches(name: str) -> None:
    """In training mode, but without dropout; the bytes are the traced ones, too."""
    blueprint = blueprint_of(name, **NARROW[name] | {"batch_norm": "group"})
    plain = a_training_config(BATCH)
    loss, gradients, _ = step_of(blueprint, plain, frozen=True, double=True)
    fitted = replace(plain, micro_batch=2, recompute=segments(blueprint))
    value, found, _ = step_of(blueprint, fitted, frozen=True, double=True)
    assert value == pytest.approx(loss, rel=1e-6)
    assert same(gradients, found, 1e-12)
    for fit in ({}, {"micro_batch": 2}, {"recompute": segments(blueprint)}):
        require_traced(blueprint, replace(a_training_config(6), **fit))


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ["convnet", "lenet5", "resnet18"])
def test_gradients_under_attack(name: str, norm: Any) -> None:
    """The attack starts where it does for the whole batch; convolutions that keep no statistics."""
    blueprint = blueprint_of(name, input_shape=(1, 16, 16), batch_norm="running", width=0.25)
    plain = a_training_config(BATCH, attack=Attack(norm, 0.1, 0.05, 2))
    loss, gradients, buffers = step_of(blueprint, plain)
    for fit in again(blueprint):
        value, found, moved = step_of(blueprint, replace(plain, **fit))
        assert (value, same(gradients, found, 0.0), same(buffers, moved, 0.0)) == (loss, True, True)
    if name == "lenet5":  # which has no batch norms
        value, found, _ = step_of(blueprint, replace(plain, micro_batch=2, recompute=segments(blueprint)))
        assert value == pytest.approx(loss, rel=1e-6)
        assert same(gradients, found, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preresnet20", pytest.param("lstm-imdb", marks=MODELLED_CPU), "vit"])
def test_gradients_in_bfloat16(name: str) -> None:
    """The second forward pass is in bfloat16 too."""
    blueprint = blueprint_of(name, **NARROW[name] | {"batch_norm": "running"})
    plain = a_training_config(BATCH, precision="bfloat16")
    loss, gradients, _ = step_of(blueprint, plain)
    for fit in again(blueprint):
        value, found, _ = step_of(blueprint, replace(plain, **fit))
        assert (value, same(gradients, found, 0.0)) == (loss, True)
        require_traced(blueprint, replace(a_training_config(6, precision="bfloat16"), **fit))


@pytest.mark.slow
@pytest.mark.parametrize("attack", [None, Attack("linf", 0.1, 0.05, 2)])
@pytest.mark.parametrize("name", ["convnet", "lenet5", "lstm-imdb", "preresnet20", "vgg11", "vit"])
def test_a_traced_step_is_the_real_one(name: str, attack: Attack | None) -> None:
    if attack is not None and name == "lstm-imdb":
        pytest.skip("tokens cannot be attacked")
    blueprint = blueprint_of(name, **SHALLOW[name] | {"batch_norm": "running"})
    atoms = tuple(range(len(blueprint.atoms)))
    plain = a_training_config(6, attack=attack)
    costs = [piece_cost(blueprint, atoms, "head", plain)]
    for fit in ({"micro_batch": 2}, *again(blueprint)):
        costs.append(require_traced(blueprint, replace(plain, **fit)))
    whole, sliced, twice, cheap, both = costs
    assert sliced.flops == cheap.flops == whole.flops
    assert both.flops == twice.flops > whole.flops
    assert cheap.peak_bytes <= whole.peak_bytes
    assert both.peak_bytes <= twice.peak_bytes
    if (
        name == "preresnet20"
    ):  # elsewhere a gradient that is added weighs more than the activations of four small examples
        assert both.peak_bytes < sliced.peak_bytes < twice.peak_bytes < cheap.peak_bytes < whole.peak_bytes


def require_traced(blueprint: Blueprint, training_config: TrainingConfig) -> StepCost:
    """The cost of a step of the whole model, whose real step takes the same bytes."""
    atoms = tuple(range(len(blueprint.atoms)))
    cost = piece_cost(blueprint, atoms, "head", training_config)
    cap = MemoryCap(cost.peak_bytes, enforced=True)

    def make() -> list[PieceModel]:
        return [PieceModel(blueprint, atoms, "head", fake_load(blueprint))]

    LocalTrainer(make, training_config).epoch(examples_for(blueprint, 0, 6), np.random.default_rng(0), cap, "train")
    assert cap.peak_bytes == cost.peak_bytes
    return cost


def test_micro_batches_differ_by_at_most_one_example() -> None:
    sizes = [len(part) for part, _ in micro_batches(4)(torch.zeros(10, 3), torch.zeros(10))]
    assert sizes == [4, 3, 3]
    assert [len(part) for (part,) in micro_batches(0)(torch.zeros(10))] == [10]
    assert [len(part) for (part,) in micro_batches(16)(torch.zeros(10))] == [10]
