"""The model that is served gives an example the same answer in any company; how its statistics are measured."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from helpers import (
    FEW,
    TRIO,
    a_client,
    changing,
    digits,
    fleet_json,
    model_of,
    record_of,
    run_local,
    same,
    tiny_settings,
)
from settings_helpers import settings_with
from torch import nn

import piecework
from piecework.client_app.features import measure_statistics
from piecework.client_app.served import measure_served
from piecework.models.cascade import Blueprint
from piecework.models.static_norms import count_first_alike, measure_norms, with_statistics
from piecework.models.work_item import WorkItem
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import cost_model_for
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.server_app.records import RunDir
from piecework.server_app.served_model import Moments, empty_statistics
from piecework.training.loop import PieceModel
from piecework.training.messages import Task
from piecework.training.settings import Settings

WIDTH = {"strategy": "heterofl", "heterofl__width_ratios": "1,0.5", "fleet": fleet_json(rich=1.5, poor=0.7)}
RUNS: dict[str, dict[str, Any]] = {
    "fedepth": {"fleet": fleet_json(poor=0.6)},
    "fedavg": {"strategy": "fedavg", "fleet": fleet_json(rich=1.5)},
    "fedprophet": {
        "strategy": "fedprophet",
        "fedprophet__r_min": "0.6x",
        "attack__steps": 1,
        "evaluation__attack_examples": 0,
    },
    "profl": {"strategy": "profl", "num_rounds": 2, "profl__stage_rounds": 1},
    "heterofl": WIDTH,
    "prism": {"strategy": "prism", "fleet": fleet_json(rich=1.5)},
    "allsmall": {"strategy": "allsmall", "architecture__batch_norm": "measured", "fleet": fleet_json(poor=0.6)},
    "feddf": {
        "strategy": "feddf",
        "model": "cnn3",
        "feddf__family": "convnet",
        "data__public_fraction": 0.1,
        "feddf__server_iterations": 2,
        "fleet": fleet_json(rich=1.5, poor=0.5),
    },
    "fedpm": {"strategy": "fedpm", "fleet": fleet_json(rich=4.0)},
    "fjord": {"strategy": "fjord", "heterofl__width_ratios": "1,0.5", "fleet": fleet_json(rich=4.0)},
}


@pytest.fixture(scope="module", params=RUNS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A short run of each way to come to statistics, on the digits, with the default `architecture.batch-norm`."""
    settings = {"clients": 3, "clients_per_round": 0, "training__local_iterations": 4} | RUNS[request.param]
    return run_local(tmp_path_factory.mktemp("served"), **settings)


@pytest.mark.slow
def test_an_example_gets_the_same_answer_in_any_company(finished: RunDir) -> None:
    model, data = piecework.load(finished.path), digits()
    images = torch.tensor(data.test_inputs[:60]).permute(0, 3, 1, 2)
    with torch.no_grad():
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
        by_class = torch.empty_like(together)
        for label in range(10):
            rows = np.flatnonzero(data.test_labels[:60] == label)
            by_class[rows] = model(images[rows])
    torch.testing.assert_close(alone, together)
    torch.testing.assert_close(by_class, together)


@pytest.mark.slow
def test_central_evaluation_reports_the_served_model(finished: RunDir) -> None:
    model, data = piecework.load(finished.path), digits()
    found = model.predict(data.test_inputs).classes.numpy()
    assert (found == data.test_labels).mean() == pytest.approx(finished.rounds()[-1]["accuracy"])


def test_moments_of_two_clients_by_hand() -> None:
    moments = Moments()
    for examples, mean in ((1, 0.0), (3, 4.0)):
        moments.add(statistics(mean, 1.0, batches=examples), examples)
    found = {name: array.numpy() for name, array in moments.pool().items()}
    assert found["head.bn.running_mean"] == 3.0  # (1 * 0 + 3 * 4) / 4
    assert found["head.bn.running_var"] == 4.0  # (1 * (1 + 0) + 3 * (1 + 16)) / 4 - 9
    assert found["head.bn.num_batches_tracked"] == 3
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32), np.dtype(np.int64)}
    assert not Moments().pool()


def statistics(mean: float, variance: float, batches: int) -> dict[str, np.ndarray]:
    """Those of a batch norm of one channel."""
    return {
        "head.bn.running_mean": np.array([mean], np.float32),
        "head.bn.running_var": np.array([variance], np.float32),
        "head.bn.num_batches_tracked": np.array(batches),
    }


