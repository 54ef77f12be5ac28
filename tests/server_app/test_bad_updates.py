"""Updates that must not get in, and replies that are errors: each is counted with its reason, the run goes on."""

import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord
from helpers import (
    TRIO,
    RecordingGrid,
    arrays_of,
    average,
    changing,
    clients_of,
    few_digits,
    model_of,
    numpy_of,
    run_local,
    tiny_settings,
    training,
)

from piecework.models.work_item import WorkItem
from piecework.server_app import rounds
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.server_app.records import RunDir
from piecework.strategies.cascade.fedepth.mutual import Mutual
from piecework.strategies.server import MethodServer
from piecework.training.answers import Outcome
from piecework.training.parcels import pack


def edit(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Message], Message]:
    """A reply whose arrays went through `change`."""

    def tamper(reply: Message) -> Message:
        arrays = arrays_of(reply)
        change(arrays)
        reply.content["arrays"] = pack(arrays.items())
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
        with changing(reply) as arrays:
            old = arrays["head.fc.bias"]
            arrays["head.fc.bias"] = Array("float32", old.shape, old.stype, content)
        return reply

    return tamper


def outcome(**fields: Any) -> Callable[[Message], Message]:
    def tamper(reply: Message) -> Message:
        reply.content["outcome"] = Outcome(
            **{"status": "ok", "done": (WorkItem((0, 1, 2, 3, 4)),)} | fields
        ).to_record()
        return reply

    return tamper


