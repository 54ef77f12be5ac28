"""FedProphet's Equations 9, 11 and 13 to 15 against numbers worked out by hand."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedprophet_helpers import built, chain, generator, linear
from helpers import a_client, same, tiny_settings
from settings_helpers import settings_with
from torch import Tensor, nn

from piecework.client_app.client import Client
from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import Atom, Blueprint, initial_state
from piecework.models.layers import pooled_linear
from piecework.models.work_item import WorkItem
from piecework.planning.costs import cost_model_for
from piecework.strategies.cascade.fedprophet import client as fedprophet
from piecework.strategies.cascade.fedprophet.client import FedProphetTaskConfig, largest_perturbation, module_loss
from piecework.strategies.cascade.fedprophet.cut import FedProphetCut
from piecework.strategies.cascade.fedprophet.server import FedProphet
from piecework.training.attacks import Attack
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.loop import PieceModel
from piecework.training.messages import Task

# ---- Equations 9 and 13


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def two_maps(head: str) -> tuple[PieceModel, Tensor, Tensor]:
    """One pixel map to two channels, x and -2x; the head is the identity on their means, with the bias (1, 0)."""
    atom = Atom("conv", partial(nn.Conv2d, 1, 2, 1, bias=False), (2, 2, 2))
    blueprint = Blueprint("mine", (1, 2, 2), 2, (atom,), partial(pooled_linear, 2, 2), "running")
    piece = built(blueprint, (0,), head)
    with torch.no_grad():
        piece.modules["atoms.0"].weight.copy_(torch.tensor([1.0, -2.0]).view(2, 1, 1, 1))
        piece.head.fc.weight.copy_(torch.eye(2))
        piece.head.fc.bias.copy_(torch.tensor([1.0, 0.0]))
    return piece, torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]], [[[0.0, 1.0], [0.0, 1.0]]]]), torch.tensor([0, 1])


@torch.no_grad()
def test_module_loss_by_hand() -> None:
    """||z||^2 of the un-pooled maps: 30 + 120 and 2 + 8, mean 80. Logits: the means (2.5, -5), (0.5, -1), plus (1, 0)."""
    piece, z, y = two_maps("aux.0")
    entropy = (softplus(-8.5) + softplus(2.5)) / 2
    for mu in (0.0, 1e-5, 0.3):
        assert float(module_loss(mu)([piece])(z, y)) == pytest.approx(entropy + mu / 2 * 80, rel=1e-6)
    one, two = (float(module_loss(0.3)([piece])(z[n : n + 1], y[n : n + 1])) for n in (0, 1))
    assert [one, two] == pytest.approx([softplus(-8.5) + 0.15 * 150, softplus(2.5) + 0.15 * 10], rel=1e-6)


@torch.no_grad()
def test_the_models_own_head_has_no_regulariser() -> None:
    piece, z, y = two_maps("head")
    assert float(module_loss(0.3)([piece])(z, y)) == pytest.approx((softplus(-8.5) + softplus(2.5)) / 2, rel=1e-6)


def a_task(task_config: FedProphetTaskConfig, costs: dict[tuple[int, ...], int] | None = None) -> Task:
    assert task_config.modules
    listed = costs or {
        task_config.atoms(last): 100 * (last + 1) for last in range(task_config.stage, task_config.last + 1)
    }
    return Task(
        experiment_id="experiment",
        round=1,
        state_round=0,
        strategy="fedprophet",
        budget=10**9,
        reference=500,
        lr=0.05,
        state_dir="",
        costs={WorkItem(p, "head" if p[-1] == 4 else f"aux.{p[-1]}"): cost for p, cost in listed.items()},
        config=task_config.to_values(),
        evaluation=[EvaluationStep(0)],
    )


def with_heads(folder: Path, modules: list[list[int]], **overrides: Any) -> Client:
    """A client whose store also has the auxiliary heads behind modules."""
    client = a_client(folder, **overrides)
    units = [f"aux.{module[-1]}" for module in modules[:-1]]
    state = initial_state(client.blueprint, client.settings.seed, units=units)
    client.store.write_units({name: value.numpy() for name, value in state})
    return client


@pytest.mark.parametrize(
    ("last", "atoms", "head"), [(0, (0, 1), "aux.1"), (1, (0, 1, 2, 3), "aux.3"), (2, (0, 1, 2, 3, 4), "head")]
)
def test_modules_are_trained_jointly_by_the_last_ones_loss(
    tmp_path: Path, last: int, atoms: tuple[int, ...], head: str
) -> None:
    modules, mu, lr = [[0, 1], [2, 3], [4]], 0.02, 0.1
    plain = {
        "training__momentum": 0.0,
        "training__weight_decay": 0.0,
        "training__lr": lr,
        "training__batch_size": 40,
        "fedprophet__convexity": mu,
        "architecture__batch_norm": "batch",
    }
    client = with_heads(tmp_path, modules, settings=tiny_settings(strategy="fedprophet", **plain))
    everything = [*client.blueprint.units(), "aux.1", "aux.3"]
    before = dict(client.store.read(everything))
    piece = PieceModel(client.blueprint, atoms, head, client.load())
    piece.train(True)
    examples = client.local_data(0)
    z = piece.features(examples.read(range(40)))
    loss = nn.functional.cross_entropy(piece.head(z), torch.tensor(examples.labels))
    if head != "head":
        loss = loss + mu / 2 * z.square().sum() / 40
    loss.backward()

    update = fedprophet.train(a_task(FedProphetTaskConfig(modules, 0, last)), client)
    assert update.done == [WorkItem(atoms, head)]
    assert update.units == [*(f"atoms.{atom}" for atom in atoms), head]
    assert update.metrics["train-loss"] == pytest.approx(loss.item(), rel=1e-5)
    after = dict(client.store.read(everything))
    for unit, module in piece.units().items():
        for name, parameter in module.named_parameters():
            full = f"{unit}.{name}"
            assert not same(before, after, [full])
            torch.testing.assert_close(
                torch.from_numpy(after[full]), parameter.data - lr * parameter.grad, rtol=1e-4, atol=1e-6
            )
    others = [name for name in after if not name.startswith(tuple(f"{unit}." for unit in update.units))]
    assert same(before, after, others) if others else last == 2
    assert last == 0 or any(name.startswith("aux.1.") for name in others)  # of the stage itself


# ---- Equation 11, a client's part


def test_the_largest_perturbation_of_a_linear_module() -> None:
    """||W delta|| <= epsilon sigma_max(W), which PGD comes close to. Here sigma is (3, 1.5, 1, 0.5, 0.1)."""
    for seed in range(5):
        piece = built(chain(6, linear(6, 5), linear(5, 5)), (0,), None)
        left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator(seed)))[0] for n in (5, 6))
        sigma, values = 3.0, torch.tensor([3.0, 1.5, 1.0, 0.5, 0.1])
        with torch.no_grad():
            piece.modules["atoms.0"].weight.copy_(left @ torch.diag(values) @ right[:5])
        z = torch.randn(64, 6, generator=generator(seed))
        found, minimum = largest_perturbation(piece.features, z, Attack("l2", 0.7, 0.175, 20), generator())
        assert found.shape == (64,)
        assert found.max() <= 0.7 * sigma * (1 + 1e-5)
        assert found.max() >= 0.99 * 0.7 * sigma
        assert found.mean() >= 0.97 * 0.7 * sigma
        assert minimum == piece.features(z).min().item()


def test_the_largest_perturbation_of_features_that_are_never_negative() -> None:
    """(3, -4) z: 5 epsilon either way. At z = (1, 0), with no z below 0, 5 epsilon one way and 3 epsilon the other."""
    weight = torch.tensor([[3.0, -4.0]])
    module = partial(nn.functional.linear, weight=weight)
    free, minimum = largest_perturbation(module, torch.zeros(40, 2), Attack("l2", 0.1, 0.025, 10), generator())
    assert free.max() <= 0.5 + 1e-6
    assert free.tolist() == pytest.approx([0.5] * 40, rel=0.02)
    assert minimum == 0
    z = torch.tensor([[1.0, 0.0]]).expand(40, 2)
    found, minimum = largest_perturbation(module, z, Attack("l2", 0.1, 0.025, 20, low=0.0), generator())
    up = found < 0.4
    assert 0 < int(up.sum()) < 40
    assert found[up].tolist() == pytest.approx([0.3] * int(up.sum()), rel=0.02)
    assert found[~up].tolist() == pytest.approx([0.5] * int((~up).sum()), rel=0.02)
    assert minimum == 3


def first_module() -> Blueprint:
    """A first module that makes one value of an image of 8 x 8."""

    def flat() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))

    return Blueprint(
        "mine",
        (1, 8, 8),
        10,
        (Atom("a", flat, (1,)), Atom("b", nn.Identity, (1,))),
        partial(nn.Linear, 1, 10),
        "running",
    )


def test_a_survey_of_the_first_module_by_hand(tmp_path: Path) -> None:
    """z = w x: the largest |Delta z| is the way of all pixels in w's direction or against it, as far as [0, 1] lets them."""
    settings = tiny_settings(strategy="fedprophet", attack__epsilon=0.1, attack__step_size=0.05, attack__steps=8)
    client = a_client(tmp_path, settings, blueprint=first_module())
    metrics = fedprophet.query(a_task(FedProphetTaskConfig([[0], [1]], 0, -1)), client)
    state = dict(client.store.read(["atoms.0"]))
    weight, bias = (torch.from_numpy(state[f"atoms.0.1.{name}"]).double() for name in ("weight", "bias"))
    pixels = torch.tensor(client.data.inputs[:40]).double().flatten(1) / 255
    up, down = (1 - pixels).clamp(max=0.1), pixels.clamp(max=0.1)
    ways = [torch.where(sign * weight > 0, up, down) @ weight[0].abs() / client.data.std[0] for sign in (1, -1)]
    either = torch.stack(ways)
    assert float(either.amin(0).mean()) - 1e-5 <= metrics["perturbation"] <= float(either.amax(0).mean()) + 1e-5
    assert float(either.amin(0).mean()) < 0.95 * float(either.amax(0).mean())  # PGD decides between two different ends
    clean = ((pixels - client.data.mean[0]) / client.data.std[0]) @ weight[0] + bias
    assert metrics["min-feature"] == pytest.approx(float(clean.min()), rel=1e-5)
    assert metrics["num-examples"] == 40


