"""Whole runs on the in-process grid: what reaches the model, what is dropped, when a run ends, and that it can be resumed."""

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from helpers import (
    TRIO,
    RecordingGrid,
    clients_of,
    few_digits,
    first_arrays,
    fleet_json,
    model_of,
    numpy_of,
    run_local,
    same,
    tiny_settings,
)

from client_app.task import Outcome, content_bytes
from server_app import rounds
from server_app.local_grid import FIRST_NODE, LocalGrid, identify
from server_app.records import RunDir
from server_app.roster import TooFewNodesError
from server_app.rounds import RunAbortedError, exchange, resolve_run_dir, run_experiment
from server_app.settings import SettingsError
from strategies.base import PieceStrategy

HERE = Path(__file__).resolve().parent


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[RecordingGrid]]:
    """A recording grid whose class keeps its last instance."""

    def make(base: type[LocalGrid] = RecordingGrid, **attributes: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            base.__init__(self, *args, **kwargs)
            kept.last = self

        kept: Any = type("Kept", (base,), {"__init__": init, **attributes})
        return kept

    return make


def training(messages: Iterable[Message]) -> list[Message]:
    """The train messages, or the answers to them."""
    return [m for m in messages if m.metadata.message_type == "train"]


def arrays_of(message: Message) -> dict[str, np.ndarray]:
    return numpy_of(message.content.array_records["arrays"])


def examples_of(message: Message) -> int:
    count = message.content.metric_records["metrics"]["num-examples"]
    assert isinstance(count, int)
    return count


def average(replies: list[Message], name: str) -> np.ndarray:
    """What the server has to come to, in float64 and by hand."""
    held = [(arrays_of(m)[name].astype(np.float64), examples_of(m)) for m in replies if name in arrays_of(m)]
    return (sum(a * n for a, n in held) / sum(n for _, n in held)).astype(np.float32)


# ---- the model


def test_with_full_budgets_fedepth_is_fedavg(tmp_path: Path) -> None:
    settings = {"num_rounds": 2, "local_epochs": 2, "momentum": 0.9}
    fedavg = run_local(tmp_path / "fedavg", strategy="fedavg", **settings)
    fedepth = run_local(tmp_path / "fedepth", strategy="fedepth", **settings)
    assert same(model_of(fedavg), model_of(fedepth))
    assert not same(model_of(fedavg), first_arrays(tiny_settings()))
    assert [c["pieces"] for c in clients_of(fedepth)] == ["0,1,2,3,4"] * 3


def test_a_round_is_the_weighted_mean_of_its_replies(tmp_path: Path, grids: Any) -> None:
    grid = grids()
    run = run_local(
        tmp_path, grid, fleet=fleet_json(a=0.5, b=0.75, c=1.0), partition="dirichlet", partition_balanced=False
    )
    replies, model = training(grid.last.received), model_of(run)
    assert len(replies) == 3
    assert len({examples_of(m) for m in replies}) > 1
    for name, array in model.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, average(replies, name))


