"""The model that PriSM and OrthDrop evaluate and save, composed of what their clients train."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from helpers import TRIO, arrays_of, clients_of, digits, fleet_json, model_of, numpy_of, run_local, same, training
from safetensors.numpy import load_file
from test_prism import assigned, strategies

from piecework.models.cascade import Blueprint, Cascade
from piecework.models.kernels import compose, decompose, inclusion, sample
from piecework.models.variant import vary
from piecework.strategies.low_rank.prism.server import PriSM
from piecework.strategies.low_rank.prism.settings import PriSMSettings
from piecework.strategies.low_rank.prism.sub_model import Drawn, SubModel

FAST = {"training__local_iterations": 1, "evaluation__every": 0, "architecture__batch_norm": "batch"}
EQUAL = TRIO | FAST | {"strategy": "prism", "prism__keep_ratios": "0.5", "fleet": "unlimited"}


def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[PriSM, ArrayRecord]:
    """The strategy of a run of one step, and its trained arrays."""
    made = strategies(monkeypatch)
    run = run_local(tmp_path, **EQUAL | changes)
    return made[-1], ArrayRecord({name: Array(value) for name, value in model_of(run).items()})


def outputs(blueprint: Blueprint, arrays: dict[str, np.ndarray], x: torch.Tensor) -> torch.Tensor:
    model = Cascade(blueprint)
    model.load_state_dict({name: torch.from_numpy(arrays[name].copy()) for name in model.state_dict()})
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(x)
    return logits


def noise(file: Path, shape: tuple[int, ...], below: int, dtype: Any = np.uint8) -> str:
    """A data set of 48 + 16 random examples with integers below `below`."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(below, size=(64, *shape)).astype(dtype), np.arange(64) % 2
    np.savez(file, x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])
    return f"npz:{file}"


