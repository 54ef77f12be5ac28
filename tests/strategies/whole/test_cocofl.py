"""CoCoFL on the in-process grid, with clients that freeze different layers in int8; its equations by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    TRIO,
    RecordingGrid,
    a_blueprint,
    arrays_of,
    clients_of,
    examples_of,
    few_digits,
    first_arrays,
    fleet_json,
    model_of,
    run_in_parts,
    run_local,
    same,
    tiny_settings,
    training,
)
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.device_profiles.fleet import load_fleet
from piecework.models.cascade import unit_of
from piecework.models.int8 import Affine, Gate, Int8Conv2d, convolve, find_pairs, fuse, quantise, spread, to_int8
from piecework.models.layer_statistics import layer_statistics
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import cost_model_for
from piecework.plans.plan import make_plan, planner_for, tasks_of_round
from piecework.plans.question import ask
from piecework.server_app.records import RunDir
from piecework.strategies import find_method
from piecework.strategies.whole.cocofl.client import frozen_around, learned_units
from piecework.strategies.whole.cocofl.server import ShareMean, largest_runs
from piecework.training.loop import PieceModel

# ---- int8, by hand


def test_values_by_hand() -> None:
    values, scale = quantise(torch.tensor([-2.0, 1.2, 0.5, 0.0]))
    assert values.tolist() == [-127, 76, 32, 0]  # 63.5 for each 1: 76.2 and 31.75 are rounded
    assert (values.dtype, float(scale)) == (torch.int8, pytest.approx(2 / 127))
    nothing, scale = quantise(torch.zeros(3))
    assert nothing.tolist() == [0, 0, 0]
    assert float(scale) > 0


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Whole numbers up to 127, which is among them: they are int8 with a scale of 1."""
    found = torch.randint(-126, 127, shape, generator=torch.Generator().manual_seed(seed)).float()
    found.view(-1)[0] = 127
    return found


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "edge"),
    [(3, 1, 1, 8), (3, 2, 1, 8), (3, 2, 1, 9), (1, 1, 0, 4), (1, 2, 0, 7), (5, 1, 2, 9), (5, 1, 0, 12), (4, 4, 0, 8)],
)
def test_whole_numbers_lose_nothing(kernel: int, stride: int, padding: int, edge: int) -> None:
    """Forward and backward equal float32's, also where images are computed one after another (128 x 128 pixels)."""
    for size in (edge, 128) if kernel == 3 else (edge,):
        x = whole_numbers(2, 3, size, size, seed=1).requires_grad_()
        weight = whole_numbers(4, 3, kernel, kernel, seed=2)
        expected = F.conv2d(x, weight, None, stride, padding)
        one = torch.tensor(1.0)
        found = convolve(x.detach(), weight.to(torch.int8), one, None, stride, padding)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        gradient = whole_numbers(*expected.shape, seed=3)
        expected.backward(gradient)
        assert x.grad is not None
        wide = spread(gradient, x.shape, kernel, stride, padding)
        flipped = weight.to(torch.int8).flip(2, 3).transpose(0, 1)
        torch.testing.assert_close(convolve(wide, flipped, one, None, 1, 0), x.grad, rtol=0, atol=0)


def test_a_norm_is_fused_by_hand() -> None:
    conv, norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1, eps=0.0)
    for parameter, value in ((conv.weight, 2.0), (conv.bias, 1.0), (norm.weight, 5.0), (norm.bias, 6.0)):
        nn.init.constant_(parameter, value)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.fill_(3.0)
    norm.running_var.fill_(4.0)
    weight, bias = fuse(conv, norm)
    assert bias is not None
    assert (weight.item(), bias.item()) == (5.0, 1.0)  # 5 / 2 * 2, and 6 + 5 / 2 * (1 - 3)


def test_a_frozen_relu_and_a_frozen_norm_by_hand() -> None:
    x = torch.tensor([[-1.0, 2.0], [0.0, 3.0]], requires_grad=True)
    out = Gate()(x * 1)
    out.backward(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    assert out.tolist() == [[0, 2], [0, 3]]
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 6], [0, 8]]
    norm = nn.BatchNorm2d(3).eval()
    for array in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert array is not None
        nn.init.uniform_(array, 0.5, 2)
    z = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(Affine(norm)(z), norm(z))