def test_one_client_gives_its_own_weights(tmp_path: Path, grids: Any) -> None:
    grid = grids()
    run = run_local(tmp_path, grid, clients_per_round=1, batch_norm="running")
    (reply,) = training(grid.last.received)
    model = model_of(run)
    assert same(model, arrays_of(reply))
    assert model["atoms.0.bn.num_batches_tracked"].dtype == np.int64
    assert model["atoms.0.bn.num_batches_tracked"] == -(-examples_of(reply) // 16)


# At batch 64 one step takes, in bytes: conv1 1,163,392; conv2 1,426,432; conv3 1,183,104; conv4 1,088,896; conv5 1,360,000;
# conv1 with conv3 behind it 1,463,168. So 1.4 MB train all but conv2, one by one; and 1.3 MB cannot train the end.
PARTIAL = TRIO | {"batch_size": 64, "mutual_models": 1}


def test_what_nobody_trained_stays_as_it_was(tmp_path: Path, grids: Any) -> None:
    grid = grids()
    run = run_local(tmp_path, grid, fleet=fleet_json(small=1_500_000), **PARTIAL)
    assert [c["pieces"] for c in clients_of(run)] == ["0|2|3|4"] * 3
    assert all("atoms.1.conv.weight" not in arrays_of(m) for m in training(grid.last.received))
    before, after = first_arrays(tiny_settings()), model_of(run)
    conv2 = [name for name in after if name.startswith("atoms.1.")]
    assert len(conv2) == 3
    assert same(before, after, conv2)
    changed = {name for name in after if not same(before, after, [name])}
    assert changed == set(after) - set(conv2)


def test_partial_training_leaves_out_or_dilutes(tmp_path: Path, grids: Any) -> None:
    fleet = fleet_json(rich=10_000_000, small=1_500_000, medium=1_700_000)
    models = {}
    for how in ("leave-out", "dilute"):
        grid = grids()
        run = run_local(tmp_path / how, grid, fleet=fleet, partial_training=how, **PARTIAL)
        assert [c["pieces"] for c in clients_of(run)] == ["0,1,2,3,4", "0|2|3|4", "0|1|2|3|4"]
        replies, models[how] = training(grid.last.received), model_of(run)
        senders = [m for m in replies if "atoms.1.conv.weight" in arrays_of(m)]
        assert len(senders) == (2 if how == "leave-out" else 3)
        np.testing.assert_array_equal(models[how]["atoms.1.conv.weight"], average(senders, "atoms.1.conv.weight"))
    small = next(m for m in replies if m.metadata.src_node_id == FIRST_NODE + 1)
    assert same(arrays_of(small), first_arrays(tiny_settings()), ["atoms.1.conv.weight"])
    differ = {name for name in models["dilute"] if not same(models["dilute"], models["leave-out"], [name])}
    assert differ == {"atoms.1.conv.weight", "atoms.1.bn.weight", "atoms.1.bn.bias"}


def test_number_of_workers_does_not_matter(tmp_path: Path) -> None:
    settings = {"num_rounds": 2, "fleet": "demo", "clients_per_round": 4, "partition": "dirichlet"}
    one = run_local(tmp_path / "one", workers=1, **settings)
    two = run_local(tmp_path / "two", workers=2, **settings)
    assert same(model_of(one), model_of(two))
    keys = ("client", "pieces", "measured_peak", "train_loss", "val_accuracy", "bytes_up", "simulated_seconds")
    assert [[c[k] for k in keys] for c in clients_of(one, 2)] == [[c[k] for k in keys] for c in clients_of(two, 2)]


# ---- what is recorded


def test_bytes_and_clients_are_as_on_the_messages(tmp_path: Path, grids: Any) -> None:
    grid = grids()
    run = run_local(tmp_path, grid, fleet="demo", num_rounds=2)
    sent, received = training(grid.last.sent), training(grid.last.received)
    for server_round in (1, 2):
        (record,) = [r for r in run.rounds() if r["round"] == server_round]
        down = [m for m in sent if m.metadata.group_id == str(server_round)]
        up = received[3 * server_round - 3 : 3 * server_round]
        assert [c["client"] for c in record["clients"]] == [m.metadata.dst_node_id - FIRST_NODE for m in down]
        assert [c["bytes_down"] for c in record["clients"]] == [content_bytes(m.content) for m in down]
        assert [c["bytes_up"] for c in record["clients"]] == [content_bytes(m.content) for m in up]
        assert [c["examples"] for c in record["clients"]] == [examples_of(m) for m in up]
        assert record["bytes_down"] == sum(content_bytes(m.content) for m in down)
        asked = (
            [m for m in grid.last.received if m.metadata.message_type == "query.device"] if server_round == 1 else []
        )
        assert len(asked) == (20 if server_round == 1 else 0)
        assert record["bytes_up"] == sum(content_bytes(m.content) for m in [*up, *asked])
        assert (record["asked"], record["answered"], record["failed"], record["bytes_evaluation"]) == (3, 3, 0, 0)
        losses = [(c["train_loss"], c["examples"]) for c in record["clients"]]
        assert record["train_loss"] == pytest.approx(sum(a * n for a, n in losses) / sum(n for _, n in losses))
    payload = sum(array.nbytes for array in arrays_of(sent[0]).values())
    assert payload < content_bytes(sent[0].content) < payload + 10_000
    summary = run.summary()
    assert (summary["status"], summary["rounds"], summary["clients_answered"]) == ("completed", 2, 6)
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in run.rounds())


def test_the_demo_keeps_to_its_budgets_and_predictions(tmp_path: Path) -> None:
    run = run_local(
        tmp_path, fleet="demo", clients_per_round=10, num_rounds=2, partition="dirichlet", local_epochs=2, lr=0.1
    )
    reports = clients_of(run, 1) + clients_of(run, 2)
    assert len(reports) == 20
    assert {c["device"] for c in reports} == {"board-a", "board-b", "board-c", "board-d"}
    for c in reports:
        assert c["status"] == "ok"
        assert 0 < c["measured_peak"] <= c["budget"]
        assert c["measured_peak"] == pytest.approx(c["predicted_peak"], rel=0.01)
    peak = max(c["measured_peak"] / c["budget"] for c in reports)
    assert run.summary()["max_peak_over_budget"] == peak <= 1


