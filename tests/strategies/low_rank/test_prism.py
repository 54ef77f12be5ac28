"""PriSM on the in-process grid: what travels, how kernels are averaged and put together, who trains how much."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from helpers import (
    TRIO,
    a_client,
    arrays_of,
    clients_of,
    first_arrays,
    fleet_json,
    model_of,
    run_local,
    same,
    tiny_settings,
    training,
)
from safetensors.numpy import load_file

from piecework.client_app.momentum import MOMENTUM, CarriedMomentum
from piecework.federation.aggregation import WeightedMean
from piecework.models.kernels import compose, decompose
from piecework.models.low_rank import low_rank
from piecework.models.width import Indices
from piecework.strategies.low_rank.prism.client import LowRankModel
from piecework.strategies.low_rank.prism.server import PriSM
from piecework.strategies.low_rank.prism.sub_model import SubModel
from piecework.strategies.method import Assigned, Round
from piecework.strategies.resources import ClientResources
from piecework.training.adam import Adam
from piecework.training.loop import LocalTrainer

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


# ---- momentum that the server averages


def momentum_of(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name.startswith(MOMENTUM)}


@pytest.mark.slow
def test_momentum_is_averaged_entry_by_entry_and_sent_to_the_next(tmp_path: Path, grids: Callable[..., Any]) -> None:
    """Of factors and norms: who gets a kernel gets its momentum; what no client had stays. The rest stays with the client."""
    grid, changes = (
        grids(),
        TRIO | SMALL | {"num_rounds": 3, "prism__server_momentum": True, "prism__keep_ratios": "0.5"},
    )
    run = run_local(tmp_path, grid, **changes, fleet="unlimited")
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    last = {name: array.numpy() for name, array in checkpoint.kept.items() if name.startswith(MOMENTUM)}
    names = {name.removeprefix(MOMENTUM) for name in last}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in names} >= {"v", "u"}
    assert not any(name.startswith(("atoms.0.conv", "head")) for name in names)
    sent = {n: [arrays_of(m) for m in training(grid.last.sent) if m.metadata.group_id == str(n)] for n in (1, 2, 3)}
    assert not any(array.any() for arrays in sent[1] for array in momentum_of(arrays).values())
    assert all(momentum_of(arrays).keys() == last.keys() for arrays in sent[2])
    assert any(array.any() for arrays in sent[2] for array in momentum_of(arrays).values())
    replies = [arrays_of(m) for m in training(grid.last.received) if m.metadata.group_id == "3"]
    norm = next(name for name in last if "norm" in name or "bn" in name)
    r = len(replies[0][norm])
    np.testing.assert_allclose(
        last[norm][:r], np.mean([arrays[norm] for arrays in replies], axis=0), rtol=1e-5, atol=1e-9
    )
    assert not last[norm][r:].any()
    for client in clients_of(run):
        assert client["measured_peak"] == client["predicted_peak"]
    state = next((run.path / "clients").glob("*/0/state/3/momentum/*.safetensors"))
    assert {name.removeprefix(MOMENTUM) for name in load_file(state)}.isdisjoint(names)


class AdamModel(LowRankModel):
    """A low-rank model that Adam trains."""

    optimiser = Adam


@pytest.mark.parametrize("piece_class", [LowRankModel, AdamModel])
def test_a_round_goes_on_with_the_momentum_of_the_last(tmp_path: Path, piece_class: type[LowRankModel]) -> None:
    """Three steps in one task, or two and one in the next: the same weights."""

    def tasks(folder: Path, *steps: int) -> dict[str, np.ndarray]:
        client = a_client(
            folder, tiny_settings(strategy="prism", prism__server_momentum=True, architecture__batch_norm="batch")
        )
        client.blueprint = low_rank(client.blueprint, 0.5)
        for unit in client.blueprint.units():
            torch.manual_seed(0)
            client.store.save(unit, client.blueprint.build_unit(unit))
        examples, atoms = client.local_data(0), range(len(client.blueprint.atoms))
        for number, count in enumerate(steps, start=1):
            client.training_config = replace(
                client.training_config, momentum=0.9, iterations=count, batch_size=len(examples)
            )
            trainer = LocalTrainer(
                lambda: [piece_class(client.blueprint, atoms, "head", client.load())],
                client.training_config,
                carried=CarriedMomentum(client),
            )
            for _ in trainer.epochs():
                trainer.epoch(examples, np.random.default_rng(0), client.cap, f"task {number}")
            (piece,) = trainer.finish()
            client.save(piece)
            client.commit()
            client.old_state, client._new_state = client.store.newest_state(client.round), None
        return dict(client.store.read(client.blueprint.units()))

    once, twice, other = tasks(tmp_path / "a", 3), tasks(tmp_path / "b", 2, 1), tasks(tmp_path / "c", 2)
    for name, array in once.items():
        np.testing.assert_allclose(twice[name], array, rtol=1e-4, atol=1e-6)
    assert not same(once, other)


def test_there_must_be_momentum_to_average(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"prism\.server-momentum = true: it averages momentum, but training\.momentum is 0"
    ):
        run_local(tmp_path, **TRIO | SMALL | {"prism__server_momentum": True, "training__momentum": 0.0})


# ---- ratios that a fleet fixes


@pytest.mark.parametrize("name", ["prism", "orthdrop", "origdrop", "heterofl"])
def test_a_fleet_may_say_how_much_of_a_model_each_device_gets(tmp_path: Path, name: str) -> None:
    """And whose memory that does not fit cannot take part."""
    fleet = fleet_json({"half": 0.5, "quarter": 0.25, "poor": 0.5}, half=9.0, quarter=9.0, poor=0.2)
    ratios = {"prism__keep_ratios": "1,0.5,0.25", "heterofl__width_ratios": "1,0.5,0.25"}
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": name}, **ratios, fleet=fleet)
    (record,) = run.rounds()
    assert list(record["keep_ratios" if "keep_ratios" in record else "width_ratios"].values()) == [0.5, 0.25, 0.5]
    assert [client["status"] for client in clients_of(run)] == ["ok", "ok", "memory"]
    half, quarter, _ = clients_of(run)
    assert quarter["measured_peak"] == quarter["predicted_peak"] < half["measured_peak"] == half["predicted_peak"]


def test_origdrop_counts_no_ratio_that_its_device_has_no_memory_for(tmp_path: Path) -> None:
    fleet = fleet_json({"whole": 1.0, "half": 0.5, "quarter": 0.25}, whole=0.4, half=9.0, quarter=9.0)
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": "origdrop"}, prism__keep_ratios="1,0.5,0.25", fleet=fleet)
    assert load_file(run.path / "model.safetensors")["atoms.1.conv.weight"].shape[:2] == (8, 8)


def test_a_ratio_that_a_run_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"keep = 0\.3 of device 'odd' is not one of the run's width ratios: 0\.5, 0\.25"
    ):
        run_local(tmp_path, **TRIO | SMALL, prism__keep_ratios="0.5,0.25", fleet=fleet_json({"odd": 0.3}, odd=9.0))


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
