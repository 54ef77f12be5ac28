"""SLT from pretraining to the last step, on the in-process grid."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from helpers import (
    TRIO,
    RecordingGrid,
    a_blueprint,
    arrays_of,
    clients_of,
    digits,
    examples_of,
    few_digits,
    first_arrays,
    fleet_json,
    model_of,
    run_local,
    same,
    tiny_settings,
    training,
)
from safetensors.numpy import load_file
from slt_helpers import filled, network

import piecework
from piecework.models.cascade import unit_of
from piecework.models.width import shapes
from piecework.planning.costs import cost_model_for
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.strategies import find_method
from piecework.strategies.cascade.slt.cut import indices_of
from piecework.training.examples import normalise

SMALL: dict[str, Any] = TRIO | {
    "strategy": "slt",
    "num_rounds": 10,
    "training__local_iterations": 2,
    "architecture__batch_norm": "running",
}
POOR = fleet_json(poor=0.6)
MIXED = fleet_json(rich=1.2, some=0.75, poor=0.6)
STAGES = ["pretraining", *(f"step {n}" for n in range(1, 6))]


def recorded(folder: Path, **settings: Any) -> tuple[RunDir, RecordingGrid]:
    run = run_local(folder, RecordingGrid, **SMALL | settings)
    return run, RecordingGrid.last


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RecordingGrid]:
    return recorded(tmp_path_factory.mktemp("alike"), fleet=POOR, evaluation__on_clients_every=1)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RecordingGrid]:
    return recorded(tmp_path_factory.mktemp("mixed"), fleet=MIXED)


def of_round(messages: list[Any], number: int) -> list[dict[str, np.ndarray]]:
    return [arrays_of(m) for m in training(messages) if m.metadata.group_id == str(number)]


@pytest.mark.slow
def test_steps_follow_one_another_within_the_budget(alike: tuple[RunDir, RecordingGrid]) -> None:
    records = alike[0].rounds()
    assert list(dict.fromkeys(record["stage"] for record in records)) == STAGES
    ratios = [next(group)["width"] for _, group in groupby(records, key=lambda record: record["stage"])]
    assert ratios[0] == ratios[1] < ratios[-1] == 1
    assert ratios == sorted(ratios)
    for record in records:
        n = STAGES.index(record["stage"])
        assert (record["full_atoms"], record["steps"]) == (n, 5)
        assert set(record["frozen_atoms"].values()) == {max(0, n - 1)}
        for client in record["clients"]:
            assert client["status"] == "ok"
            assert client["pieces"] == [list(range(max(0, n - 1), 5))]
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
            assert 0 < client["evaluation_peak"] <= client["evaluation_predicted"] <= client["budget"]


def test_no_larger_head_fits(alike: tuple[RunDir, RecordingGrid]) -> None:
    """Of each step; or the next step's is as large."""
    budget = clients_of(alike[0])[0]["budget"]
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}"})
    model = a_blueprint(batch_norm="running")
    cut = find_method("slt").make_cut(model, cost_model_for(settings, model), settings).fit(budget, budget)
    chosen = [*cut.chosen]
    assert (
        chosen == [r["width"] for _, g in groupby(alike[0].rounds(), key=lambda r: r["stage"]) for r in [next(g)]][1:]
    )
    for n, (ratio, following) in enumerate(zip(chosen, [*chosen[1:], 1.0], strict=True), start=1):
        assert cut.needed_of(n, ratio) <= budget
        assert ratio == following or cut.needed_of(n, ratio + 1 / 64) > budget


def test_what_travels(alike: tuple[RunDir, RecordingGrid]) -> None:
    """Frozen atoms are not sent for training; full atoms have all channels, and the head its first ones."""
    run, grid = alike
    full = shapes(a_blueprint(batch_norm="running"))
    for record in run.rounds():
        n, ratio = STAGES.index(record["stage"]), record["width"]
        expected = {f"atoms.{atom}" for atom in range(max(0, n - 1), 5)} | {"head"}
        channels = [16, 16, 32, 32, 64]
        kept = [c if atom < n else max(1, int(c * ratio)) for atom, c in enumerate(channels)]
        for down, up in zip(
            of_round(grid.sent, record["round"]), of_round(grid.received, record["round"]), strict=True
        ):
            assert {unit_of(name) for name in down} == {unit_of(name) for name in up} == expected
            for atom in range(max(0, n - 1), 5):
                inputs = kept[atom - 1] if atom else 1
                for arrays in (down, up):
                    assert arrays[f"atoms.{atom}.conv.weight"].shape == (kept[atom], inputs, 3, 3)
                    assert arrays[f"atoms.{atom}.bn.running_mean"].shape == (kept[atom],)
            assert up["head.fc.weight"].shape == (10, 4 * kept[4])
            assert full["head.fc.weight"] == (10, 4 * 64)