def done_is(text: str) -> Callable[[Message], Message]:
    """The work items of an outcome as this text."""

    def tamper(reply: Message) -> Message:
        reply.content.config_records["outcome"]["done"] = text
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
    "shape": (put(W, lambda a: a[:-1]), rf"array '{W}' has shape (15, 1, 3, 3), expected (16, 1, 3, 3)"),
    "rank": (put(B, lambda a: a[None]), rf"array '{B}' has shape (1, 10), expected (10,)"),
    "dtype": (put(W, lambda a: a.astype(np.float64)), f"array '{W}' has dtype float64, expected float32"),
    "integers": (put(W, lambda a: a.astype(np.int64)), f"array '{W}' has dtype int64, expected float32"),
    "name": (edit(lambda d: d.update(evil=d[W])), "array 'evil' is not part of the model"),
    "empty": (edit(lambda d: d.clear()), "the update holds no arrays"),
    "zero-count": (metric("num-examples", 0), "num-examples is 0: it must be a positive integer"),
    "negative-count": (metric("num-examples", -5), "num-examples is -5: it must be greater than or equal to 0"),
    "float-count": (metric("num-examples", 57.0), "num-examples is 57.0: it must be a valid integer"),
    "infinite-count": (metric("num-examples", float("inf")), "num-examples is inf: it must be a valid integer"),
    "no-count": (metric("num-examples", None), "num-examples is 0: it must be a positive integer"),
    "list-count": (metric("num-examples", [1, 2]), "num-examples is [1, 2]: it must be a valid integer"),
    "infinite-peak": (metric("measured-peak", float("inf")), "measured-peak is inf: it must be a valid integer"),
    "list-loss": (metric("train-loss", [1.0, 2.0]), "train-loss is [1.0, 2.0]: it must be a valid number"),
    "nan-loss": (metric("train-loss", float("nan")), "train-loss is nan: it must be a finite number"),
    "list-accuracy": (metric("val-accuracy", [1.0]), "val-accuracy is [1.0]"),
    "infinite-seconds": (metric("seconds", float("inf")), "seconds is inf"),
    "no-seen": (metric("seen", None), "KeyError: 'seen'"),
    "infinite-seen": (metric("seen", [float("inf")]), "seen is inf: it must be a valid integer"),
    "negative-seen": (metric("seen", [-1]), "seen is -1: it must be greater than or equal to 0"),
    "endless-seen": (
        metric("seen", [10**12]),
        "seen is 1000000000000: a work item trains on at most 56 of 56 examples",
    ),
    "endless-available": (
        metric("memory-available", 1e300),
        "memory-available is 1e+300: it must be less than or equal to",
    ),
    "endless-validation": (metric("val-examples", 1.7e308), "val-examples is 1.7e+308: it must be a valid integer"),
    "too-much-validation": (metric("val-examples", 10**7), "val-examples is 10000000: the client has "),
    "own-figure": (metric("mine", [1.0, 1e300]), "mine is [1.0, 1e+300]: it must be a finite number of at most 1e+30"),
    "budget": (
        metric("budget", 2**62),
        "budget is 4611686018427387904: it must be less than or equal to 1152921504606846976",
    ),
    "two-seen": (metric("seen", [50, 50]), "zip"),
    "other-items": (
        outcome(done=(WorkItem((0, 1)), WorkItem((2, 3)))),
        "work item {'atoms': [0, 1]} was not in the task's cost list",
    ),
    "atom-out-of-range": (outcome(done=(WorkItem((99,)),)), "work item {'atoms': [99]} was not in"),
    "a-million-models": (
        outcome(done=(WorkItem((0, 1, 2, 3, 4), mode=Mutual(10**6)),)),
        "work item {'atoms': [0, 1, 2, 3, 4], 'copies': 1000000} was not in",
    ),
    "no-items": (outcome(done=()), "0 work items were done, but the task's cost list has 1"),
    "items-of-text": (done_is("all of them"), "JSONDecodeError"),
    "nested-items": (done_is("[" * 100_000), "RecursionError: "),
    "items-of-numbers": (done_is("[7]"), "a work item is 7: expected names"),
    "an-unknown-field": (done_is('[{"atoms":[0],"colour":"red"}]'), "a work item has no colour"),
    "atoms-of-words": (done_is('[{"atoms":["first"]}]'), "outcome atoms is 'first': it must be a valid integer"),
    "status": (outcome(status="great"), "outcome status is 'great': it must be 'ok'"),
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
def a_round(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[MethodServer, list[Message]]]]:
    """A strategy that has asked three clients, and their true answers, again with every call."""
    folder = tmp_path_factory.mktemp("a-round")
    settings = tiny_settings(strategy="fedavg", output_dir=str(folder), **TRIO | {"dataset": f"npz:{few_digits()}"})
    run_dir = RunDir(folder / "run")
    run_dir.create(settings)
    with LocalGrid(3, settings.to_run_config()) as grid:
        run = rounds.Run(grid, settings, run_dir)
        run.wait_for_clients()

        def ask() -> list[Message]:
            return list(run.server.configure_train(1, run.arrays, ConfigRecord(), grid))

        answers = pickle.dumps(list(grid.send_and_receive(ask())))

        def again() -> tuple[MethodServer, list[Message]]:
            ask()
            run.server.method.state = type(run.server.method.state)()
            return run.server, pickle.loads(answers)

        yield again


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_update_is_dropped_with_its_reason(a_round: Any, kind: str) -> None:
    tamper, reason = BAD[kind]
    server, replies = a_round()
    first, _, third = pickle.loads(pickle.dumps(replies))
    arrays, metrics = server.aggregate_train(1, iter([replies[0], tamper(replies[1]), replies[2]]))
    reports = list(server.round.reports.values())
    assert [report.status for report in reports] == ["ok", "rejected", "ok"]
    assert reason in reports[1].reason
    for name, array in numpy_of(arrays).items():
        np.testing.assert_array_equal(array, average([first, third], name))
    losses = [(r.train_loss, r.examples) for r in (reports[0], reports[2])]
    assert metrics["train-loss"] == pytest.approx(sum(a * n for a, n in losses) / sum(n for _, n in losses))
    json.loads(json.dumps([asdict(report) for report in reports]), parse_constant=no_such_json)


def test_nobody_trained_where_all_are_dropped(a_round: Any) -> None:
    server, replies = a_round()
    nan = put(W, lambda a: poisoned(a, np.nan))
    assert server.aggregate_train(1, iter([nan(reply) for reply in replies])) == (None, None)
    assert server.method.state.norms == {}


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
    server, replies = a_round()
    rows = [dict(m.content.metric_records["metrics"]) for m in (replies[0], replies[2])]
    result = server.aggregate_evaluate(1, iter([replies[0], spoil(replies[1]), replies[2]]))
    total = sum(row["val-examples"] for row in rows)
    assert result["val-accuracy"] == pytest.approx(sum(r["val-accuracy"] * r["val-examples"] for r in rows) / total)