def test_the_attack_on_a_stages_inputs(tmp_path: Path) -> None:
    settings = tiny_settings(strategy="fedprophet", attack__steps=5, attack__epsilon=0.1, attack__step_size=0.03)
    client = a_client(tmp_path / "l2", settings)
    modules = [[0, 1], [2, 3], [4]]
    images = fedprophet.stage_attack(client, FedProphetTaskConfig(modules, 0, 0, epsilon=9.0))
    assert (images.norm, images.epsilon, images.step, images.steps) == ("linf", 0.1, 0.03, 5)
    assert (images.low, images.high) == (0, 1)
    assert fedprophet.stage_attack(client, FedProphetTaskConfig(modules, 1, 1, 0.8)) == Attack("l2", 0.8, 0.4, 5)
    assert fedprophet.stage_attack(client, FedProphetTaskConfig(modules, 2, 2, 0.8, nonnegative=True)) == Attack(
        "l2", 0.8, 0.4, 5, low=0.0
    )
    box = a_client(tmp_path / "linf", settings.with_values({"fedprophet.feature-norm": "linf"}))
    found = fedprophet.stage_attack(box, FedProphetTaskConfig(modules, 1, 1, 0.8))  # z_1 is 16 x 8 x 8: 32^2 values
    assert (found.norm, found.epsilon, found.step) == ("linf", pytest.approx(0.8 / 32), pytest.approx(0.8 / 64))


