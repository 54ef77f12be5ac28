"""AutoAttack against robustness worked out by hand; its warnings, each by a small model; what is said without torchattacks."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from helpers import digits, tiny_settings
from torch import Tensor, nn

from piecework.federated_data.datasets import ArrayDataset, DatasetError
from piecework.federation.autoattack import (
    fix_statistics,
    freeze,
    is_fooled,
    require_autoattack,
    run_autoattack,
    standard_attacks,
    suspicions,
)
from piecework.federation.evaluation import Evaluator
from piecework.models.cascade import Atom, Blueprint
from piecework.training.settings import SettingsError

EPSILON = 0.1  # 25.5 of 255: an attack brings two pixels together by 51
# The class is the brightest of four pixels; the second brightest is 50, 52, 100, 8 below; the last one is labelled otherwise.
ROWS = [[150, 100, 90, 80], [80, 152, 100, 90], [20, 30, 130, 10], [200, 190, 180, 208], [10, 20, 30, 130]]
LABELS = [0, 1, 2, 3, 0]


class Brightest(nn.Module):
    """Logits are the four pixels of an image; `change` is what is done to it first."""

    def __init__(self, change: nn.Module | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))
        self.change = change or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.change(x).flatten(1) * self.scale
        return logits


def images() -> tuple[Tensor, Tensor]:
    return torch.tensor(ROWS).view(-1, 1, 1, 4) / 255, torch.tensor(LABELS)


@pytest.mark.slow
def test_linear_model_by_hand() -> None:
    pytest.importorskip("torchattacks")
    rows = np.array(ROWS, dtype=np.uint8)[:, None, :, None]
    data = ArrayDataset("rows", rows, np.array(LABELS), 4, (0.5,), (0.25,), rows, np.array(LABELS))

    def head() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 4, bias=False))

    blueprint = Blueprint("brightest", (1, 1, 4), 4, (Atom("pixels", nn.Identity, (1, 1, 4)),), head, "batch")
    arrays = ArrayRecord({"head.1.weight": Array(np.eye(4, dtype=np.float32))})
    evaluate = Evaluator(blueprint, data, 2)
    before = torch.get_rng_state()
    found = evaluate.run_autoattack(arrays, 5, EPSILON)
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.images, found.clean_accuracy) == (5, 4 / 5)
    # 50 and 8 are overcome, 52 and 100 are not, and what is wrong stays wrong
    assert found.accuracy == 2 / 5
    assert list(found.after) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert sorted(found.after.values(), reverse=True) == list(found.after.values())
    assert found.after["square"] == found.accuracy
    assert found.warnings == []
    assert found.seconds > 0


@pytest.mark.slow
def test_images_of_three_channels() -> None:
    """The same as by hand, with each pixel in three channels of a third of the weight."""
    pytest.importorskip("torchattacks")
    rows = np.array(ROWS, dtype=np.uint8)[:, None, :, None].repeat(3, axis=3)
    data = ArrayDataset("rows", rows, np.array(LABELS), 4, (0.5,) * 3, (0.25,) * 3, rows, np.array(LABELS))

    def head() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=False))

    blueprint = Blueprint("brightest", (3, 1, 4), 4, (Atom("pixels", nn.Identity, (3, 1, 4)),), head, "batch")
    arrays = ArrayRecord({"head.1.weight": Array(np.tile(np.eye(4, dtype=np.float32) / 3, 3))})
    found = Evaluator(blueprint, data, 2).run_autoattack(arrays, 5, EPSILON)
    assert (found.images, found.clean_accuracy, found.accuracy) == (5, 4 / 5, 2 / 5)


def test_a_model_whose_gradients_are_masked() -> None:
    """Rounding hides every gradient: the white-box attacks stand still, and Square shows it."""
    pytest.importorskip("torchattacks")

    class Rounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 255).round() / 255

    model, (x, y) = Brightest(Rounded()), images()
    x, y = x[[0, 3, 4]], y[[0, 3, 4]]
    found = run_autoattack(model, x, y, EPSILON, seed=1)
    assert found.clean_accuracy == 2 / 3
    assert found.accuracy == 0.0
    gradient, square = found.warnings
    assert "zero gradient at 3 of 3 images (100.0%)" in gradient
    broken = round(found.after["fab-t"] * 3)
    assert broken > 0
    assert f"broke {broken} of 3 images" in square
    assert model.training
    assert model.scale.requires_grad
    assert model.scale.grad is None


def test_all_broken() -> None:
    pytest.importorskip("torchattacks")
    x, y = images()
    found = run_autoattack(Brightest(), x[:1], y[:1], 0.5, seed=1)
    assert (found.clean_accuracy, found.accuracy) == (1.0, 0.0)
    assert set(found.after.values()) == {0.0}


def test_too_few_classes() -> None:
    pytest.importorskip("torchattacks")
    x, y = images()
    with pytest.raises(ValueError, match="needs a model of 4 classes or more, this one has 3"):
        run_autoattack(Brightest(), x[..., :3], y[:], EPSILON, seed=1)


@pytest.mark.parametrize(("classes", "targets"), [(4, 3), (10, 9), (100, 9)])
def test_it_is_the_standard_ensemble(classes: int, targets: int) -> None:
    attacks: dict[str, Any] = dict(
        standard_attacks(pytest.importorskip("torchattacks"), Brightest(), 0.03, 7, classes).items()
    )
    assert [type(attack).__name__ for attack in attacks.values()] == ["APGD", "APGDT", "FAB", "Square"]
    ce, targeted, fab, square = attacks.values()
    assert {attack.eps for attack in attacks.values()} == {0.03}
    assert {attack.seed for attack in attacks.values()} == {7}
    assert {attack.n_restarts for attack in attacks.values()} == {1}
    assert {attack.norm for attack in attacks.values()} == {"Linf"}
    assert ce.loss == "ce"
    assert (ce.steps, targeted.steps, fab.steps, square.n_queries) == (100, 100, 100, 5000)
    assert (targeted.n_target_classes, fab.n_target_classes) == (targets, targets)
    assert fab.multi_targeted
    assert (square.p_init, square.rescale_schedule, square.loss) == (0.8, False, "margin")
    assert all(attack.normalization_used is None for attack in attacks.values())


def test_only_allowed_examples_count() -> None:
    x = torch.tensor([0.5, 0.4, 0.0, 0.0]).view(1, 1, 1, 4)
    y = torch.tensor([0])
    assert not bool(
        is_fooled(Brightest(), x + torch.tensor([0.0, 0.09, 0.0, 0.0]), x, y, EPSILON)
    )  # still the first pixel
    within = x + torch.tensor([-0.06, 0.06, 0.0, 0.0])
    assert bool(is_fooled(Brightest(), within, x, y, EPSILON))
    assert not bool(is_fooled(Brightest(), within, x, y, 0.05))  # out of the ball
    dark = x + torch.tensor([-0.06, 0.06, -0.01, 0.0])
    assert not bool(is_fooled(Brightest(), dark, x, y, EPSILON))  # out of the range of pixels


def test_a_sound_model_raises_no_suspicion() -> None:
    assert suspicions(Brightest(), *images()) == []


def test_random_outputs() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tensor([[[[0.01]]], [[[0.0]]], [[[0.01]]], [[[0.0]]], [[[0.0]]]]) * torch.rand(5, 1, 1, 4)

    torch.manual_seed(0)
    (warning,) = suspicions(Brightest(Noise()), *images())
    assert "Outputs are random: two passes over the same images differ for 2 of 5" in warning


def test_probabilities_for_logits() -> None:
    model = nn.Sequential(Brightest(), nn.Softmax(dim=1))
    (warning,) = suspicions(model, *images())
    assert "probabilities (soft-max), not logits" in warning
    assert suspicions(nn.Sequential(Brightest(), nn.LogSoftmax(dim=1)), *images()) == []


def test_zero_gradients() -> None:
    class HalfDead(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.amax(3, keepdim=True) > 140 / 255, x, x.detach())

    (warning,) = suspicions(Brightest(HalfDead()), *images())
    assert "zero gradient at 2 of 5 images (40.0%)" in warning


def test_statistics_of_a_batch_are_fixed_for_the_attack() -> None:
    norm = nn.BatchNorm2d(1, affine=False, track_running_stats=False, eps=1e-12).eval()
    x = torch.tensor([1.0, 3.0, 5.0, 7.0, 100.0]).view(5, 1, 1, 1)
    with fix_statistics(norm, x, 2) as fixed:
        assert fixed
        # batches (1, 3), (5, 7), and the last one excluded: means 2 and 6, unbiased variances 2 and 2
        assert float(norm(torch.tensor(6.0).view(1, 1, 1, 1))) == pytest.approx((6 - 4) / 2**0.5)
        assert torch.equal(norm(x)[:1], norm(x[:1]))
    assert norm.running_mean is None
    assert norm(x).mean().abs() < 1e-6  # by the batch's own again
    assert norm.momentum == 0.1
    with fix_statistics(nn.BatchNorm2d(1), x, 2) as fixed:
        assert not fixed


def test_a_model_of_batch_statistics_is_attacked_with_a_warning() -> None:
    pytest.importorskip("torchattacks")
    model, (x, y) = Brightest(nn.BatchNorm2d(1, affine=False, track_running_stats=False)), images()
    found = run_autoattack(model, x[[0, 3, 4]], y[[0, 3, 4]], EPSILON, seed=1, batch_size=2)
    assert (found.clean_accuracy, found.accuracy) == (2 / 3, 0.0)  # a shift and a scale, the same for all
    (warning,) = found.warnings
    assert "Batch norms that use batch statistics" in warning


def test_still_puts_everything_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))
    model[1].eval()
    model[2].requires_grad_(False)
    with freeze(model):
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert [module.training for module in model] == [True, False, True]
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, False, False]


@pytest.fixture
def without_torchattacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torchattacks", None)
    yield


@pytest.mark.usefixtures("without_torchattacks")
def test_without_the_extra() -> None:
    with pytest.raises(SettingsError, match=r"AutoAttack needs torchattacks.*pip install 'piecework\[attacks\]'"):
        run_autoattack(Brightest(), *images(), EPSILON, seed=1)
    settings = tiny_settings(evaluation__autoattack_examples=50)
    with pytest.raises(
        SettingsError,
        match=r"evaluation.autoattack-examples = 50: .*'piecework\[attacks\]', or set evaluation.autoattack-examples = 0",
    ):
        require_autoattack(settings, digits())
    require_autoattack(tiny_settings(), digits())  # a run that asks for none needs none


def test_data_that_autoattack_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchattacks", ModuleType("torchattacks"))  # as if installed
    settings = tiny_settings(evaluation__autoattack_examples=50)
    require_autoattack(settings, digits())
    with pytest.raises(
        SettingsError, match=r"evaluation.autoattack-examples = 50: data set digits has 3 classes .* needs 4"
    ):
        require_autoattack(settings, replace(digits(), num_classes=3))
    with pytest.raises(DatasetError, match="float32"):
        require_autoattack(settings, replace(digits(), inputs=digits().inputs.astype(np.float32)))
