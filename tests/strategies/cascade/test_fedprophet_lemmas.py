"""FedProphet's Equations 8 and 10: the bounds hold for the trainer's loss, on random small modules and by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fedprophet_helpers import built, chain, generator, linear
from torch import Tensor, nn

from piecework.strategies.cascade.fedprophet.client import largest_perturbation, module_loss
from piecework.training.attacks import Attack, Loss, by_backward, pgd
from piecework.training.loop import PieceModel

LABEL = torch.tensor([1])


def two_layers(inputs: int, outputs: int) -> tuple[Callable[[], nn.Module], int]:
    return lambda: nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)), outputs


# ---- Equation 8, Lemma 1


def gradient_by_z(head: nn.Linear, z: Tensor, mu: float) -> Tensor:
    """Of CE(head(z)) + mu/2 ||z||^2, by hand: W^T (softmax(Wz + b) - e_y) + mu z."""
    errors = torch.softmax(head.weight @ z[0] + head.bias, 0) - nn.functional.one_hot(LABEL[0], len(head.bias))
    return (head.weight.T @ errors + mu * z[0]).detach()


def lemma1(gradient: float, c: float, mu: float) -> float:
    return gradient / mu + math.sqrt(2 * c / mu + (gradient / mu) ** 2)


def in_ball(count: int, size: int, epsilon: float, seed: int) -> Tensor:
    """Points all over an L2 ball, half of them on its surface."""
    directions = nn.functional.normalize(torch.randn(count, size, generator=generator(seed)))
    radii = torch.rand(count, 1, generator=generator(seed + 1)) ** (1 / size)
    return epsilon * torch.where(torch.arange(count)[:, None] % 2 == 0, directions, directions * radii)


@torch.no_grad()
def increases(loss: Loss, z: Tensor, points: Tensor) -> Tensor:
    start = float(loss(z, LABEL))
    return torch.tensor([float(loss(point[None], LABEL)) - start for point in points], dtype=torch.float64)


@pytest.mark.parametrize("module", [linear, two_layers])
@pytest.mark.parametrize("mu", [0.05, 1.0])
def test_lemma_1_bounds_what_a_module_makes_of_a_perturbation(module: Any, mu: float) -> None:
    tightest = 0.0
    for seed in range(6):
        piece = built(chain(6, module(6, 5), linear(5, 5), classes=3), (0,), "aux.0", seed, gain=2.0)
        loss, z = module_loss(mu)([piece]), torch.randn(1, 6, generator=generator(seed))
        attack = Attack("l2", 0.5, 0.1, 20)

        def distance(x: Tensor, y: Tensor, piece: PieceModel = piece, z: Tensor = z) -> Tensor:
            return (piece.features(x) - piece.features(z)).square().sum()

        worst = [pgd(by_backward(goal), z, LABEL, attack, generator(n)) for n in range(3) for goal in (loss, distance)]
        points = torch.cat([z + in_ball(150, 6, 0.5, seed), *worst])
        with torch.no_grad():
            clean = piece.features(z)
            moved = piece.features(points) - clean
        gradient = gradient_by_z(piece.head.fc, clean, mu)
        rises = increases(loss, z, points)
        convex = moved @ gradient + mu / 2 * moved.square().sum(1)
        assert (rises >= convex - 1e-5).all()  # l_m is mu-strongly convex in z_m
        bound = lemma1(float(gradient.norm()), float(rises.max()), mu)
        largest = float(moved.norm(dim=1).max())
        assert largest <= bound * (1 + 1e-5)
        tightest = max(tightest, largest / bound)
    assert tightest > 0.05  # the bound says something


def test_lemma_1_is_tight_where_only_the_regulariser_speaks() -> None:
    """z = diag(3, 1) x, a head of zeros: l = log 2 + mu/2 ||z||^2. At x = 0, epsilon = 0.5: c = 4/2 x 1.5^2 = 4.5."""
    piece = built(chain(2, linear(2, 2), linear(2, 2)), (0,), "aux.0")
    with torch.no_grad():
        piece.modules["atoms.0"].weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        for parameter in (piece.modules["atoms.0"].bias, *piece.head.parameters()):
            parameter.zero_()
    loss = module_loss(4.0)([piece])
    for x, gradient, c, bound in (((0.0, 0.0), 0.0, 4.5, 1.5), ((1 / 3, 0.0), 4.0, 10.5, 3.5)):
        z = torch.tensor([x])
        corner = z + torch.tensor([[0.5, 0.0]])
        rises = increases(loss, z, torch.cat([corner, z + in_ball(50, 2, 0.5, 3)]))
        assert float(rises.max()) == pytest.approx(float(rises[0])) == pytest.approx(c)
        assert float(gradient_by_z(piece.head.fc, piece.features(z), 4.0).norm()) == pytest.approx(gradient)
        assert lemma1(gradient, c, 4.0) == pytest.approx(bound)
        found, _ = largest_perturbation(piece.features, z, Attack("l2", 0.5, 0.2, 20), generator())
        assert found.tolist() == pytest.approx([1.5])


def test_without_the_regulariser_there_is_no_bound() -> None:
    """Remark 1: the head does not see z's second value, which the module makes 100 times as large."""
    piece = built(chain(2, linear(2, 2), linear(2, 2)), (0,), "aux.0")
    with torch.no_grad():
        piece.modules["atoms.0"].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 100.0]]))
        piece.head.fc.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        for bias in (piece.modules["atoms.0"].bias, piece.head.fc.bias):
            bias.zero_()
    z, mu = torch.zeros(1, 2), 0.1
    points = torch.cat([torch.tensor([[0.0, 0.5]]), in_ball(50, 2, 0.5, 3)])
    gradient = float(gradient_by_z(piece.head.fc, z, mu).norm())
    assert gradient == pytest.approx(1.0)  # W^T (1/2, -1/2)
    bounds = {}
    for weight in (0.0, mu):
        rises = increases(module_loss(weight)([piece]), z, points)
        bounds[weight] = lemma1(gradient, float(rises.max()), mu)
    # CE's c is at most that of z_1 = 0.5: log(1 + e) - log 2
    assert bounds[0.0] <= lemma1(1.0, math.log(1 + math.e) - math.log(2), mu) < 25
    assert bounds[mu] > 50  # ||Delta z||