def test_clients_evaluate_in_every_nth_round(tmp_path: Path, grids: Any) -> None:
    grid = grids()
    run = run_local(tmp_path, grid, num_rounds=4, client_evaluation_every=2, fleet="demo")
    asked = [m for m in grid.last.sent if m.metadata.message_type == "evaluate"]
    answers = [m for m in grid.last.received if m.metadata.message_type == "evaluate"]
    assert [m.metadata.group_id for m in asked] == ["2", "2", "2", "4", "4", "4"]
    for record in run.rounds():
        if record["round"] % 2:
            assert (record["client_accuracy"], record["bytes_evaluation"]) == (None, 0)
            continue
        first = 3 * (record["round"] // 2 - 1)
        metrics = [dict(m.content.metric_records["metrics"]) for m in answers[first : first + 3]]
        right = sum(round(m["val-accuracy"] * m["val-examples"]) for m in metrics)
        assert record["client_accuracy"] == pytest.approx(right / sum(m["val-examples"] for m in metrics))
        both = [*asked[first : first + 3], *answers[first : first + 3]]
        assert record["bytes_evaluation"] == sum(content_bytes(m.content) for m in both)


def test_central_evaluation_at_the_end_only(tmp_path: Path) -> None:
    run = run_local(tmp_path, num_rounds=3, evaluate_every=0, strategy="fedavg", **TRIO)
    accuracies = [record["accuracy"] for record in run.rounds()]
    assert accuracies[:2] == [None, None]
    assert accuracies[2] == run.summary()["accuracy"] > 0.1


# ---- updates that must not get in


def edit(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Message], Message]:
    """A reply whose arrays went through `change`."""

    def tamper(reply: Message) -> Message:
        arrays = arrays_of(reply)
        change(arrays)
        reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return reply

    return tamper


def put(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message]:
    return edit(lambda arrays: arrays.update({name: value(arrays[name])}))


def metric(name: str, value: Any) -> Callable[[Message], Message]:
    def tamper(reply: Message) -> Message:
        metrics = dict(reply.content.metric_records["metrics"])
        metrics[name] = value
        if value is None:
            del metrics[name]
        reply.content["metrics"] = MetricRecord(metrics)
        return reply

    return tamper


def bytes_of(content: bytes) -> Callable[[Message], Message]:
    def tamper(reply: Message) -> Message:
        old = reply.content.array_records["arrays"]["head.fc.bias"]
        reply.content.array_records["arrays"]["head.fc.bias"] = Array("float32", old.shape, old.stype, content)
        return reply

    return tamper


def outcome(**fields: Any) -> Callable[[Message], Message]:
    def tamper(reply: Message) -> Message:
        reply.content["outcome"] = Outcome(**{"status": "ok", "reason": "0,1,2,3,4"} | fields).to_record()
        return reply

    return tamper


def without(record: str) -> Callable[[Message], Message]:
    def tamper(reply: Message) -> Message:
        del reply.content[record]
        return reply

    return tamper


