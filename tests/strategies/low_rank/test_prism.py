"""PriSM on the in-process grid: what travels, how kernels are averaged and put together, who trains how much."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from helpers import (
    TRIO,
    arrays_of,
    clients_of,
    first_arrays,
    fleet_json,
    model_of,
    run_local,
    same,
    training,
)
from safetensors.numpy import load_file

from piecework.federation.aggregation import WeightedMean
from piecework.models.kernels import compose, decompose
from piecework.models.width import Indices
from piecework.strategies.low_rank.prism.server import PriSM
from piecework.strategies.low_rank.prism.sub_model import SubModel
from piecework.strategies.method import Assigned, Round
from piecework.strategies.resources import ClientResources

SMALL = {"strategy": "prism", "training.lr": 0.05}
MIXED = fleet_json(rich=2.0, middle=0.7, poor=0.6)


def strategies(monkeypatch: pytest.MonkeyPatch) -> list[PriSM]:
    """The strategies that runs make from now on."""
    made: list[PriSM] = []
    begin, details = PriSM.begin, PriSM.details

    def note(self: PriSM, fleet: ClientResources) -> None:
        made.append(self)
        begin(self, fleet)

    def keep(self: PriSM, current: Round) -> dict[str, Any]:
        vars(self)["last"] = current
        return details(self, current)

    monkeypatch.setattr(PriSM, "begin", note)
    monkeypatch.setattr(PriSM, "details", keep)
    return made


def assigned(strategy: PriSM) -> dict[int, Assigned]:
    """What the clients of the last round were assigned."""
    last: Round = vars(strategy)["last"]
    return last.assigned


def indices_of(each: Assigned) -> Mapping[str, Indices]:
    assert isinstance(each.assignment.sends, SubModel)
    return each.assignment.sends.indices()


def test_each_client_trains_the_largest_sub_model_that_fits(tmp_path: Path) -> None:
    run = run_local(tmp_path, **TRIO, **SMALL, fleet=MIXED)
    record = run.rounds()[-1]
    keeps = record["keep_ratios"]
    assert len(set(keeps.values())) == 3 and keeps["0"] == 0.8
    for client in clients_of(run):
        assert client["status"] == "ok"
        assert client["predicted_peak"] == client["measured_peak"] <= client["budget"]


@pytest.mark.slow
@pytest.mark.parametrize("channels", ["first", "random"])
def test_entries_are_averaged_over_the_clients_that_had_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grids: Callable[..., Any], channels: str
) -> None:
    """Eq. 5, from the messages themselves; what no client had is as it was, to the bit, before the kernels are put together."""
    made, aggregated = strategies(monkeypatch), list[ArrayRecord]()
    composed = PriSM.compose
    monkeypatch.setattr(
        PriSM, "compose", lambda self, whole, names: (aggregated.append(whole), composed(self, whole, names))[1]
    )
    grid = grids()
    run = run_local(tmp_path, grid, **TRIO, **SMALL, fleet=MIXED, prism__output_channels=channels)
    (strategy,), (whole,) = made, aggregated
    sent, replies = training(grid.last.sent), training(grid.last.received)
    arrays = ArrayRecord({n: Array(a) for n, a in first_arrays(strategy.settings).items()})
    before = strategy.factor(arrays)
    layer, checked = strategy.factors[1], 0
    clients = [*assigned(strategy).values()]
    held = [indices_of(each) for each in clients]
    for message, each in zip(sent, clients, strict=True):
        assert same(arrays_of(message), {n: a.numpy() for n, a in each.assignment.sends(arrays).items()})
    for name in (layer.v, layer.u, "atoms.1.bn.weight", "head.fc.weight"):
        old, new = before[name].numpy(), whole[name].numpy()
        total, count = np.zeros(old.shape), np.zeros(old.shape)
        for message, where in zip(replies, held, strict=True):
            total[np.ix_(*where[name])] += arrays_of(message)[name]
            count[np.ix_(*where[name])] += 1
        np.testing.assert_allclose(new[count > 0], (total[count > 0] / count[count > 0]), rtol=1e-6)
        assert (new[count == 0] == old[count == 0]).all()
        checked += int((count == 0).sum())
    assert checked
    model = model_of(run)
    assert (model[layer.weight] == compose(whole[layer.v].numpy(), whole[layer.u].numpy())).all()


def test_by_hand() -> None:
    """Three kernels of a 3 x 3 layer, two clients with two of them each: 0 and 1, 0 and 2; each has the first two rows."""
    weight = np.array([[4.0, 0, 0], [0, 1, 0], [0, 0, 0.25]], dtype=np.float32)
    _, v, u = decompose(weight)
    np.testing.assert_allclose(u, np.diag([2, 1, 0.5]), atol=1e-6)
    mean = WeightedMean()
    for kernels, add in (([0, 1], 0.2), ([0, 2], 0.6)):
        rows, columns = np.array([0, 1]), np.array(kernels)
        mean.add(
            {"v": v[columns] + np.float32(add), "u": u[np.ix_(rows, columns)] - np.float32(add)},
            1,
            {"v": (columns, np.arange(3)), "u": (rows, columns)},
            {"v": v.shape, "u": u.shape},
        )
    new_v, new_u = mean.over("v", v), mean.over("u", u)
    by_v = [[2.4, 0.4, 0.4], [0.2, 1.2, 0.2], [0.6, 0.6, 1.1]]
    by_u = [[1.6, -0.2, -0.6], [-0.4, 0.8, -0.6], [0, 0, 0.5]]  # the third row is no client's
    np.testing.assert_allclose(new_v, by_v, atol=1e-6)
    np.testing.assert_allclose(new_u, by_u, atol=1e-6)
    composed = compose(new_v, new_u)
    np.testing.assert_allclose(composed, np.array(by_u) @ np.array(by_v), atol=1e-6)
    sigma, *again = decompose(composed)
    np.testing.assert_allclose(compose(*again), composed, atol=1e-5)
    np.testing.assert_allclose(np.square(sigma).sum(), np.square(composed).sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet10", "convnet"])
def test_all_output_channels_are_trained_where_they_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grids: Callable[..., Any], model: str
) -> None:
    """With the first ones, where all clients have the same ratio, the others are never trained."""
    changes = (
        TRIO | SMALL | {"model": model, "architecture__width": 0.125, "prism__keep_ratios": "0.4", "fleet": "unlimited"}
    )
    trained = {}
    for channels in ("first", "random"):
        made, grid = strategies(monkeypatch), grids()
        run = run_local(
            tmp_path / channels,
            grid,
            **changes,
            prism__output_channels=channels,
            num_rounds=4 if channels == "random" else 2,
            training__local_iterations=1,
            evaluation__every=0,
        )
        for client in clients_of(run):
            assert client["measured_peak"] == client["predicted_peak"]
        norm = "atoms.1.bn1.weight" if model == "resnet10" else "atoms.1.bn.weight"
        before = first_arrays(made[-1].settings)[norm]
        trained[channels] = set(np.flatnonzero(model_of(run)[norm] != before))
        rows = [arrays_of(m) for m in training(grid.last.sent)]
        places = [tuple(array) for arrays in rows for name, array in arrays.items() if name.endswith(".rows")]
        assert (len(set(places)) > 3) == (channels == "random")
    count = len(before)
    assert trained["first"] == set(range(math.ceil(0.4 * count)))
    assert trained["random"] == set(range(count))


@pytest.mark.slow
def test_kernels_differ_between_clients_and_rounds_and_not_between_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = strategies(monkeypatch)
    for folder in ("a", "b"):
        run_local(tmp_path / folder, **TRIO, **SMALL, fleet=fleet_json(poor=0.6), num_rounds=2)
    name = made[0].factors[1].weight
    chosen, again = (
        [assigned(strategy)[client].assignment.memo.kernels[name].tolist() for client in range(3)] for strategy in made
    )
    assert len({tuple(each) for each in chosen}) == 3
    assert again == chosen
    first = run_local(tmp_path / "c", **TRIO, **SMALL, fleet=fleet_json(poor=0.6))
    assert first.rounds()[0] and assigned(made[2])[0].assignment.memo.kernels[name].tolist() != chosen[0]


@pytest.mark.slow
def test_every_kernel_is_drawn_sometimes(tmp_path: Path) -> None:
    run = run_local(
        tmp_path,
        **SMALL,
        fleet=fleet_json(poor=0.6),
        num_rounds=8,
        prism__kappa=1.0,
        training__local_iterations=1,
        evaluation__every=0,
    )
    for name in run.rounds()[0]["layers"]:
        drawn = np.array([record["layers"][name]["drawn"] for record in run.rounds()])
        assert drawn.sum(0).min() > 0
        assert drawn.sum(0)[0] > drawn.sum(0)[-1]
        assert 1 < run.rounds()[-1]["layers"][name]["rank"] < run.rounds()[-1]["layers"][name]["kernels"]


def test_a_layer_is_decomposed_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "piecework.strategies.low_rank.prism.server.decompose", lambda w: (calls.append(w.shape), decompose(w))[1]
    )
    run_local(tmp_path, **TRIO, **SMALL, num_rounds=2)
    assert len(calls) == 2 * 4


# ---- rivals


def test_orthdrop_takes_the_top_kernels_and_all_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = strategies(monkeypatch)
    fleet = fleet_json(rich=3.0, poor=1.0)
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": "orthdrop"}, fleet=fleet)
    keeps = run.rounds()[0]["keep_ratios"]
    assert len(set(keeps.values())) == 2
    (strategy,) = made
    for client, each in assigned(strategy).items():
        for layer in strategy.factors:
            v, u = (indices_of(each)[name] for name in (layer.v, layer.u))
            kept = math.ceil(round(keeps[str(client)] * strategy.full[layer.v][0], 6))
            assert v[0].tolist() == u[1].tolist() == list(range(kept))
            assert len(u[0]) == strategy.full[layer.u][0]


def test_prism_with_all_output_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OrthDrop's sub-models, of kernels that are drawn."""
    made = strategies(monkeypatch)
    run = run_local(
        tmp_path, **TRIO, **SMALL, fleet=fleet_json(rich=9.0), prism__keep_ratios="0.5", prism__output_channels="all"
    )
    (strategy,) = made
    for each in assigned(strategy).values():
        held = indices_of(each)
        assert all(len(held[layer.u][0]) == strategy.full[layer.u][0] for layer in strategy.factors)
        assert any(held[layer.v][0].tolist() != list(range(len(held[layer.v][0]))) for layer in strategy.factors)
    assert [client["status"] for client in clients_of(run)] == ["ok"] * 3