def images(strategy: PriSM, count: int = 8) -> torch.Tensor:
    return torch.randn(count, *strategy.cut.model.input_shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model", ["resnet10", "convnet"])
def test_channels_that_no_client_has_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    strategy, arrays = trained(tmp_path, monkeypatch, model=model, architecture__width=0.125)
    drawn, rng = numpy_of(arrays), np.random.default_rng(0)
    for layer in strategy.factors:
        norm, count = strategy.norms[layer.weight], strategy.cut.shapes[0][layer.u][0]
        for name in (layer.weight, f"{norm}.weight", f"{norm}.bias"):
            drawn[name] = drawn[name].copy()
            assert 0 < count < len(drawn[name])
            drawn[name][count:] = rng.standard_normal(drawn[name][count:].shape)
    redrawn = ArrayRecord({name: Array(value) for name, value in drawn.items()})
    x = images(strategy)
    one, other = (outputs(strategy.cut.model, numpy_of(strategy.serve(a)), x) for a in (arrays, redrawn))
    torch.testing.assert_close(one, other)
    plain = (outputs(strategy.cut.model, numpy_of(a), x) for a in (arrays, redrawn))
    assert (next(plain) - next(plain)).abs().max() > 0.01


def test_a_block_contributes_as_much_as_in_the_mean_over_draws_of_its_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four channels, of which a client computes two, with fixed kernels and a fixed draw inside the block."""
    strategy, arrays = trained(
        tmp_path, monkeypatch, model="resnet10", architecture__width=1 / 16, prism__output_channels="random"
    )
    outer, inner = "atoms.1.conv2.weight", "atoms.1.conv1.weight"
    held = numpy_of(arrays)
    for name in (outer, inner):  # two kernels are left
        _, v, u = decompose(held[name])
        held[name] = compose(v[:2], u[:, :2])
    rows = np.array([0, 2])
    for name in ("atoms.1.bn1.weight", "atoms.1.bn1.bias"):
        held[name] = np.where(np.isin(np.arange(4), rows), np.array([1.5, 9, -0.5, 9]), 0).astype(np.float32)
    arrays = ArrayRecord({name: Array(value) for name, value in held.items()})
    z = torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(2)).double()

    def contribution(blueprint: Blueprint, held: dict[str, np.ndarray]) -> torch.Tensor:
        block = blueprint.build_unit("atoms.1")
        state = {name: torch.from_numpy(held[f"atoms.1.{name}"].copy()) for name in block.state_dict()}
        block.load_state_dict(state)
        found: list[torch.Tensor] = []
        block.get_submodule("bn2").register_forward_hook(lambda module, args, out: found.append(out.clone()))
        with torch.no_grad():
            block.double().eval()(z)
        return found[0]

    each = assigned(strategy)[0]
    level, memo, sums = each.assignment.config.level, each.assignment.memo, []
    for channels in itertools.combinations(range(4), 2):
        drawn = Drawn(
            {**memo.kernels, **{name: np.arange(2) for name in (outer, inner)}},
            {**memo.rows, outer: np.array(channels), inner: rows},
        )
        small = vary(strategy.cut.model, each.task.variant)
        sent = SubModel(strategy, lambda drawn=drawn: strategy.drawn_indices(level, drawn))(arrays)  # type: ignore[misc]
        sums.append(contribution(small, numpy_of(sent)))
    served = contribution(strategy.cut.model, numpy_of(strategy.serve(arrays)))
    torch.testing.assert_close(torch.stack(sums).mean(0), served, rtol=1e-3, atol=1e-4)
    assert served.abs().max() > 0.1


def test_without_a_norm_a_kernel_counts_with_its_probability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vision transformer's MLPs: the mean of many sub-models' weights."""
    options = {"model": "deit-tiny", "architecture__options": "depth=1,patch=4", "architecture__width": 0.25}
    strategy, arrays = trained(tmp_path, monkeypatch, **options)
    assert not strategy.norms and len(strategy.factors) == 2
    served = strategy.serve(arrays)
    for layer in strategy.factors:
        sigma, v, u = (
            each if isinstance(each, np.ndarray) else each.numpy() for each in strategy.kernels(layer, arrays)
        )
        rng, total, kept = np.random.default_rng(0), np.zeros(arrays[layer.weight].shape), strategy.cut.shapes[0]
        for _ in range(2000):
            chosen = sample(sigma, kept[layer.v][0], strategy.settings.of(PriSMSettings).kappa, rng)
            total += compose(v[chosen], u[:, chosen]) / 2000
        weight = served[layer.weight].numpy()
        assert np.abs(total - weight).max() < 0.03 * np.abs(weight).max()
        assert np.abs(arrays[layer.weight].numpy() - weight).max() > 0.1 * np.abs(weight).max()
        assert layer.bias and served[layer.bias[1]] == arrays[layer.bias[1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "scaled"),
    [
        ({"model": "preresnet20"}, {"conv2"}),  # the last layer of a block; a norm follows the first
        ({"model": "convnet", "architecture__batch_norm": "running"}, {"conv"}),  # norms do not rescale
        ({"model": "convnet"}, set()),
        ({"model": "lenet5"}, {"conv"}),  # no norms at all; the first layer has one channel
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
)
def test_which_layers_are_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], scaled: set[str]
) -> None:
    """W = sum_i pi_i u'_i v'_i where no norm rescales it; rows beyond the first r, and their bias, are 0 without a norm."""
    if options["model"] == "lenet5":
        options |= {"dataset": noise(tmp_path / "noise.npz", (28, 28), 256)}
    strategy, arrays = trained(tmp_path, monkeypatch, **{"architecture__width": 0.25} | options)
    served, found = numpy_of(strategy.serve(arrays)), set()
    for layer in strategy.factors:
        weight = arrays[layer.weight].numpy()
        sigma, v, u = strategy.kernels(layer, arrays)
        kept = strategy.cut.shapes[0]
        pi = inclusion(sigma, kept[layer.v][0], strategy.settings.of(PriSMSettings).kappa)
        by_hand = compose(v.numpy() * pi.astype(np.float32).reshape(-1, *(1,) * (v.numpy().ndim - 1)), u.numpy())
        rows = len(weight) if layer.weight in strategy.norms else kept[layer.u][0]
        if np.allclose(served[layer.weight][:rows], by_hand[:rows], rtol=1e-4, atol=1e-6):
            found.add(layer.weight.split(".")[-2])
        else:
            np.testing.assert_array_equal(served[layer.weight][:rows], weight[:rows])
        assert not served[layer.weight][rows:].any()
        if layer.bias:
            assert not served[layer.bias[1]][rows:].any()
            np.testing.assert_array_equal(served[layer.bias[1]][:rows], arrays[layer.bias[1]].numpy()[:rows])
    assert found == scaled