def poisoned(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    array.flat[3] = value
    return array


def header_of(text: str) -> bytes:
    """A .npy file with this header and no data."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10,)})
    return file.getvalue()[:10] + text.encode().ljust(len(file.getvalue()) - 11) + b"\n"


W, B = "atoms.0.conv.weight", "head.fc.bias"
BAD = {
    "nan": (put(W, lambda a: poisoned(a, np.nan)), f"array '{W}' holds 1 non-finite values"),
    "inf": (put(W, lambda a: poisoned(a, np.inf)), f"array '{W}' holds 1 non-finite values"),
    "shape": (put(W, lambda a: a[:-1]), rf"array '{W}' has shape \(15, 1, 3, 3\), expected \(16, 1, 3, 3\)"),
    "rank": (put(B, lambda a: a[None]), rf"array '{B}' has shape \(1, 10\), expected \(10,\)"),
    "dtype": (put(W, lambda a: a.astype(np.float64)), f"array '{W}' has dtype float64, expected float32"),
    "integers": (put(W, lambda a: a.astype(np.int64)), f"array '{W}' has dtype int64, expected float32"),
    "name": (edit(lambda d: d.update(evil=d[W])), "array 'evil' is not part of the model"),
    "empty": (edit(lambda d: d.clear()), "the update holds no arrays"),
    "zero-count": (metric("num-examples", 0), "num-examples is 0: it must be a positive integer"),
    "negative-count": (metric("num-examples", -5), "num-examples is -5: it must be a positive integer"),
    "float-count": (metric("num-examples", 57.0), r"num-examples is 57\.0: it must be a positive integer"),
    "infinite-count": (metric("num-examples", float("inf")), "OverflowError: "),
    "no-count": (metric("num-examples", None), "num-examples is None: it must be a positive integer"),
    "list-count": (metric("num-examples", [1, 2]), "list"),
    "infinite-peak": (metric("measured-peak", float("inf")), "OverflowError: "),
    "list-loss": (metric("train-loss", [1.0, 2.0]), r"train-loss is \[1\.0, 2\.0\]: it must be a finite number"),
    "nan-loss": (metric("train-loss", float("nan")), "train-loss is nan: it must be a finite number"),
    "list-accuracy": (metric("val-accuracy", [1.0]), r"val-accuracy is \[1\.0\]"),
    "infinite-seconds": (metric("seconds", float("inf")), "seconds is inf"),
    "no-seen": (metric("seen", None), "KeyError: 'seen'"),
    "infinite-seen": (metric("seen", [float("inf")]), "OverflowError: "),
    "negative-seen": (metric("seen", [-1]), "must not be negative"),
    "two-seen": (metric("seen", [50, 50]), "zip"),
    "other-pieces": (outcome(reason="0,1|2,3"), "piece '0,1' was not in the task's price list"),
    "atom-out-of-range": (outcome(reason="99"), "piece '99' was not in"),
    "a-million-models": (outcome(reason="-1,1000000"), "piece '-1,1000000' was not in"),
    "no-pieces": (outcome(reason=""), "piece '' was not in"),
    "status": (outcome(status="great"), "outcome status 'great'"),
    "no-outcome": (without("outcome"), "KeyError: 'outcome'"),
    "no-metrics": (without("metrics"), "KeyError: 'metrics'"),
    "no-arrays": (without("arrays"), "KeyError: 'arrays'"),
    "garbage-bytes": (bytes_of(b"no array"), f"array '{B}' cannot be read"),
    "no-bytes": (bytes_of(b""), f"array '{B}' cannot be read"),
    "zip-bytes": (bytes_of(b"PK\x03\x04" + bytes(40)), f"array '{B}' cannot be read"),
    "empty-zip": (bytes_of(b"PK\x05\x06" + bytes(18)), f"array '{B}' cannot be read"),
    "broken-header": (bytes_of(header_of("{'descr': '<f4', 'shape': (((")), f"array '{B}' cannot be read"),
    "huge-header": (
        bytes_of(header_of("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,)}")),
        f"array '{B}' cannot be read",
    ),
    "pickle-bytes": (bytes_of(b"\x80\x04K\x01."), f"array '{B}' cannot be read"),
}


class TamperingGrid(RecordingGrid):
    """One client's answer of one round goes through `tamper`; the clients are numbered 0, 1, 2 within the round."""

    tamper: Callable[[Message], Message]
    victim, in_round = 1, 1

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for reply in super().pull_messages(message_ids):
            count = len(training(self.received))
            hit = reply.metadata.message_type == "train" and count == 3 * (self.in_round - 1) + self.victim + 1
            replies.append(type(self).tamper(reply) if hit else reply)
        return replies


@pytest.fixture(scope="module")
def a_round(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[PieceStrategy, list[Message]]]]:
    """A strategy that has asked three clients, and their true answers, anew with every call."""
    folder = tmp_path_factory.mktemp("a-round")
    settings = tiny_settings(strategy="fedavg", output_dir=str(folder), **TRIO | {"dataset": f"npz:{few_digits()}"})
    run_dir = RunDir(folder / "run")
    run_dir.create(settings)
    with LocalGrid(3, settings.to_run_config()) as grid:
        run = rounds.Run(grid, settings, run_dir)
        run.roster.gather(grid, 1.0)

        def ask() -> list[Message]:
            return list(run.strategy.configure_train(1, run.arrays, ConfigRecord(), grid))

        answers = pickle.dumps(list(grid.send_and_receive(ask())))

        def again() -> tuple[PieceStrategy, list[Message]]:
            ask()
            run.strategy.state = type(run.strategy.state)()
            return run.strategy, pickle.loads(answers)

        yield again


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_update_is_dropped_with_its_reason(a_round: Any, kind: str) -> None:
    tamper, reason = BAD[kind]
    strategy, replies = a_round()
    first, _, third = pickle.loads(pickle.dumps(replies))
    arrays, metrics = strategy.aggregate_train(1, iter([replies[0], tamper(replies[1]), replies[2]]))
    reports = list(strategy.reports.values())
    assert [report.status for report in reports] == ["ok", "rejected", "ok"]
    assert re.search(reason, reports[1].reason)
    for name, array in numpy_of(arrays).items():
        np.testing.assert_array_equal(array, average([first, third], name))
    losses = [(r.train_loss, r.examples) for r in (reports[0], reports[2])]
    assert metrics["train-loss"] == pytest.approx(sum(a * n for a, n in losses) / sum(n for _, n in losses))
    json.loads(json.dumps([asdict(report) for report in reports]), parse_constant=no_such_json)