def test_every_channel_of_origdrop_has_a_client(tmp_path: Path) -> None:
    fleet = fleet_json(some=0.6, poor=0.3)
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": "origdrop"}, fleet=fleet, prism__keep_ratios="1,0.5,0.25")
    assert set(run.rounds()[0]["width_ratios"].values()) == {0.5, 0.25}
    saved = load_file(run.path / "model.safetensors")["atoms.1.conv.weight"]  # of 16 -> 16 channels
    np.testing.assert_array_equal(saved, model_of(run)["atoms.1.conv.weight"][:8, :8])


# ---- other models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "preresnet20"])
def test_other_models_train(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = TRIO | SMALL | {"model": name, "architecture__width": 0.25}
    run = run_local(tmp_path, **changes, fleet="unlimited", training__local_iterations=2)
    for client in clients_of(run):
        assert client["status"] == "ok"
        assert client["predicted_peak"] == client["measured_peak"] <= client["budget"]


@pytest.mark.slow
def test_deit_learns(tmp_path: Path) -> None:
    """Images of one class are brighter; attention is whole, MLPs have a half of their kernels."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = rng.integers(0, 128, (60, 16, 48, 3))
    x[y == 1] += 127
    np.savez(
        tmp_path / "bright.npz",
        x_train=x[:48].astype(np.uint8),
        y_train=y[:48],
        x_test=x[48:].astype(np.uint8),
        y_test=y[48:],
    )
    changes: dict[str, Any] = TRIO | SMALL | {"model": "deit-tiny", "architecture__options": "depth=2,patch=8"}
    changes |= {
        "dataset": f"npz:{tmp_path / 'bright.npz'}",
        "prism__keep_ratios": "0.5",
        "fleet": "unlimited",
        "training__batch_size": 8,
    }
    changes |= {
        "architecture__width": 0.25,
        "training__local_epochs": 3,
        "training__lr_rounds": 4,
        "training__lr": 0.02,
        "data__partition": "iid",
    }
    whole = run_local(tmp_path / "whole", **changes, num_rounds=4)
    losses = [record["train_loss"] for record in whole.rounds()]
    assert losses[-1] < 0.5 * losses[0]
    assert whole.rounds()[-1]["accuracy"] == 1.0