# ---- Equations 14 and 15

# Of an example, multiply-accumulates x 2: modules 24, 30 and 50; heads behind them 12, 20 and 20.
# 12 bytes a parameter, and 4 x 2 examples x (inputs of the layers, un-pooled features, 2 logits of an auxiliary head):
ONE = 12 * (15 + 8) + 8 * (4 + 3 + 2)
TWO = 12 * (15 + 20 + 12) + 8 * (4 + 3 + 5 + 2)
ALL = 12 * (15 + 20 + 30 + 12) + 8 * (4 + 3 + 5 + 5)
LAST_TWO = 12 * (20 + 30 + 12) + 8 * (3 + 5 + 5)
PLENTY = 10**6


def a_cut(**changes: Any) -> FedProphetCut:
    blueprint = chain(4, linear(4, 3), linear(3, 5), linear(5, 5))
    settings = settings_with(memory__model="fedprophet", training__batch_size=2, attack__steps=1, **changes)
    cut = FedProphetCut(blueprint, cost_model_for(settings, blueprint, 1), settings, smallest=600, method=FedProphet)
    assert [stage.parts[0].atoms for stage in cut.stages] == [(0,), (1,), (2,)]
    return cut


def assigned(
    stage: int, budget: int, speed: float, slowest: float, *, tolerance: float = 0.0, **changes: Any
) -> list[int]:
    """The atoms that a client with this budget trains; here each is a module."""
    device = DeviceState("board", budget, speed, math.inf, 1e8, 0.0, tolerance=tolerance)
    return list(a_cut(**changes).choose_atoms(stage, device, slowest))