def test_nobody_trained_where_all_are_dropped(a_round: Any) -> None:
    strategy, replies = a_round()
    nan = put(W, lambda a: poisoned(a, np.nan))
    assert strategy.aggregate_train(1, iter([nan(reply) for reply in replies])) == (None, None)
    assert strategy.state.norms == []


@pytest.mark.parametrize(
    "spoil",
    [
        without("metrics"),
        metric("val-accuracy", [0.5]),
        metric("val-accuracy", float("nan")),
        metric("val-examples", float("inf")),
        metric("val-examples", None),
        metric("val-examples", -10),
    ],
)
def test_a_bad_evaluation_is_dropped(a_round: Any, spoil: Callable[[Message], Message]) -> None:
    strategy, replies = a_round()
    rows = [dict(m.content.metric_records["metrics"]) for m in (replies[0], replies[2])]
    result = strategy.aggregate_evaluate(1, iter([replies[0], spoil(replies[1]), replies[2]]))
    total = sum(row["val-examples"] for row in rows)
    assert result["val-accuracy"] == pytest.approx(sum(r["val-accuracy"] * r["val-examples"] for r in rows) / total)


def test_a_run_goes_on_without_a_bad_update(tmp_path: Path, grids: Any) -> None:
    grid = grids(TamperingGrid, tamper=staticmethod(BAD["nan"][0]))
    run = run_local(tmp_path, grid, num_rounds=2, strategy="fedavg", **TRIO)
    first, second = run.rounds()
    assert [c["status"] for c in first["clients"]] == ["ok", "rejected", "ok"]
    assert (first["asked"], first["answered"], first["failed"]) == (3, 2, 1)
    assert [c["status"] for c in second["clients"]] == ["ok"] * 3
    replies, checkpoint = training(grid.last.received), numpy_of(load(run, 1).arrays)
    for name, array in checkpoint.items():
        np.testing.assert_array_equal(array, average([replies[0], replies[2]], name))
    assert run.summary()["status"] == "completed"


def no_such_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def load(run: RunDir, server_round: int) -> Any:
    from server_app.records import read_checkpoint

    return read_checkpoint(run.checkpoints / f"round-{server_round:05d}")


@pytest.mark.parametrize(("limit", "status"), [(10.0, "rejected"), (0.0, "ok")])
def test_a_huge_update_in_a_later_round(tmp_path: Path, grids: Any, limit: float, status: str) -> None:
    huge = put(W, lambda a: a + np.float32(1e6))
    grid = grids(TamperingGrid, tamper=staticmethod(huge), in_round=2)
    run = run_local(tmp_path, grid, num_rounds=2, strategy="fedavg", update_norm_limit=limit, **TRIO)
    assert [c["status"] for c in clients_of(run, 1)] == ["ok"] * 3
    assert [c["status"] for c in clients_of(run, 2)] == ["ok", status, "ok"]
    if status == "rejected":
        assert "past the limit" in clients_of(run, 2)[1]["reason"]
        assert np.abs(model_of(run)[W]).max() < 10


def test_an_error_reply_is_counted_with_its_reason(tmp_path: Path, grids: Any) -> None:
    class Spoils(RecordingGrid):
        """Client 1's task lacks a field, so the client itself fails."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for message in training(messages):
                if message.metadata.dst_node_id == FIRST_NODE + 1:
                    del message.content.config_records["task"]["lr"]
            return super().push_messages(messages)

    grid = grids(Spoils)
    run = run_local(tmp_path, grid, strategy="fedavg", **TRIO)
    (record,) = run.rounds()
    assert [c["status"] for c in record["clients"]] == ["ok", "failed", "ok"]
    assert record["clients"][1]["reason"].startswith("error 2: TypeError: ")
    assert "'lr'" in record["clients"][1]["reason"]
    first, _, third = training(grid.last.received)
    np.testing.assert_array_equal(model_of(run)[W], average([first, third], W))


def test_a_node_nobody_knows_is_not_listened_to(tmp_path: Path, grids: Any) -> None:
    def stranger(reply: Message) -> Message:
        reply.metadata.__dict__["_src_node_id"] = 999
        return reply

    run = run_local(tmp_path, grids(TamperingGrid, tamper=staticmethod(stranger)), strategy="fedavg", **TRIO)
    assert [c["status"] for c in clients_of(run)] == ["ok", "failed", "ok"]
    assert clients_of(run)[1]["reason"] == "no answer within round-timeout"


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.naps = 0
        stand_in = SimpleNamespace(
            monotonic=lambda: self.now, perf_counter=time.perf_counter, sleep=self.nap, strftime=time.strftime
        )
        monkeypatch.setattr(rounds, "time", stand_in)

    def nap(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1
        assert self.naps < 100_000, "the loop waits for ever"


def test_a_client_that_never_answers_is_counted(tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loses(RecordingGrid):
        """The answer of client 1 in round 1 is lost on the way."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return [
                m
                for m in super().pull_messages(message_ids)
                if not (m.metadata.message_type == "train" and len(training(self.received)) == 2)
            ]

    clock = Clock(monkeypatch)
    run = run_local(tmp_path, grids(Loses), strategy="fedavg", num_rounds=2, round_timeout=50.0, **TRIO)
    assert [c["status"] for c in clients_of(run, 1)] == ["ok", "failed", "ok"]
    assert clients_of(run, 1)[1]["reason"] == "no answer within round-timeout"
    assert [c["status"] for c in clients_of(run, 2)] == ["ok"] * 3
    assert 50 <= clock.now < 60