# ---- Equation 10, Lemma 2


def stretch(weight: Tensor) -> float:
    """The largest singular value."""
    return float(torch.linalg.matrix_norm(weight.detach(), 2))


def test_lemma_2_bounds_how_far_the_stages_gradient_is_from_the_joint_one() -> None:
    """Linear modules, so that smoothness is known: the Hessian of CE by logits is at most 1/2."""
    blueprint, mu, closest = chain(4, linear(4, 5), linear(5, 6), linear(6, 6), classes=3), 0.1, math.inf
    for seed in range(10):
        joint = built(blueprint, (0, 1), "aux.1", seed, gain=2.0)
        early = built(blueprint, (0,), "aux.0", seed + 100)
        early.modules = {"atoms.0": joint.modules["atoms.0"]}
        x = torch.randn(1, 4, generator=generator(seed))
        weight, second = joint.modules["atoms.0"].weight, joint.modules["atoms.1"].weight.detach()
        gradients = [torch.autograd.grad(module_loss(mu)([p])(x, LABEL), weight)[0] for p in (joint, early)]
        reach = joint.head.fc.weight.detach() @ second
        smoothness = stretch(reach) ** 2 / 2 + mu * stretch(second) ** 2 + stretch(early.head.fc.weight) ** 2 / 2 + mu

        def losses(z: Tensor, joint: PieceModel = joint, early: PieceModel = early) -> tuple[Tensor, Tensor]:
            z2 = joint.modules["atoms.1"](z)
            pairs = ((joint.head(z2), z2), (early.head(z), z))
            of_joint, of_early = (nn.functional.cross_entropy(a, LABEL) + mu / 2 * b.square().sum() for a, b in pairs)
            return of_joint, of_early

        z = joint.modules["atoms.0"](x).detach().requires_grad_()
        difference = torch.autograd.grad(losses(z)[0] - losses(z)[1], z)[0]
        epsilon = float(difference.norm()) / smoothness
        # robust both ways in the ball that the proof's delta* ends at
        points = torch.cat([z + difference / smoothness, z + in_ball(200, 5, epsilon, seed)]).detach()
        with torch.no_grad():
            start = torch.stack(losses(z))
            changes = torch.stack([(torch.stack(losses(p[None])) - start).abs() for p in points])
        bound = float(x.norm()) * math.sqrt(2 * float(changes.max(0).values.sum()) * smoothness)
        found = float((gradients[0] - gradients[1]).norm())
        assert found == pytest.approx(float(difference.norm() * x.norm()), rel=1e-4)  # ||dz/dw|| = ||x||
        assert found <= bound
        closest = min(closest, bound / found)
    assert closest < 10  # the bound says something
