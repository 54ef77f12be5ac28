"""The models that devices deploy at the end of a run: their accuracy by hand, and how it is told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from helpers import TRIO, RecordingGrid, arrays_of, few_digits, fleet_json, model_of, run_local
from torch import Tensor, nn

from piecework.models.basic_layers import blocks_of
from piecework.models.cascade import Blueprint
from piecework.models.channels import channel_axes
from piecework.models.depth_exits import Exits
from piecework.models.mix import Mix, net_of
from piecework.models.static_norms import with_statistics
from piecework.models.variant import Variant, vary
from piecework.models.width import Select, rolling, shapes, sub_indices, take, take_first
from piecework.models.zoo import build_blueprint
from piecework.report.display import device_model_rows
from piecework.server_app.served_model import Moments
from piecework.server_app.summary import worst_and_mean
from piecework.strategies.cascade.depthfl.client import ExitsModel
from piecework.strategies.width.heterofl.client import input_ratios, scale_up
from piecework.training.examples import as_inputs
from piecework.training.loop import PieceModel
from piecework.training.messages import content_bytes
from piecework.training.setup import open_dataset

FULL = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="batch")
RUN: dict[str, Any] = TRIO | {
    "num_rounds": 2,
    "training__local_iterations": 4,
    "architecture__batch_norm": "batch",
    "heterofl__width_ratios": "1,0.5,0.25",
    "fleet": fleet_json(rich=1.2, some=0.6, poor=0.3),
}
Arrays = dict[str, np.ndarray]
MEASURED_NOTHING = {"bytes_measuring": 0}


def accuracy(model: PieceModel) -> float:
    """Of the 100 test images, in one batch."""
    data = open_dataset(f"npz:{few_digits()}", "")
    model.train(False)
    with torch.no_grad():
        found: Tensor = model.logits(as_inputs(data.test_inputs, data)).argmax(1)
    return float((found.numpy() == data.test_labels).mean())


def filled(
    model: Blueprint, arrays: Arrays, atoms: Any = None, head: str = "head", kind: Any = PieceModel
) -> PieceModel:
    def build(unit: str) -> nn.Module:
        module = model.build_unit(unit)
        module.load_state_dict({key: torch.tensor(arrays[f"{unit}.{key}"]) for key in module.state_dict()})
        return module

    found: PieceModel = kind(model, atoms or range(len(model.atoms)), head, build)
    return found


def narrow(trained: Arrays, ratio: float, select: Select) -> tuple[Blueprint, Arrays]:
    """The net of a ratio as clients have it, without its Scaler."""
    small = vary(FULL, Variant(width=ratio, rounding="up"))
    indices = sub_indices(channel_axes(FULL), shapes(FULL), shapes(small), select)
    return small, {name: take(trained[name], where) for name, where in indices.items()}


def with_scaler(model: PieceModel, small: Blueprint) -> PieceModel:
    scale_up(model, input_ratios(small, FULL))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "select"), [("heterofl", take_first), ("fedrolex", rolling(2))])
def test_each_ratio_is_a_net_with_its_scaler(tmp_path: Path, strategy: str, select: Select) -> None:
    """The first channels, or the window that FedRolex trained last, in round 2."""
    run = run_local(tmp_path, **RUN | {"strategy": strategy})
    trained, expected = model_of(run), {}
    for name, ratio in (("all channels", 1), ("0.5 of the channels", 0.5), ("0.25 of the channels", 0.25)):
        small, arrays = narrow(trained, ratio, select)
        expected[name] = {
            "accuracy": accuracy(with_scaler(filled(small, arrays), small)),
            "clients": 1,
            **MEASURED_NOTHING,
        }
    assert (run.summary() or {})["models"] == run.models() == expected
    assert expected["all channels"]["accuracy"] == run.rounds()[-1]["accuracy"]
    assert len({each["accuracy"] for each in expected.values()}) > 1


@pytest.mark.slow
def test_clients_measure_the_norms_of_each_net(tmp_path: Path) -> None:
    """Those of the last round. The statistics of the net of 4 of 16 channels, pooled by hand, give its accuracy."""
    run = run_local(tmp_path, RecordingGrid, **RUN | {"strategy": "heterofl", "architecture__batch_norm": "static"})
    moments, exchanged = Moments(), 0
    tasks = {task.metadata.message_id: task for task in RecordingGrid.last.sent}
    for reply in RecordingGrid.last.received:
        found = statistics_of(reply)
        if found.get("atoms.0.bn.running_mean", np.zeros(0)).shape == (4,):
            asked = tasks[reply.metadata.reply_to_message_id]
            exchanged += content_bytes(asked.content) + content_bytes(reply.content)
            moments.add(found, int(reply.content.metric_records["metrics"]["num-examples"]))  # type: ignore[call-overload]
    small, arrays = narrow(model_of(run), 0.25, take_first)
    pooled = {name: array.numpy() for name, array in moments.pool().items()}
    ratios = iter(input_ratios(small, FULL))
    for name in arrays:
        if name.endswith((".conv.weight", ".fc.weight")):
            ratio = next(ratios)
            arrays |= {key: arrays[key] / ratio for key in (name, name.replace("weight", "bias")) if key in arrays}
    expected = accuracy(filled(with_statistics(small), arrays | pooled))
    assert run.models()["0.25 of the channels"] == {"accuracy": expected, "clients": 1, "bytes_measuring": exchanged}


def statistics_of(reply: Message) -> Arrays:
    """The statistics in an answer; training messages have other arrays too."""
    found = arrays_of(reply) if reply.has_content() and "arrays" in reply.content else {}
    return found if all("running" in name or "tracked" in name for name in found) else {}


@pytest.mark.slow
def test_a_device_runs_as_many_base_nets_as_it_trains(tmp_path: Path) -> None:
    fleet = fleet_json(rich=0.85, poor=0.45)
    run = run_local(tmp_path, **RUN | {"strategy": "splitmix", "splitmix__width_ratio": 0.25, "fleet": fleet})
    trained, expected = model_of(run), {}
    counts = [max(len(nets) for nets in record["nets"].values()) for record in run.rounds()]
    assert set(counts) == {3}
    for name, count, clients in (("3 base nets", 3, 2), ("a base net", 1, 1)):
        mix = vary(FULL, Variant(width=0.25, changes=(Mix(tuple(range(count)), scaler=True),)))
        arrays = {key: value for key, value in trained.items() if net_of(key) < count}
        expected[name] = {"accuracy": accuracy(filled(mix, arrays)), "clients": clients, **MEASURED_NOTHING}
    assert run.models() == expected


@pytest.mark.slow
def test_a_device_runs_the_blocks_that_it_trains(tmp_path: Path) -> None:
    """And predicts by the mean of their exits. A device that cannot train the first block has no model."""
    fleet = fleet_json(rich=1.8, some=1.3, none=0.2)
    run = run_local(tmp_path, **RUN | {"strategy": "depthfl", "fleet": fleet})
    depths, expected = run.rounds()[-1]["depths"], {}
    model = vary(FULL, Variant(changes=(Exits(tuple(blocks_of(FULL))),)))
    for client, depth in sorted(depths.items()):
        body = [atom for block in blocks_of(FULL)[:depth] for atom in block]
        exits = [len(FULL.atoms) + number for number in range(depth - 1)]
        last = f"atoms.{len(FULL.atoms) + depth - 1}" if depth < len(blocks_of(FULL)) else "head"
        found = accuracy(filled(model, model_of(run), [*body, *exits], last, ExitsModel))
        expected[int(client)] = {"accuracy": found, "clients": 1, **MEASURED_NOTHING}
    assert list(run.models().values()) == list(expected.values())
    assert len(set(depths.values())) == 2


@pytest.mark.parametrize("changes", [{"strategy": "feddrop"}, {"strategy": "fedepth", "fleet": "unlimited"}])
def test_one_model_for_all_is_no_news(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = run_local(tmp_path, **RUN | {"num_rounds": 1} | changes)
    assert not (run.path / "models.json").exists()
    assert (run.summary() or {})["models"] == {}


def test_the_worst_and_the_mean_over_clients() -> None:
    models = {"wide": {"accuracy": 0.9, "clients": 1}, "narrow": {"accuracy": 0.5, "clients": 3}}
    assert worst_and_mean(models) == {"worst": 0.5, "mean": pytest.approx((0.9 + 3 * 0.5) / 4)}
    assert worst_and_mean({}) == {}
    assert device_model_rows(models) == [
        ("devices' models", "worst 50.00%, mean over 4 clients 60.00%"),
        ("wide", "90.00% on 1 clients"),
        ("narrow", "50.00% on 3 clients"),
    ]