def test_after_a_timeout_the_next_round_goes_on(tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Slow(RecordingGrid):
        """The first train answer takes until after the deadline, when two tasks are still unanswered."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = super().pull_messages(message_ids)
            if len(training(self.received)) == 1:
                clock.now += 1e6
            return replies

    run = run_local(tmp_path, grids(Slow), strategy="fedavg", num_rounds=2, **TRIO)
    assert [c["status"] for c in clients_of(run, 1)] == ["ok", "failed", "failed"]
    assert [c["status"] for c in clients_of(run, 2)] == ["ok"] * 3


# ---- the exchange itself


class Echo(LocalGrid):
    """Answers with what it was sent, the oldest first; counts how many messages are out at once."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, {})
        self.out: list[tuple[str, Message]] = []
        self.most = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        new = [(f"id{m.metadata.dst_node_id}", m) for m in messages]
        self.out += new
        self.most = max(self.most, len(self.out))
        return [identifier for identifier, _ in new]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        assert {identifier for identifier, _ in self.out} == set(message_ids)
        identifier, message = self.out.pop(0)
        message.metadata.__dict__["_message_id"] = identifier
        return [Message(message.content, reply_to=message)]


@pytest.mark.parametrize(("in_flight", "most"), [(1, 1), (2, 2), (7, 7), (50, 9)])
def test_exchange_keeps_to_in_flight_and_makes_messages_late(in_flight: int, most: int) -> None:
    identify(1)
    grid, made = Echo(9), [0]

    def messages() -> Iterator[Message]:
        for node in range(9):
            made[0] += 1
            yield Message(RecordDict(), dst_node_id=node + 2, message_type="train")

    answered = 0
    for reply in exchange(grid, messages(), in_flight, 100):
        answered += 1
        assert made[0] <= answered - 1 + in_flight
        assert reply.metadata.src_node_id == answered + 1
    assert (answered, grid.most) == (9, most)


def test_a_run_keeps_to_max_in_flight(tmp_path: Path, grids: Any) -> None:
    class Counts(RecordingGrid):
        most: dict[str, int]

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            identifiers = super().push_messages(messages)
            kind = self.sent[-1].metadata.message_type
            out = sum(m.metadata.message_type == kind for m in self.sent) - sum(
                m.metadata.message_type == kind for m in self.received
            )
            self.most = getattr(self, "most", {})
            self.most[kind] = max(self.most.get(kind, 0), out)
            return identifiers

    grid = grids(Counts)
    run_local(tmp_path, grid, clients_per_round=5, max_in_flight=2, client_evaluation_every=1, strategy="fedavg")
    assert grid.last.most["train"] == grid.last.most["evaluate"] == 2


def test_an_exchange_without_messages_ends() -> None:
    assert list(exchange(Echo(1), [], 4, 100)) == []


# ---- how a run ends


def test_fedavg_on_small_devices_aborts_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunAbortedError) as caught:
        run_local(tmp_path, strategy="fedavg", fleet="demo", clients_per_round=0)
    # the largest board has 0.95 of a step of 1,029,248 bytes
    first, second = str(caught.value).splitlines()
    assert first == "no client trained in round 1: 20 asked, 20 refused for memory"
    assert "client 3 (board-d): training the whole model needs 1,029,248 bytes" in second
    assert "the budget allows 977,785" in second
    assert "strategy = fedepth" in second
    run = RunDir(tmp_path / "run")
    summary = run.summary()
    assert (summary["status"], summary["reason"]) == ("failed", str(caught.value))
    assert (summary["clients_asked"], summary["clients_failed"], summary["max_peak_over_budget"]) == (20, 20, None)
    assert {c["status"] for c in clients_of(run)} == {"memory"}
    assert same(model_of(run), first_arrays(tiny_settings()))
    assert not (run.path / "model.safetensors").exists()