@pytest.mark.slow
def test_momentum_is_compared_layer_by_layer(tmp_path: Path, grids: Any) -> None:
    """What one layer's momentum hides among that of all would throw every honest client off in the next round."""
    poison = put("momentum_atoms.0.bn.bias", lambda array: array + np.float32(10))
    grid = grids(TamperingGrid, tamper=staticmethod(poison), in_round=2)
    run = run_local(
        tmp_path, grid, strategy="prism", prism__server_momentum=True, num_rounds=3, fleet="unlimited", **TRIO
    )
    assert [[c["status"] for c in clients_of(run, n)] for n in (1, 2, 3)] == [
        ["ok"] * 3,
        ["ok", "rejected", "ok"],
        ["ok"] * 3,
    ]
    assert "momentum_atoms.0" in clients_of(run, 2)[1]["reason"]


def test_while_statistics_are_measured_weights_stay(tmp_path: Path, grids: Any) -> None:
    grid = grids(TamperingGrid, tamper=staticmethod(put("atoms.1.conv.weight", lambda array: array * np.float32(-3))))
    settings = TRIO | {
        "strategy": "profl",
        "architecture__batch_norm": "running",
        "num_rounds": 1,
        "fleet": "unlimited",
    }
    run = run_local(tmp_path, grid, **settings, profl__stage_rounds=1, profl__distil_rounds=1)
    sent = next(arrays_of(message) for message in training(grid.last.sent))
    for name, array in model_of(run).items():
        if name in sent and not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            np.testing.assert_array_equal(array, sent[name])


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
    from piecework.server_app.records import read_checkpoint

    return read_checkpoint(run.checkpoints / f"round-{server_round:05d}")


@pytest.mark.parametrize(("limit", "status"), [(10.0, "rejected"), (0.0, "ok")])
def test_a_huge_update_in_a_later_round(tmp_path: Path, grids: Any, limit: float, status: str) -> None:
    huge = put(W, lambda a: a + np.float32(1e6))
    grid = grids(TamperingGrid, tamper=staticmethod(huge), in_round=2)
    run = run_local(tmp_path, grid, num_rounds=2, strategy="fedavg", faults__update_norm_limit=limit, **TRIO)
    assert [c["status"] for c in clients_of(run, 1)] == ["ok"] * 3
    assert [c["status"] for c in clients_of(run, 2)] == ["ok", status, "ok"]
    if status == "rejected":
        assert "more than the limit" in clients_of(run, 2)[1]["reason"]
        assert np.abs(model_of(run)[W]).max() < 10


def test_an_error_reply_is_counted_with_its_reason(tmp_path: Path) -> None:
    class Spoils(RecordingGrid):
        """A field of client 1's task is missing, so the client itself fails."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for message in training(messages):
                if message.metadata.dst_node_id == FIRST_NODE + 1:
                    del message.content.config_records["task"]["lr"]
            return super().push_messages(messages)

    grid = Spoils
    run = run_local(tmp_path, grid, strategy="fedavg", **TRIO)
    (record,) = run.rounds()
    assert [c["status"] for c in record["clients"]] == ["ok", "failed", "ok"]
    assert record["clients"][1]["reason"] == "error 2: MessageError: the task cannot be used: lr is missing"
    first, _, third = training(grid.last.received)
    np.testing.assert_array_equal(model_of(run)[W], average([first, third], W))


@pytest.mark.parametrize("other", [FIRST_NODE, 999])
def test_nobody_answers_for_another(tmp_path: Path, grids: Any, other: int) -> None:
    """Client 1's reply names the node of client 0, which answers too, or one that nobody knows."""

    def in_anothers_name(reply: Message) -> Message:
        reply.metadata.__dict__["_src_node_id"] = other
        return reply

    run = run_local(tmp_path, grids(TamperingGrid, tamper=staticmethod(in_anothers_name)), strategy="fedavg", **TRIO)
    assert [c["status"] for c in clients_of(run)] == ["ok", "rejected", "ok"]
    assert clients_of(run)[1]["reason"] == f"error 400: its reply is made out in the name of another node, {other}"
    first, _, third = training(RecordingGrid.last.received)
    np.testing.assert_array_equal(model_of(run)[W], average([first, third], W))
