"""Projected gradient descent against steps that can be done by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.training.attacks import Attack, by_backward, pgd

W = torch.tensor([[3.0, -4.0, 0.0]])
Y = torch.zeros(2, dtype=torch.int64)


def linear(z: Tensor, y: Tensor) -> Tensor:
    """Its gradient is W everywhere: sign (1, -1, 0), norm 5."""
    return (z * W).sum()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_linf_walks_to_the_corner() -> None:
    z = torch.tensor([[0.5, 0.5, 0.5], [0.0, 1.0, 0.25]])
    found = pgd(
        by_backward(linear), z, Y, Attack("linf", epsilon=0.1, step=0.05, steps=4, low=0.0, high=1.0), generator()
    )
    # four steps of 0.05 cross the box of 0.1 from any start; the third value never moves from its random start
    assert torch.allclose(found[:, :2], torch.tensor([[0.6, 0.4], [0.1, 0.9]]))
    assert ((found[:, 2] - z[:, 2]).abs() <= 0.1 + 1e-6).all()
    assert (found[:, 2] != z[:, 2]).all()


def test_linf_stays_in_the_image() -> None:
    z = torch.tensor([[0.98, 0.03, 0.0], [0.98, 0.03, 1.0]])
    found = pgd(
        by_backward(linear), z, Y, Attack("linf", epsilon=0.1, step=0.05, steps=4, low=0.0, high=1.0), generator()
    )
    assert found[:, :2].tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert found.min() >= 0
    assert found.max() <= 1


def test_l2_walks_along_the_gradient() -> None:
    z = torch.zeros(2, 3)
    found = pgd(by_backward(linear), z, Y, Attack("l2", epsilon=2.0, step=50.0, steps=1), generator())
    # one giant step and the projection: the direction is the gradient's to the size of the start over the step
    assert torch.allclose(found, torch.tensor([[1.2, -1.6, 0.0]]).expand(2, 3), atol=0.1)
    found = pgd(by_backward(linear), z, Y, Attack("l2", epsilon=2.0, step=50.0, steps=4), generator())
    assert torch.allclose(found, torch.tensor([[1.2, -1.6, 0.0]]).expand(2, 3), atol=1e-3)
    assert torch.allclose(found.norm(dim=1), torch.full((2,), 2.0))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_random_start_is_in_the_ball_and_a_function_of_the_seed(norm) -> None:
    z = torch.zeros(500, 4)
    found = pgd(by_backward(linear), z, Y, Attack(norm, epsilon=0.5, step=0.1, steps=0), generator())
    sizes = found.abs().amax(1) if norm == "linf" else found.norm(dim=1)
    assert sizes.max() <= 0.5 + 1e-6
    assert sizes.max() > 0.45
    assert sizes.min() < (0.2 if norm == "linf" else 0.05)  # radii are uniform, a box's largest coordinates are not
    assert torch.equal(found, pgd(by_backward(linear), z, Y, Attack(norm, 0.5, 0.1, 0), generator()))


def test_a_gradient_that_vanishes_moves_nothing() -> None:
    z = torch.ones(2, 3)
    flat = pgd(by_backward(lambda z, y: (z * 0).sum()), z, Y, Attack("l2", epsilon=1.0, step=0.5, steps=3), generator())
    start = pgd(by_backward(linear), z, Y, Attack("l2", epsilon=1.0, step=0.5, steps=0), generator())
    assert torch.allclose(flat, start)
    assert math.isfinite(float(flat.sum()))


def test_weights_get_no_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    found = pgd(
        by_backward(lambda z, y: (z * weight).sum()), torch.zeros(2, 3), Y, Attack("linf", 0.1, 0.1, 2), generator()
    )
    assert weight.grad is None
    assert not found.requires_grad


IMAGES = {"mean": (0.3, 0.5), "std": (0.25, 0.5)}
ATTACKS = {
    "pixels": Attack("linf", 0.1, 0.03, 7, 0.0, 1.0),
    "normalised pixels": Attack("linf", 0.1, 0.03, 7, 0.0, 1.0, **IMAGES),
    "features": Attack("l2", 1.5, 2.5 * 1.5 / 7, 7),
    "features from 0": Attack("l2", 1.5, 2.5 * 1.5 / 7, 7, low=0.0),
    "features in a box": Attack("linf", 0.2, 2.5 * 0.2 / 7, 7),
}


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
        return nn.Sequential(*layers).eval()


def examples(attack: Attack) -> tuple[Tensor, Tensor]:
    """Images within [0, 1], many of their pixels at an end, normalised where the attack says how; labels."""
    pixels = torch.rand(32, 2, 4, 4, generator=generator()).mul_(1.6).sub_(0.3).clamp_(0, 1)
    return (pixels - channels(attack.mean, 0)) / channels(attack.std, 1), torch.arange(32) % 5


def channels(values: tuple[float, ...], otherwise: float) -> Tensor:
    return torch.tensor(values or (otherwise,) * 2).view(1, 2, 1, 1)


def sizes(attack: Attack, z: Tensor, moved: Tensor) -> Tensor:
    delta = ((moved - z) * channels(attack.std, 1)).flatten(1)
    return delta.abs().amax(1) if attack.norm == "linf" else delta.norm(dim=1)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("steps", [0, 1, 3, 20])
def test_never_leaves_its_ball_or_the_range(name: str, steps: int) -> None:
    attack, model = replace(ATTACKS[name], steps=steps), network()
    z, y = examples(attack)
    before, weights = z.clone(), [weight.clone() for weight in model.state_dict().values()]
    found = pgd(by_backward(lambda z, y: F.cross_entropy(model(z), y)), z, y, attack, generator())
    assert sizes(attack, z, found).max() <= attack.epsilon + 1e-6
    values = found * channels(attack.std, 1) + channels(attack.mean, 0)
    assert values.min() >= attack.low - 1e-6
    assert values.max() <= attack.high + 1e-6
    if steps == 20:
        assert sizes(attack, z, found).min() >= 0.8 * attack.epsilon  # and goes to its edge
    assert torch.equal(z, before)
    assert all(map(torch.equal, weights, model.state_dict().values()))  # batch norm's statistics too
    assert all(weight.grad is None for weight in model.parameters())
    assert not found.requires_grad


@pytest.mark.parametrize("name", ATTACKS)
def test_finds_more_than_noise_of_the_same_size(name: str) -> None:
    """Noise that goes as far, of a random direction: of 20 draws none does what PGD does, for any example."""
    attack, model = ATTACKS[name], network()
    z, y = examples(attack)

    @torch.no_grad()
    def losses(z: Tensor) -> Tensor:
        return F.cross_entropy(model(z), y, reduction="none")

    found = losses(pgd(by_backward(lambda z, y: F.cross_entropy(model(z), y)), z, y, attack, generator()))
    assert (found > losses(z)).all()
    pixels, rng = z * channels(attack.std, 1) + channels(attack.mean, 0), generator()
    for _ in range(20):
        noise = torch.randn(z.shape, generator=rng)
        far = noise.sign() if attack.norm == "linf" else noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        values = (pixels + attack.epsilon * far).clamp(attack.low, attack.high)
        assert (found > losses((values - channels(attack.mean, 0)) / channels(attack.std, 1))).all()