def test_max_empty_rounds(tmp_path: Path) -> None:
    with pytest.raises(RunAbortedError, match="no client trained in round 3"):
        run_local(tmp_path, strategy="fedavg", fleet="demo", num_rounds=5, max_empty_rounds=3)
    assert len(RunDir(tmp_path / "run").rounds()) == 3


def test_one_useful_reply_resets_the_empty_rounds(tmp_path: Path, grids: Any) -> None:
    class EveryOther(RecordingGrid):
        """All answers of rounds 1, 3 and 4 are errors."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = []
            for reply in super().pull_messages(message_ids):
                (task,) = [m for m in self.sent if m.metadata.message_id == reply.metadata.reply_to_message_id]
                lost = reply.metadata.message_type == "train" and task.metadata.group_id in ("1", "3", "4")
                replies.append(Message(Error(8, "gone"), reply_to=task) if lost else reply)
            return replies

    with pytest.raises(
        RunAbortedError, match="no client trained in round 4: 3 asked, 0 refused for memory\nclient 0: error 8"
    ):
        run_local(tmp_path, grids(EveryOther), strategy="fedavg", num_rounds=9, max_empty_rounds=2, **TRIO)
    assert [r["answered"] for r in RunDir(tmp_path / "run").rounds()] == [0, 3, 0, 0]


def test_target_accuracy_ends_a_run(tmp_path: Path) -> None:
    run = run_local(tmp_path, num_rounds=3, target_accuracy=0.02, strategy="fedavg", **TRIO)
    assert (len(run.rounds()), run.summary()["status"]) == (1, "completed")
    assert (run.path / "model.safetensors").is_file()
    assert (
        len(run_local(tmp_path / "high", num_rounds=2, target_accuracy=0.9999, strategy="fedavg", **TRIO).rounds()) == 2
    )


def test_patience_ends_a_run(tmp_path: Path) -> None:
    run = run_local(tmp_path, num_rounds=6, patience=2, lr=1e-30, strategy="fedavg", **TRIO)
    assert len({record["accuracy"] for record in run.rounds()}) == 1
    assert len(run.rounds()) == 3


def test_too_few_nodes(tmp_path: Path) -> None:
    settings = tiny_settings(clients=5, node_timeout=0.01, output_dir=str(tmp_path))
    run_dir = RunDir(tmp_path / "run")
    with (
        LocalGrid(3, settings.to_run_config()) as grid,
        pytest.raises(TooFewNodesError, match=r"3 of 5 clients connected within 0\.01 s \(node-timeout\)"),
    ):
        run_experiment(grid, settings, run_dir)
    assert run_dir.summary()["status"] == "failed"
    assert "3 of 5 clients" in run_dir.summary()["reason"]


def test_clients_0_takes_who_is_there(tmp_path: Path) -> None:
    settings = tiny_settings(clients=0, clients_per_round=0, validation_share=0.85, output_dir=str(tmp_path))
    run_dir = RunDir(tmp_path / "run")
    with LocalGrid(4, settings.to_run_config()) as grid:
        run_experiment(grid, settings, run_dir)
    assert [c["client"] for c in clients_of(run_dir)] == [0, 1, 2, 3]


# ---- resumption


# A client that teaches a companion and keeps it, one that trains in pieces, one that trains the whole model.
MUTUAL = TRIO | {"fleet": fleet_json(rich=2.2, poor=0.6, full=1.0)}
LOCAL_NORMS = TRIO | {"fleet": fleet_json(poor=0.6, full=1.0), "batch_norm": "local"}
RESUMABLE = {
    "demo": {"fleet": "demo"},
    "mutual-local-norms": MUTUAL | {"batch_norm": "local", "augment": True, "feature_cache": False, "local_epochs": 2},
}
UNTIMED = ("round", "accuracy", "loss", "train_loss", "accuracy_by_device")


def results(run: RunDir) -> list[dict[str, Any]]:
    """All that a run's records say, but for seconds, the resident set, and bytes: a resumed run asks again who is there."""
    clients = ("client", "status", "pieces", "measured_peak", "train_loss", "val_accuracy", "examples", "flops")
    return [
        {key: record[key] for key in UNTIMED} | {"clients": [[c[k] for k in clients] for c in record["clients"]]}
        for record in run.rounds()
    ]


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, kind: str) -> None:
    settings = RESUMABLE[kind]
    unbroken = run_local(tmp_path / "unbroken", num_rounds=4, **settings)
    broken = run_local(tmp_path / "broken", num_rounds=2, **settings)
    assert not same(model_of(unbroken), model_of(broken))
    resumed = run_local(tmp_path / "elsewhere", num_rounds=4, resume_from=str(broken.path), **settings)
    assert resumed.path == broken.path
    assert same(model_of(unbroken), model_of(resumed))
    assert results(unbroken) == results(resumed)