@pytest.mark.parametrize("name", ["resnet10", "preresnet20", "vgg11", "lenet5", "cnn4"])
def test_frozen_atoms_compute_nearly_the_same(name: str) -> None:
    """Outputs are off by about a percent of the largest value. All convolutions are int8."""
    shape = {"lenet5": (1, 28, 28), "cnn4": (3, 64, 64)}.get(name, (3, 16, 16))
    blueprint = build_blueprint(name, num_classes=10, input_shape=shape, width=0.25)
    torch.manual_seed(0)
    z = torch.randn(4, *shape)
    for number, atom in enumerate(blueprint.atoms):
        plain, frozen = atom.build().eval(), atom.build().eval()
        frozen.load_state_dict(plain.state_dict())
        to_int8(frozen, find_pairs(atom.build, blueprint.shape_before(number)))
        assert not [layer for layer in frozen.modules() if isinstance(layer, nn.Conv2d)]
        assert [*frozen.parameters()] == [] or not any(p.requires_grad for p in frozen.parameters())
        one, other = z.clone().requires_grad_(), z.clone().requires_grad_()
        expected, found = plain(one), frozen(other)
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        found.backward(gradient)
        assert one.grad is not None and other.grad is not None
        assert float((found - expected).detach().abs().max() / expected.detach().abs().max()) < 0.03
        # A ReLU may be open in one and shut in the other, and a pooling may take another pixel.
        assert float(F.cosine_similarity(one.grad.flatten(), other.grad.flatten(), dim=0)) > 0.9
        z = expected.detach()


# ---- configurations and aggregation, by hand


@pytest.mark.parametrize(
    ("costs", "allowed", "found"),
    [
        ([4, 3, 2, 1], 5, [(0,), (1, 2), (2, 3)]),
        ([4, 3, 2, 1], 10, [(0, 1, 2, 3)]),
        ([4, 3, 2, 1], 6, [(0,), (1, 2, 3)]),
        ([9, 3, 2], 5, [(1, 2)]),
        ([3, 9, 3], 5, [(0,), (2,)]),
        ([9, 9], 5, []),
    ],
)
def test_the_largest_runs(costs: list[int], allowed: int, found: list[tuple[int, ...]]) -> None:
    assert largest_runs(len(costs), lambda i, j: sum(costs[i:j]) <= allowed) == found


def test_a_layer_moves_by_the_share_that_trained_it() -> None:
    mean = ShareMean()
    mean.total = 8.0
    mean.add({"a": np.array([4.0], np.float32), "seen": np.array(3)}, 1)
    mean.add({"a": np.array([6.0], np.float32), "seen": np.array(5)}, 3)
    assert mean.over("a", np.array([10.0], np.float32)) == [7.75]  # half of 5.5 and half of 10
    assert mean.over("seen", np.array(1)) == 5


# ---- runs

SMALL: dict[str, Any] = TRIO | {
    "strategy": "cocofl",
    "num_rounds": 4,
    "training__local_iterations": 2,
    "fleet": fleet_json(rich=1.1, some=0.75, poor=0.6),
}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RecordingGrid]:
    run = run_local(
        tmp_path_factory.mktemp("whole"), RecordingGrid, **SMALL | {"evaluation__on_clients_every": 1, "num_rounds": 4}
    )
    return run, RecordingGrid.last