def test_what_clients_measure_is_what_all_their_data_have(tmp_path: Path) -> None:
    """Each client in one batch: the first batch norm's statistics are those of the convolution's output on all 60 images."""
    moments, outputs = Moments(), []
    for number, rows in enumerate((20, 40)):
        client = a_client(
            tmp_path / str(number),
            tiny_settings(architecture__batch_norm="measured", training__batch_size=40),
            rows=rows,
        )
        plain = PieceModel(client.blueprint, (0,), None, client.load())
        client.blueprint = with_statistics(client.blueprint)
        measure_statistics(client, (0, 1))
        with torch.no_grad():
            outputs.append(plain.modules["atoms.0"].conv(client.local_data(0).read(np.arange(rows))))
        moments.add({n: a for n, a in client.store.read(["atoms.0"]) if n in empty(client.blueprint)}, rows)
    found = moments.pool()
    values = torch.cat(outputs).double()
    np.testing.assert_allclose(found["atoms.0.bn.running_mean"].numpy(), values.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    # a batch's variance is unbiased by its own mean: 2,560 of 1/1280 and 1/2560 in one sum
    np.testing.assert_allclose(found["atoms.0.bn.running_var"].numpy(), values.var((0, 2, 3)), rtol=2e-3)


def empty(model: Blueprint) -> dict[str, np.ndarray]:
    return empty_statistics(model, model.units())


@pytest.mark.parametrize("name", ["convnet", "preresnet20", "resnet10"])
def test_measuring_takes_what_was_predicted(tmp_path: Path, name: str) -> None:
    """Two full batches, and the head with the last atom: preresnet20's has a batch norm of its own.

    A weight that no operation has read yet is not counted by the client: resnet10's peak comes before its last ones.
    """
    settings = tiny_settings(
        model=name, architecture__width=0.25, architecture__batch_norm="measured", strategy="fedavg"
    )
    model = build_blueprint(name, num_classes=10, input_shape=(1, 8, 8), width=0.25, batch_norm="batch")
    served = with_statistics(model)
    client = a_client(tmp_path, settings, rows=32, blueprint=served)
    streamed = cost_model_for(settings, model).trace_inference
    last = len(model.atoms) - 1
    needed = max(streamed(served, atom, "head" if atom == last else None, measured=True) for atom in range(last + 1))
    task = a_task(list(range(last + 1)), needed)
    assert measure_served(task, client) == served.units()
    assert 0.95 * needed <= client.cap.peak_bytes <= needed
    measured = dict(client.store.read(served.units()))
    assert all((measured[name] != first).any() for name, first in empty(served).items())


def a_task(atoms: list[int], needed: int) -> Task:
    return Task(
        experiment_id="experiment",
        round=1,
        state_round=1,
        strategy="fedavg",
        budget=10**9,
        reference=10**9,
        lr=0.1,
        state_dir="",
        costs={WorkItem(tuple(atoms), measured=True): needed},
        atoms=atoms,
        head="head",
    )


def test_the_first_batches_of_a_batch_norm_count_alike() -> None:
    """The mean of 1, 2, .., 10 is 5.5; the 11th weighs a tenth: 0.9 * 5.5 + 0.1 * 16.5 = 6.6."""
    norm = nn.BatchNorm1d(1)
    young = []
    for value in (*range(1, 11), 16.5):
        young.append(count_first_alike([norm]))
        norm(torch.full((2, 1), float(value)))
    assert norm.running_mean.item() == pytest.approx(6.6)  # type: ignore[union-attr]
    assert young == [True] * 9 + [False, False]  # the tenth of ten weighs a tenth
    mean = nn.BatchNorm1d(1, momentum=None)
    assert not count_first_alike([mean])
    assert mean.momentum is None


def test_only_batch_norms_move_while_they_are_measured() -> None:
    model = build_blueprint(
        "vgg11", num_classes=10, input_shape=(3, 32, 32), width=0.1, classifier="profl", batch_norm="batch"
    )
    piece = PieceModel(with_statistics(model), (), "head", lambda unit: with_statistics(model).build_unit(unit))
    piece.train(True)
    measure_norms(piece.units().values())
    training = [type(layer).__name__ for unit in piece.units().values() for layer in unit.modules() if layer.training]
    assert set(training) <= {"BatchNorm1d", "BatchNorm2d"}


def test_training_is_that_of_batch_to_the_bit(tmp_path: Path) -> None:
    batch, measured = (
        run_local(tmp_path / norm, architecture__batch_norm=norm, **TRIO | WIDTH | {"training__local_epochs": 2})
        for norm in ("batch", "measured")
    )
    one, other = model_of(batch), model_of(measured)
    assert same(one, other, list(one))
    assert set(other) == set(one)
    (record,) = measured.rounds()
    assert record["batch_norm"] == "measured"
    found = record["statistics"]
    assert (found["asked"], found["answered"], found["others"]) == (3, 3, [])
    for each in found["peaks"]:
        assert 0.9 * each["predicted"] < each["measured"] <= each["predicted"]
    assert 0 < record["statistics"]["peak_over_budget"] < 1
    assert record["bytes_evaluation"] > 0
    assert (batch.rounds()[0]["statistics"], batch.rounds()[0]["bytes_evaluation"]) == (None, 0)


@pytest.mark.parametrize("changes", [{"num_rounds": 2}, {"num_rounds": 9, "evaluation__target_accuracy": 1e-9}])
def test_static_norms_are_those_of_all_clients(tmp_path: Path, grids: Any, changes: dict[str, Any]) -> None:
    """Two of four clients train in a round and measure its model; all four measure when the run ends, early or not.

    The two of the last round then measure the narrow net.
    """
    settings = WIDTH | {"clients": 4, "clients_per_round": 2, "dataset": FEW, "training__local_iterations": 1}
    grid = grids()
    run = run_local(tmp_path, grid, **settings | changes)
    asked = [record["statistics"]["asked"] for record in run.rounds()]
    assert asked == ([2, 4] if changes["num_rounds"] == 2 else [2])
    measuring = [m.metadata.dst_node_id for m in grid.last.sent if m.metadata.message_type == "query.statistics"]
    assert len(set(measuring[2:6])) == 4 and len(measuring) == 8
    assert run.rounds()[-1]["batch_norm"] == "static"
    model, data = piecework.load(run.path), digits()
    if changes["num_rounds"] == 2:
        found = model.predict(data.test_inputs[:100]).classes.numpy()
        assert (found == data.test_labels[:100]).mean() == pytest.approx(run.rounds()[-1]["accuracy"])


@pytest.mark.slow
def test_what_was_measured_survives_a_resume(tmp_path: Path) -> None:
    settings = TRIO | WIDTH | {"num_rounds": 2}
    whole = run_local(tmp_path / "whole", **settings)
    halved = run_local(tmp_path / "halved", **settings | {"num_rounds": 1})
    run_local(tmp_path / "halved", **settings | {"resume_from": str(halved.path)})
    assert [r["accuracy"] for r in halved.rounds()] == [r["accuracy"] for r in whole.rounds()]
    file = halved.path / "model.safetensors"
    finished = file.read_bytes()
    file.unlink()  # else nothing would be left to do
    run_local(
        tmp_path / "halved", **settings | {"resume_from": str(halved.path)}
    )  # nothing is left to do but to write it
    assert file.read_bytes() == finished
    first, other = (piecework.load(run.path).state_dict() for run in (whole, halved))
    assert all(torch.equal(first[name], other[name]) for name in first)


class LiesOfStatistics(LocalGrid):
    """Of four, client 0's means are not finite, client 1 says it has more examples than it has, client 2's are a million."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            has_arrays = reply.has_content() and "arrays" in reply.content
            means = [name for name in record_of(reply) if name.endswith("running_mean")] if has_arrays else []
            client = reply.metadata.src_node_id - FIRST_NODE
            if means and client in (0, 2):
                value = np.nan if client == 0 else 1e6
                with changing(reply) as arrays:
                    arrays[means[0]] = Array(np.full(arrays[means[0]].shape, value, np.float32))
            if means and client == 1:
                reply.content.metric_records["metrics"]["num-examples"] = 10**6
            yield reply


def test_statistics_that_make_no_sense_are_rejected(tmp_path: Path) -> None:
    settings = {"clients": 6, "clients_per_round": 0, "dataset": FEW}
    run = run_local(tmp_path, LiesOfStatistics, **WIDTH | settings)
    (record,) = run.rounds()
    reasons = " ".join(other["reason"] for other in record["statistics"]["others"])
    assert record["statistics"]["answered"] == 3
    assert "non-finite values" in reasons
    assert "num-examples is 1000000: the client has 28" in reasons
    assert "atoms.0:statistics moves it by" in reasons
    assert record["accuracy"] is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategy": "depthfl", "fleet": fleet_json(rich=4.0)},
            "clients of depthfl do not hold the model that is served",
        ),
        ({"strategy": "splitmix"}, "clients of splitmix do not hold the model that is served"),
        (
            {
                "strategy": "fedrolex",
                "heterofl__width_ratios": "0.03",
                "fleet": fleet_json(poor=0.05),
                "training__batch_size": 40,
            },
            "measuring the batch norms of the served model, one atom at a time, needs .* bytes, and the richest client has",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_local(tmp_path, **TRIO | {"architecture__batch_norm": "measured"} | changes)


def test_auto_is_decided_by_the_strategy() -> None:
    found = {
        name: Settings(strategy=name).norms
        for name in ("fedepth", "fedavg", "fedprophet", "heterofl", "fedrolex", "fedrbn", "prism", "fedpm", "profl")
    }
    assert found == {
        "fedepth": "measured",
        "fedavg": "running",
        "fedprophet": "running",
        "heterofl": "static",
        "fedrolex": "measured",
        "fedrbn": "local",
        "prism": "measured",
        "fedpm": "measured",
        "profl": "measured",
    }
    assert settings_with(strategy="heterofl", architecture__batch_norm="batch").norms == "batch"


def test_the_option_batch_says_what_it_means(tmp_path: Path) -> None:
    run = run_local(tmp_path, architecture__batch_norm="batch", **TRIO)
    assert run.rounds()[0]["batch_norm"] == "batch"
    with pytest.warns(
        UserWarning, match="architecture.batch-norm = batch: what it says of an example depends on the others"
    ):
        model = piecework.load(run.path)
    assert model.depends_on_batch