@pytest.mark.parametrize("what", ["companion", "batch-norm"])
def test_what_clients_remember_matters(tmp_path: Path, what: str) -> None:
    """Else the test above would prove nothing about the clients' state."""
    settings = MUTUAL if what == "companion" else LOCAL_NORMS
    unbroken = run_local(tmp_path / "unbroken", num_rounds=2, **settings)
    broken = run_local(tmp_path / "broken", num_rounds=1, **settings)
    (kept,) = broken.path.glob(f"clients/*/0/state/1/{what}*")
    assert kept.name == {"companion": "companion-1", "batch-norm": "batch-norm"}[what]
    shutil.rmtree(broken.path / "clients")
    resumed = run_local(tmp_path, num_rounds=2, resume_from=str(broken.path), **settings)
    assert not same(model_of(unbroken), model_of(resumed))


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run = run_local(tmp_path, num_rounds=2, strategy="fedavg", **TRIO)
    before, records = model_of(run), run.rounds_file.read_bytes()
    run_local(tmp_path, num_rounds=2, resume_from=str(run.path), strategy="fedavg", **TRIO)
    assert same(before, model_of(run))
    assert run.rounds_file.read_bytes() == records
    assert run.summary()["status"] == "completed"


def test_a_resumption_with_other_settings_is_refused_and_leaves_the_run_alone(tmp_path: Path) -> None:
    run = run_local(tmp_path)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match=r"setting lr = 0\.25 differs from 0\.05 of the run to resume"):
        run_local(tmp_path, num_rounds=2, lr=0.25, resume_from=str(run.path))
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    changed = {path.name for path in before if after[path] != before[path]}
    assert changed <= {"summary.json"}
    assert after.keys() == before.keys()


def test_a_new_run_of_an_old_name_does_not_take_the_old_ones_place_back(tmp_path: Path) -> None:
    """The old run's checkpoints must neither be resumed from nor push out the new ones."""
    settings = TRIO | {"strategy": "fedavg"}
    run_local(tmp_path, num_rounds=4, seed=2, **settings)
    new = run_local(tmp_path, num_rounds=1, seed=3, **settings)
    assert [path.name for path in sorted(new.checkpoints.iterdir())] == ["round-00001"]
    resumed = run_local(tmp_path, num_rounds=2, seed=3, resume_from=str(new.path), **settings)
    assert same(model_of(resumed), model_of(run_local(tmp_path / "other", num_rounds=2, seed=3, **settings)))


def test_resume_from_auto_takes_the_run_with_these_settings(tmp_path: Path) -> None:
    run_local(tmp_path, run_name="one", seed=1, strategy="fedavg")
    run_local(tmp_path, run_name="two", seed=2, strategy="fedavg")
    settings = tiny_settings(seed=1, strategy="fedavg", num_rounds=3, resume_from="auto", output_dir=str(tmp_path))
    assert resolve_run_dir(settings).path == tmp_path.resolve() / "one"
    with pytest.raises(ValueError, match="no run with these settings"):
        resolve_run_dir(tiny_settings(seed=3, resume_from="auto", output_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="not the folder of a run"):
        resolve_run_dir(tiny_settings(resume_from=str(tmp_path), output_dir=str(tmp_path)))


KILLED = MUTUAL | {"batch_norm": "local", "num_rounds": 3}
POINTS = {  # where it was killed, and how many rounds the newest checkpoint holds
    "first-round": 0,
    "evaluation": 2,
    "half-a-record": 2,
    "inside-checkpoint": 2,
    "after-checkpoint": 3,
    "client-has-committed": 2,
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, each of which was killed with SIGKILL at its point."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(HERE / "kill_driver.py"), str(folder), json.dumps(KILLED), *POINTS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.stdout.splitlines()[-len(POINTS) :] == [f"{point} 9" for point in POINTS]
    return folder


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("never-killed"), **KILLED)


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_resumes_to_the_unbroken_one(killed: Path, never_killed: RunDir, point: str) -> None:
    run_dir = RunDir(killed / point / "run")
    checkpoint = run_dir.load_checkpoint()
    assert (checkpoint.values["round"] if checkpoint else 0) == POINTS[point]
    assert not (run_dir.path / "model.safetensors").exists()
    resumed = run_local(killed / point, resume_from=str(run_dir.path), **KILLED)
    assert same(model_of(resumed), model_of(never_killed))
    assert results(resumed) == results(never_killed)
    assert (resumed.path / "model.safetensors").read_bytes()[-1000:] == (
        never_killed.path / "model.safetensors"
    ).read_bytes()[-1000:]