def means_by_hand(
    before: dict[str, np.ndarray], replies: list[Any], number: int
) -> tuple[dict[str, np.ndarray], set[str]]:
    """The full model after a round: of each entry the mean over the clients that sent it, by their examples."""
    answers = [m for m in training(replies) if m.metadata.group_id == str(number)]
    after, trained = {name: array.copy() for name, array in before.items()}, set[str]()
    sums: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    for message in answers:
        for name, array in arrays_of(message).items():
            if array.dtype != np.float32:
                continue
            trained.add(name)
            total = sums.setdefault(name, np.zeros(before[name].shape))
            weight = weights.setdefault(name, np.zeros(before[name].shape))
            if name == "head.fc.weight":  # 4 cells of each of 64 channels, the channels outermost
                place: Any = (slice(None), slice(array.shape[1]))
            else:
                place = tuple(slice(size) for size in array.shape)
            total[place] += examples_of(message) * array.astype(np.float64)
            weight[place] += examples_of(message)
    for name, total in sums.items():
        sent = weights[name] > 0
        after[name][sent] = (total[sent] / weights[name][sent]).astype(np.float32)
    return after, trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_the_models_of_a_run_by_hand(kind: str, request: pytest.FixtureRequest) -> None:
    """From the initial model to the last one: what a round did not train stays as it is."""
    run, grid = request.getfixturevalue(kind)
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}"})
    model = first_arrays(settings)
    for record in run.rounds():
        for down in of_round(grid.sent, record["round"]):
            for name in [name for name in down if not name.endswith("tracked")]:
                array = down[name]
                np.testing.assert_allclose(array, model[name][tuple(map(slice, array.shape))], rtol=0, atol=1e-6)
        model, trained = means_by_hand(model, grid.received, record["round"])
        frozen = min(record["frozen_atoms"].values())
        assert {unit_of(name) for name in trained} == {*(f"atoms.{atom}" for atom in range(frozen, 5)), "head"}
    last = model_of(run)
    for name in [name for name in model if not name.endswith("tracked")]:
        np.testing.assert_allclose(last[name], model[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_who_has_more_memory_trains_more_layers(mixed: tuple[RunDir, RecordingGrid], tmp_path: Path) -> None:
    run, _ = mixed
    frozen = {record["stage"]: record["frozen_atoms"] for record in run.rounds()}
    assert [each["2"] for each in frozen.values()] == [0, 0, 1, 2, 3, 4]  # the poorest
    assert all(each["0"] <= each["1"] <= each["2"] for each in frozen.values())
    assert any(each["0"] < each["1"] < each["2"] for each in frozen.values())
    for record in run.rounds():
        for client in record["clients"]:
            first = record["frozen_atoms"][str(client["client"])]
            assert client["pieces"] == [list(range(first, 5))]
            assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
    one = run_local(tmp_path, **SMALL | {"fleet": MIXED, "slt__depth": "one"})
    assert [record["width"] for record in one.rounds()] == [record["width"] for record in run.rounds()]
    for record in one.rounds():
        assert set(record["frozen_atoms"].values()) == {max(0, STAGES.index(record["stage"]) - 1)}


class Stops(LocalGrid):
    """A grid that fails when a round begins."""

    at: ClassVar[int]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if any(m.metadata.group_id == str(self.at) for m in training(messages)):
            raise RuntimeError("the server is gone")
        return super().push_messages(messages)


def stopped(folder: Path, at: int, **settings: Any) -> RunDir:
    """A run that ends before a round."""
    Stops.at = at
    with pytest.raises(RuntimeError, match="the server is gone"):
        run_local(folder, Stops, **settings)
    return RunDir(folder / "run")


def test_the_network_of_the_step_is_evaluated(alike: tuple[RunDir, RecordingGrid], tmp_path: Path) -> None:
    """After the first round of a step, and at the end of the run, when all channels are trained."""
    records, data, full = alike[0].rounds(), digits(), a_blueprint(batch_norm="running")
    number = next(record["round"] for record in records if record["stage"] == "step 2")
    part = stopped(tmp_path, number + 1, **SMALL | {"fleet": POOR})
    ratio = records[number - 1]["width"]
    assert 0 < ratio < 1
    narrow, arrays, initial = (
        network(full, 2, ratio),
        model_of(part),
        first_arrays(tiny_settings(**SMALL | {"dataset": "digits"})),
    )
    assert same(
        arrays, model_of(alike[0]), [name for name in arrays if name.startswith("atoms.0.")]
    )  # frozen since then
    untouched = int(64 * ratio)
    assert np.array_equal(arrays["atoms.4.conv.weight"][untouched:], initial["atoms.4.conv.weight"][untouched:])
    assert not np.array_equal(arrays["atoms.4.conv.weight"][:untouched], initial["atoms.4.conv.weight"][:untouched])
    own = {name: arrays[name][np.ix_(*at)] if at else arrays[name] for name, at in indices_of(full, narrow).items()}
    images = normalise(data.test_inputs[:100], data)
    with torch.no_grad():
        right = filled(narrow, own)(images).argmax(1).numpy() == data.test_labels[:100]
    assert right.mean() == pytest.approx(records[number - 1]["accuracy"])
    found = piecework.load(alike[0].path).predict(data.test_inputs[:100]).classes.numpy()
    assert (found == data.test_labels[:100]).mean() == pytest.approx(records[-1]["accuracy"])


MEASURED: dict[str, Any] = SMALL | {"fleet": MIXED, "architecture__batch_norm": "measured"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("whole"), **MEASURED)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["pretraining", "step 1", "step 5"])
def test_a_run_goes_on_as_if_it_had_not_stopped(at: str, whole: RunDir, tmp_path: Path) -> None:
    """Stopped before the last round of a step, which may be its first."""
    part = stopped(tmp_path, max(r["round"] for r in whole.rounds() if r["stage"] == at), **MEASURED)
    resumed = run_local(tmp_path, **MEASURED, resume_from=str(part.path))
    assert [r["accuracy"] for r in resumed.rounds()] == [r["accuracy"] for r in whole.rounds()]
    assert same(model_of(resumed), model_of(whole))
    assert same(load_file(resumed.path / "model.safetensors"), load_file(whole.path / "model.safetensors"))


def test_the_whole_network_is_trained_if_that_fits_everyone(tmp_path: Path) -> None:
    settings = TRIO | {"fleet": "unlimited", "architecture__batch_norm": "running"}
    run = run_local(tmp_path, strategy="slt", **settings)
    (record,) = run.rounds()
    assert (record["stage"], record["width"], record["steps"]) == ("pretraining", 1, 0)
    fedavg = run_local(tmp_path / "fedavg", strategy="fedavg", **settings)
    for one, other in zip(clients_of(run), clients_of(fedavg), strict=True):
        assert one["measured_peak"] == one["predicted_peak"] == other["measured_peak"]
        assert one["flops"] == other["flops"]


@pytest.mark.slow
def test_more_fits_with_memory_fit(alike: tuple[RunDir, RecordingGrid], tmp_path: Path) -> None:
    fitted = run_local(tmp_path, **SMALL | {"fleet": POOR, "memory__fit": "micro-batch,recompute"})
    first = fitted.rounds()[0]
    assert first["width"] > alike[0].rounds()[0]["width"]
    for record in fitted.rounds():
        for client in record["clients"]:
            assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
    assert {client["step"] for record in fitted.rounds() for client in record["clients"]} != {""}


@pytest.mark.slow
def test_a_plan_agrees_with_a_run(mixed: tuple[RunDir, RecordingGrid]) -> None:
    run, _ = mixed
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}", "fleet": MIXED})
    found = make_plan(settings, ask(settings))
    assert [stage["stage"] for stage in found["fleet"]["stages"]] == STAGES
    assert found["coverage"]["says"] == ""
    names = [module["name"] for module in found["modules"]]
    assert names[0].endswith("of the channels")
    assert names[2].startswith("conv2, then ")
    for stage in found["fleet"]["stages"]:
        of_stage = [record for record in run.rounds() if record["stage"] == stage["stage"]]
        peaks = [client["measured_peak"] for record in of_stage for client in record["clients"]]
        assert (stage["peak_bytes"], stage["participation"]) == (max(peaks), 1)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"slt: training conv1 with 1/64 of the channels behind it needs [\d,]+ bytes, and the poorest"
    ):
        run_local(tmp_path, **SMALL | {"fleet": fleet_json(rich=1.5, poor=30_000)})
    with pytest.raises(ValueError, match="num-rounds = 5 is too few for slt: pretraining and 5 steps need 6"):
        run_local(tmp_path, **SMALL | {"fleet": POOR, "num_rounds": 5})
    with pytest.raises(ValueError, match="slt averages layers of all clients"):
        run_local(tmp_path, **SMALL | {"fleet": POOR, "architecture__batch_norm": "local"})