def test_the_memory_of_modules_by_hand() -> None:
    cut = a_cut()
    assert (ONE, TWO, ALL, LAST_TWO) == (348, 676, 1060, 848)
    assert [cut.bytes(cut.item(piece)) for piece in ((0,), (0, 1), (0, 1, 2), (1, 2))] == [
        ONE,
        TWO,
        ALL,
        LAST_TWO,
    ]


@pytest.mark.parametrize(
    ("stage", "budget", "modules"),
    [
        (0, ALL, [0, 1, 2]),
        (0, ALL - 1, [0, 1]),
        (0, TWO, [0, 1]),
        (0, TWO - 1, [0]),
        (0, ONE, [0]),
        (0, ONE - 1, [0]),  # the first always: what it does not fit, it swaps
        (1, LAST_TWO, [1, 2]),
        (1, LAST_TWO - 1, [1]),
        (2, 1, [2]),
    ],
)
def test_modules_are_assigned_as_far_as_memory_goes(stage: int, budget: int, modules: list[int]) -> None:
    assert assigned(stage, budget, speed=1e12, slowest=1.0) == modules
    assert assigned(stage, budget, speed=1e12, slowest=1.0, fedprophet__dma=False) == [stage]


@pytest.mark.parametrize(
    ("stage", "speed", "slowest", "modules"),
    [
        (0, 124e6, 24e6, [0, 1, 2]),  # 24 + 30 + 50 + 20 = 124/24 x 24
        (0, 124e6 - 1, 24e6, [0, 1]),
        (0, 74e6, 24e6, [0, 1]),  # 24 + 30 + 20 = 74/24 x 24
        (0, 74e6 - 1, 24e6, [0]),
        (0, 24e6, 24e6, [0]),  # the slowest itself
        (1, 100e6, 30e6, [1, 2]),  # 30 + 50 + 20 = 100/30 x 30
        (1, 100e6, 30e6 + 1, [1]),
    ],
)
def test_modules_are_assigned_as_far_as_time_goes(stage: int, speed: float, slowest: float, modules: list[int]) -> None:
    assert assigned(stage, PLENTY, speed, slowest) == modules
    assert assigned(stage, PLENTY, speed, slowest, fedprophet__dma=False) == [stage]


def test_both_have_to_allow_it() -> None:
    """As in the paper's Figure 5: memory for one, two, all; time for one, two, all."""
    speeds = {1: 24e6, 2: 80e6, 3: 200e6}
    for memory, budget in enumerate((ONE, TWO, ALL), start=1):
        for time, speed in speeds.items():
            assert len(assigned(0, budget, speed, slowest=24e6)) == min(memory, time)


def test_tolerance_is_part_of_the_memory() -> None:
    assert assigned(0, 650, 1e12, 1.0) == [0]
    assert assigned(0, 650, 1e12, 1.0, tolerance=0.05) == [0, 1]  # 682