@pytest.mark.slow
def test_each_trains_what_fits(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    records = whole_run[0].rounds()
    assert all(record["trained_atoms"]["0"] == [0, 1, 2, 3, 4] for record in records)
    assert len({tuple(record["trained_atoms"]["1"]) for record in records}) > 1  # drawn anew in each round
    for record in records:
        assert len(record["trained_atoms"]["1"]) >= len(record["trained_atoms"]["2"])
        for client in record["clients"]:
            assert client["status"] == "ok"
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
            assert 0 < client["evaluation_peak"] <= client["evaluation_predicted"]
        costs = [client["flops"] for client in record["clients"]]
        assert costs[0] > costs[1] > costs[2] > 0


def test_the_models_of_a_run_by_hand(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    """Only what was trained comes back, and moves by its share; all else stays as it is, to the bit."""
    run, grid = whole_run
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}"})
    model = first_arrays(settings)
    for record in run.rounds():
        number = str(record["round"])
        replies = [m for m in training(grid.received) if m.metadata.group_id == number]
        total = sum(map(examples_of, replies))
        for name in [name for name in model if not name.endswith("tracked")]:
            sent = [(arrays_of(m)[name].astype(np.float64), examples_of(m)) for m in replies if name in arrays_of(m)]
            weight = sum(n for _, n in sent)
            if sent:
                mean = sum(a * n for a, n in sent) / weight
                model[name] = (weight / total * mean + (1 - weight / total) * model[name]).astype(np.float32)
        came = [{unit_of(name) for name in arrays_of(m)} for m in replies]
        trained = [record["trained_atoms"][str(client)] for client in range(3)]
        expected = [{f"atoms.{atom}" for atom in atoms} | ({"head"} if 4 in atoms else set()) for atoms in trained]
        assert sorted(map(sorted, came)) == sorted(map(sorted, expected))
    last = model_of(run)
    for name in [name for name in model if not name.endswith("tracked")]:
        np.testing.assert_allclose(last[name], model[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("trained", [(0,), (2,), (3, 4)])
def test_what_is_frozen_is_int8(trained: tuple[int, ...]) -> None:
    blueprint = a_blueprint(batch_norm="running")
    torch.manual_seed(0)
    piece = frozen_around(trained)(blueprint, range(5), "head", blueprint.build_unit)
    piece.train(True)
    before = {unit: {k: v.clone() for k, v in module.state_dict().items()} for unit, module in piece.units().items()}
    F.cross_entropy(piece.logits(torch.randn(8, 1, 8, 8)), torch.arange(8)).backward()
    for atom in range(5):
        module = piece.modules[f"atoms.{atom}"]
        small = [layer for layer in module.modules() if isinstance(layer, Int8Conv2d)]
        if atom in trained:
            assert small == []
            assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in module.parameters())
        else:
            assert [(layer.weight.dtype, layer.bias is None) for layer in small] == [(torch.int8, False)]
            assert [*module.parameters()] == []
            assert not module.training
            for name, value in module.state_dict().items():
                assert torch.equal(value, before[f"atoms.{atom}"][name])
    assert all((p.grad is not None) == (4 in trained) for p in piece.head.parameters())


def test_gradients_behind_frozen_layers_are_nearly_those_of_float32() -> None:
    blueprint = a_blueprint(batch_norm="running")
    torch.manual_seed(0)
    modules = {unit: blueprint.build_unit(unit) for unit in blueprint.units()}
    x, y = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    found = []
    for piece_class in (PieceModel, frozen_around((1,))):

        def load(unit: str) -> nn.Module:
            module = blueprint.build_unit(unit)
            module.load_state_dict(modules[unit].state_dict())
            return module

        piece = piece_class(blueprint, range(5), "head", load)
        for module in piece.units().values():
            module.eval()
        F.cross_entropy(piece.logits(x), y).backward()
        gradients = [p.grad for p in piece.modules["atoms.1"].parameters()]
        found.append(torch.cat([g.flatten() for g in gradients if g is not None]))
    assert float(F.cosine_similarity(found[0], found[1], dim=0)) > 0.95


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    settings = SMALL | {"num_rounds": 3}
    whole = run_local(tmp_path / "whole", **settings)
    broken = run_in_parts(tmp_path / "broken", (1, 2), **settings)
    assert [r["trained_atoms"] for r in broken.rounds()] == [r["trained_atoms"] for r in whole.rounds()]
    assert same(model_of(broken), model_of(whole))


def test_a_plan_agrees_with_a_run(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}"})
    found = make_plan(settings, ask(settings))
    assert found["coverage"]["says"] == ""
    (stage,) = found["fleet"]["stages"]
    assert stage["participation"] == 1
    assert stage["peak_bytes"] == max(client["measured_peak"] for client in clients_of(whole_run[0]))


def test_a_plan_draws_for_each_client_and_round_what_the_run_draws(whole_run: tuple[RunDir, RecordingGrid]) -> None:
    """One draw for all would tell of one run of layers as of all that a device ever trains."""
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}"})
    planner, (states,) = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    for record in whole_run[0].rounds():
        tasks = tasks_of_round(planner, 0, record["round"], states, 20)
        assert {task.client: task.needed for task in tasks} == {
            c["client"]: c["predicted_peak"] for c in record["clients"]
        }


@pytest.mark.parametrize("seed", [1, 2])
def test_a_plan_counts_what_can_learn_and_not_what_stays_frozen(seed: int) -> None:
    """The rich client trains all, and another one, in time, the parameters of all runs that fit it, whatever is drawn first."""
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}", "seed": seed})
    model = a_blueprint(batch_norm="running")
    cut = find_method("cocofl").make_cut(model, cost_model_for(settings, model), settings)
    sizes = {unit: layer_statistics(model, unit).parameters for unit in model.units()}
    trained = make_plan(settings, ask(settings))["trained"]
    found = trained["devices"]
    assert found["rich"] == trained["together"] == 1.0
    for device, budget in (("some", 0.75), ("poor", 0.6)):
        runs = cut.choices(int(budget * cut.bytes(cut.whole)))
        reached = {unit for run in runs for unit in learned_units(model, run)}
        assert found[device] == pytest.approx(sum(sizes[unit] for unit in reached) / sum(sizes.values()))
        assert found[device] < 0.95


