"""PriSM on the in-process grid: what travels, how kernels are averaged and put together, who trains how much."""

import math
from collections.abc import Callable
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

from models.kernels import compose, decompose
from models.width import CoverageMean
from strategies.prism import PriSM

SMALL = {"strategy": "prism", "lr": 0.05}
MIXED = fleet_json(rich=2.0, middle=0.7, poor=0.6)


def strategies(monkeypatch: pytest.MonkeyPatch) -> list[PriSM]:
    """The strategies that runs make from now on."""
    made: list[PriSM] = []
    begin = PriSM.begin

    def note(self: PriSM) -> None:
        made.append(self)
        begin(self)

    monkeypatch.setattr(PriSM, "begin", note)
    return made


def test_each_client_trains_the_largest_sub_model_that_fits(tmp_path: Path) -> None:
    run = run_local(tmp_path, **TRIO, **SMALL, fleet=MIXED)
    record = run.rounds()[-1]
    keeps = record["keep_ratios"]
    assert len(set(keeps.values())) == 3 and keeps["0"] == 0.8
    for client in clients_of(run):
        assert client["status"] == "ok"
        assert client["predicted_peak"] == client["measured_peak"] <= client["budget"]


def test_entries_are_averaged_over_the_clients_that_had_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grids: Callable[..., Any]
) -> None:
    """Eq. 5, from the messages themselves; what nobody had is as it was, to the bit, before the kernels are put together."""
    made, aggregated = strategies(monkeypatch), list[ArrayRecord]()
    composed = PriSM.composed
    monkeypatch.setattr(PriSM, "composed", lambda self, whole: (aggregated.append(whole), composed(self, whole))[1])
    grid = grids()
    run = run_local(tmp_path, grid, **TRIO, **SMALL, fleet=MIXED)
    (strategy,), (whole,) = made, aggregated
    sent, replies = training(grid.last.sent), training(grid.last.received)
    arrays = ArrayRecord({n: Array(a) for n, a in first_arrays(strategy.settings).items()})
    before = strategy.factored(arrays)
    layer, checked = strategy.factors[1], 0
    tasks = [task for task, _ in strategy._asked.values()]
    held = [strategy.indices(task) for task in tasks]
    for message, task in zip(sent, tasks, strict=True):
        assert same(arrays_of(message), {n: a.numpy() for n, a in strategy.travelling(task, arrays).items()})
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
    mean = CoverageMean()
    for kernels, add in (([0, 1], 0.2), ([0, 2], 0.6)):
        rows, columns = np.array([0, 1]), np.array(kernels)
        mean.add(
            {"v": v[columns] + np.float32(add), "u": u[np.ix_(rows, columns)] - np.float32(add)},
            {"v": (columns, np.arange(3)), "u": (rows, columns)},
            {"v": v.shape, "u": u.shape},
            1,
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


def test_kernels_differ_between_clients_and_rounds_and_not_between_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = strategies(monkeypatch)
    for folder in ("a", "b"):
        run_local(tmp_path / folder, **TRIO, **SMALL, fleet=fleet_json(poor=0.6), num_rounds=2)
    one, two = (strategy.drawn for strategy in made)
    name = made[0].factors[1].weight
    chosen = [one[client][name].tolist() for client in range(3)]
    assert len({tuple(each) for each in chosen}) == 3
    assert [two[client][name].tolist() for client in range(3)] == chosen
    first = run_local(tmp_path / "c", **TRIO, **SMALL, fleet=fleet_json(poor=0.6))
    assert first.rounds()[0] and made[2].drawn[0][name].tolist() != chosen[0]


def test_every_kernel_is_drawn_sometimes(tmp_path: Path) -> None:
    run = run_local(tmp_path, **SMALL, fleet=fleet_json(poor=0.6), num_rounds=8, kappa=1.0, local_iterations=1)
    for name in run.rounds()[0]["layers"]:
        drawn = np.array([record["layers"][name]["drawn"] for record in run.rounds()])
        assert drawn.sum(0).min() > 0
        assert drawn.sum(0)[0] > drawn.sum(0)[-1]
        assert 1 < run.rounds()[-1]["layers"][name]["rank"] < run.rounds()[-1]["layers"][name]["kernels"]


def test_a_layer_is_decomposed_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr("strategies.prism.decompose", lambda w: (calls.append(w.shape), decompose(w))[1])
    run_local(tmp_path, **TRIO, **SMALL, num_rounds=2)
    assert len(calls) == 2 * 4


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    changes: dict[str, Any] = {**TRIO, **SMALL, "fleet": MIXED, "lr_rounds": 3}
    through = run_local(tmp_path / "a", **changes, num_rounds=3)
    halved = run_local(tmp_path / "b", **changes, num_rounds=1)
    halved = run_local(tmp_path / "b", **changes, num_rounds=3, resume_from=str(halved.path))
    assert same(model_of(through), model_of(halved))


# ---- rivals


def test_orthdrop_takes_the_top_kernels_and_all_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = strategies(monkeypatch)
    fleet = fleet_json(rich=3.0, poor=1.0)
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": "orthdrop"}, fleet=fleet)
    keeps = run.rounds()[0]["keep_ratios"]
    assert len(set(keeps.values())) == 2
    (strategy,) = made
    for client, (task, _) in strategy._asked.items():
        for layer in strategy.factors:
            v, u = (strategy.indices(task)[name] for name in (layer.v, layer.u))
            kept = math.ceil(round(keeps[str(client)] * strategy.full[layer.v][0], 6))
            assert v[0].tolist() == u[1].tolist() == list(range(kept))
            assert len(u[0]) == strategy.full[layer.u][0]


def test_origdrop_has_no_channels_that_nobody_trains(tmp_path: Path) -> None:
    fleet = fleet_json(some=0.6, poor=0.3)
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": "origdrop"}, fleet=fleet, keep_ratios="1,0.5,0.25")
    assert set(run.rounds()[0]["shares"].values()) == {0.5, 0.25}
    conv = model_of(run)["atoms.1.conv.weight"]  # 16 -> 16 channels
    assert (conv[:8, :8] != 0).all()
    assert not conv[8:].any() and not conv[:, 8:].any()


# ---- ratios that a fleet fixes


@pytest.mark.parametrize("name", ["prism", "orthdrop", "origdrop", "heterofl"])
def test_a_fleet_may_say_how_much_of_a_model_each_device_gets(tmp_path: Path, name: str) -> None:
    """And whose memory that does not fit cannot take part."""
    fleet = fleet_json({"half": 0.5, "quarter": 0.25, "poor": 0.5}, half=9.0, quarter=9.0, poor=0.2)
    ratios = {"keep_ratios": "1,0.5,0.25", "width_shares": "1,0.5,0.25"}
    run = run_local(tmp_path, **TRIO | SMALL | {"strategy": name}, **ratios, fleet=fleet)
    (record,) = run.rounds()
    assert list(record["keep_ratios" if "keep_ratios" in record else "shares"].values()) == [0.5, 0.25, 0.5]
    assert [client["status"] for client in clients_of(run)] == ["ok", "ok", "memory"]
    half, quarter, _ = clients_of(run)
    assert quarter["measured_peak"] == quarter["predicted_peak"] < half["measured_peak"] == half["predicted_peak"]


def test_a_ratio_that_a_run_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep = 0\.3 of device 'odd': the run has the shares 0\.5, 0\.25"):
        run_local(tmp_path, **TRIO | SMALL, keep_ratios="0.5,0.25", fleet=fleet_json({"odd": 0.3}, odd=9.0))


# ---- other models


@pytest.mark.parametrize(("name", "options"), [("resnet18", ""), ("preresnet20", ""), ("deit-tiny", "depth=2")])
def test_other_models_train(tmp_path: Path, name: str, options: str) -> None:
    changes: dict[str, Any] = TRIO | SMALL | {"model": name, "model_options": options, "model_width": 0.25}
    run = run_local(tmp_path, **changes, fleet="unlimited", local_iterations=2)
    for client in clients_of(run):
        assert client["status"] == "ok"
        assert client["predicted_peak"] == client["measured_peak"] <= client["budget"]