@pytest.mark.slow
def test_gates_of_an_lstm_are_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model": "lstm-imdb", "dataset": noise(tmp_path / "noise.npz", (6,), 1000, np.int64)}
    strategy, arrays = trained(tmp_path, monkeypatch, **options)
    served = numpy_of(strategy.serve(arrays))
    for layer in strategy.factors:
        sigma, v, u = strategy.kernels(layer, arrays)
        pi = inclusion(sigma, strategy.cut.shapes[0][layer.v][0], strategy.settings.of(PriSMSettings).kappa)
        by_hand = compose(v.numpy() * pi.astype(np.float32)[:, None], u.numpy())
        np.testing.assert_allclose(served[layer.weight], by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_mixed_clients_have_the_mean_of_their_probabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model": "preresnet20", "architecture__width": 0.25, "prism__keep_ratios": "0.5,0.25"}
    strategy, arrays = trained(tmp_path, monkeypatch, **options)
    layer = next(layer for layer in strategy.factors if layer.weight not in strategy.norms)
    sigma, kappa = strategy.kernels(layer, arrays)[0], strategy.settings.of(PriSMSettings).kappa
    half, quarter = (inclusion(sigma, strategy.cut.shapes[n][layer.v][0], kappa) for n in (0, 1))
    found = strategy.portions(layer, arrays, {0: 1, 1: 2})
    assert found is not None
    np.testing.assert_allclose(found, (half + 2 * quarter) / 3)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_probabilities_of_kernels(kept: int) -> None:
    """Equal kernels have the same. Those of many kernels are what drawing gives, and in sum `kept`."""
    np.testing.assert_allclose(inclusion(np.ones(4, np.float32), kept, 2.0), np.full(4, kept / 4), atol=1e-9)
    sigma = np.geomspace(1, 1e-3, 64).astype(np.float32)
    found, rng = inclusion(sigma, 8 * kept, 2.0), np.random.default_rng(0)
    drawn = sum(np.isin(np.arange(64), sample(sigma, 8 * kept, 2.0, rng)) for _ in range(2000)) / 2000
    assert found.sum() == pytest.approx(8 * kept)
    assert np.abs(found - drawn).max() < 0.04  # 3.6 standard deviations of a mean of 2000
    assert inclusion(np.zeros(4, np.float32), kept, 2.5).sum() == pytest.approx(kept)


@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("sigma", [(0.9, 0.4, 0.37, 0.29), (1.0, 0.1, 0.01, 0.001), (1.0, 1.0, 0.1, 0.0)])
def test_probabilities_of_a_skewed_layer_are_those_of_all_orders_of_draws(sigma: tuple[float, ...], kept: int) -> None:
    weights, exact = np.asarray(sigma, np.float32).astype(float) ** 2.5, np.zeros(4)
    for order in itertools.permutations(range(4), kept):
        left = [weights.sum() - sum(weights[k] for k in order[:n]) for n in range(kept)]
        exact[[*order]] += math.prod(weights[k] / rest for k, rest in zip(order, left, strict=True))
    np.testing.assert_allclose(inclusion(np.asarray(sigma, np.float32), kept, 2.5), exact, atol=1e-4)


@pytest.mark.slow
def test_mixed_clients_scale_by_their_mean_and_serve_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight channels, two clients compute four and one computes two; the channels are drawn, or the first ones."""
    fleet = fleet_json({"half": 0.5, "quarter": 0.25, "other": 0.5}, half=9.0, quarter=9.0, other=9.0)
    changes = {"model": "resnet10", "architecture__width": 0.125, "prism__keep_ratios": "0.5,0.25", "fleet": fleet}
    for channels, expected in (("random", [10 / 24] * 8), ("first", [1] * 4 + [0] * 4), ("all", [1] * 8)):
        strategy, arrays = trained(tmp_path / channels, monkeypatch, prism__output_channels=channels, **changes)
        factor = strategy.serve(arrays)["atoms.1.bn2.weight"].numpy() / arrays["atoms.1.bn2.weight"].numpy()
        np.testing.assert_allclose(factor, expected, rtol=1e-6)


def test_orthdrop_serves_the_kernels_that_clients_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_json({"half": 0.5, "quarter": 0.25}, half=9.0, quarter=9.0)
    changes = {"strategy": "orthdrop", "prism__keep_ratios": "0.5,0.25", "fleet": fleet}
    strategy, arrays = trained(tmp_path, monkeypatch, **changes)
    served = numpy_of(strategy.serve(arrays))
    for layer in strategy.factors:
        rank = strategy.full[layer.v][0]
        assert np.linalg.matrix_rank(arrays[layer.weight].numpy().reshape(len(served[layer.weight]), -1)) == rank
        assert np.linalg.matrix_rank(served[layer.weight].reshape(len(served[layer.weight]), -1)) == rank // 2


@pytest.mark.slow
def test_the_served_model_is_saved_and_measured_and_the_trained_one_goes_on(tmp_path: Path, grids: Any) -> None:
    """Messages of training are those of the trained model, whether or not the served one was composed in between."""
    changes = EQUAL | {"num_rounds": 2, "architecture__batch_norm": "measured"}
    grid = grids()
    run = run_local(tmp_path / "a", grid, **changes | {"evaluation__every": 1})
    sent = [arrays_of(message) for message in training(grid.last.sent)]
    other = grids()
    run_local(tmp_path / "b", other, **changes)
    assert all(map(same, sent, [arrays_of(message) for message in training(other.last.sent)]))
    kept, saved = model_of(run), load_file(run.path / "model.safetensors")
    norm = "atoms.1.bn.weight"
    count = len(kept[norm])
    assert not saved[norm][count // 2 :].any()
    assert saved[norm][: count // 2].all() and kept[norm].all()
    assert [client["status"] for client in clients_of(run, 2)] == ["ok"] * 3


def test_statistics_are_those_of_the_served_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third norm's means, on the features of the training images: those of the trained model are elsewhere."""
    made = strategies(monkeypatch)
    run = run_local(tmp_path, **EQUAL | {"model": "convnet", "architecture__batch_norm": "measured"})
    strategy, data = made[-1], digits()
    saved = load_file(run.path / "model.safetensors")
    arrays = ArrayRecord({name: Array(value) for name, value in model_of(run).items()})
    x = torch.tensor(data.inputs).permute(0, 3, 1, 2).float() / 255
    x = (x - x.mean()) / x.std()

    def means(held: dict[str, np.ndarray]) -> np.ndarray:
        model, found = Cascade(strategy.cut.model), list[torch.Tensor]()
        model.load_state_dict({name: torch.from_numpy(held[name].copy()) for name in model.state_dict()})
        norm = model.get_submodule("atoms.2.bn")
        norm.register_forward_pre_hook(lambda module, args: found.append(args[0].mean((0, 2, 3))))
        with torch.no_grad():
            model(x)
        return found[0].numpy()

    measured = saved["atoms.2.bn.running_mean"]
    served, trained = means(numpy_of(strategy.serve(arrays))), means(numpy_of(arrays))
    assert np.abs(measured - served).max() < 0.1 * np.abs(served - trained).max()