def test_runs_that_fit_are_as_long_as_possible() -> None:
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}"})
    model = a_blueprint(batch_norm="running")
    cut = find_method("cocofl").make_cut(model, cost_model_for(settings, model), settings)
    allowed = int(0.75 * cut.bytes(cut.whole))
    choices = cut.choices(allowed)
    assert len(choices) > 1
    for run in choices:
        assert cut.needed_bytes(cut.run(run[0], run[-1] + 1)) <= allowed
        for first, last in ((run[0] - 1, run[-1]), (run[0], run[-1] + 1)):
            assert first < 0 or last > 4 or cut.needed_bytes(cut.run(first, last + 1)) > allowed
    assert cut.min_budget() == min(cut.needed_bytes(cut.run(n, n + 1)) for n in range(5))


@pytest.mark.parametrize("norm", ["measured", "static", "batch", "local"])
def test_frozen_norms_need_running_statistics(norm: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"architecture.batch-norm = '{norm}': cocofl fuses frozen norms"):
        run_local(tmp_path, **SMALL | {"architecture__batch_norm": norm})


class PreActivated(nn.Module):
    """A convolution whose output a norm and a skip read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y + self.norm(y)


def twice() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    return nn.Sequential(nn.Conv2d(3, 3, 3), norm, nn.Conv2d(3, 3, 3), norm)


@pytest.mark.parametrize(
    ("build", "pairs"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)), (("0", "1"),)),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(3)), (("0", ""),)),
        (PreActivated, (("conv", ""),)),
        (twice, (("0", ""), ("2", ""))),
    ],
)
def test_norms_that_are_fused(build: Any, pairs: Any) -> None:
    """Only those that alone read what one convolution makes, before anything changes it."""
    assert find_pairs(build, (3, 8, 8)) == pairs


def test_norms_of_features_in_a_row() -> None:
    norm = nn.BatchNorm1d(4).eval()
    nn.init.normal_(norm.weight)
    assert norm.running_mean is not None
    nn.init.normal_(norm.running_mean)
    for shape in ((5, 4), (5, 4, 4)):
        z = torch.randn(*shape)
        torch.testing.assert_close(Affine(norm)(z), norm(z))
