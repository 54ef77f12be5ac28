"""Whole runs on the in-process grid: what reaches the model, what is recorded, how messages are exchanged."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from helpers import (
    TRIO,
    RecordingGrid,
    arrays_of,
    average,
    clients_of,
    examples_of,
    first_arrays,
    fleet_json,
    model_of,
    run_local,
    same,
    tiny_settings,
    training,
)

from piecework.client_app import app as client
from piecework.client_app import prepare
from piecework.device_profiles.profile import MeasuredDevice
from piecework.federation.transport import Transport
from piecework.server_app.experiment import run_experiment
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE, identify
from piecework.server_app.records import RunDir
from piecework.training.messages import content_bytes

# ---- the model


def test_with_full_budgets_fedepth_is_fedavg(tmp_path: Path) -> None:
    settings = {
        "num_rounds": 2,
        "training__local_epochs": 2,
        "training__momentum": 0.9,
        "architecture__batch_norm": "batch",
    }
    fedavg = run_local(tmp_path / "fedavg", strategy="fedavg", **settings)
    fedepth = run_local(tmp_path / "fedepth", strategy="fedepth", **settings)
    assert same(model_of(fedavg), model_of(fedepth))
    assert not same(model_of(fedavg), first_arrays(tiny_settings()))
    assert [c["pieces"] for c in clients_of(fedepth)] == [[[0, 1, 2, 3, 4]]] * 3


def test_a_round_is_the_weighted_mean_of_its_replies(tmp_path: Path) -> None:
    grid = RecordingGrid
    run = run_local(
        tmp_path,
        grid,
        fleet=fleet_json(a=0.5, b=0.75, c=1.0),
        data__partition="dirichlet",
        data__partition_balanced=False,
    )
    replies, model = training(grid.last.received), model_of(run)
    assert len(replies) == 3
    assert len({examples_of(m) for m in replies}) > 1
    for name, array in model.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, average(replies, name))


def test_one_client_gives_its_own_weights(tmp_path: Path) -> None:
    grid = RecordingGrid
    run = run_local(tmp_path, grid, clients_per_round=1, architecture__batch_norm="running")
    (reply,) = training(grid.last.received)
    model = model_of(run)
    assert same(model, arrays_of(reply))
    assert model["atoms.0.bn.num_batches_tracked"].dtype == np.int64
    assert model["atoms.0.bn.num_batches_tracked"] == -(-examples_of(reply) // 16)


# At batch 64 one step takes, in bytes: conv1 1,163,392; conv2 1,426,432; conv3 1,183,104; conv4 1,088,896; conv5 1,360,000;
# conv1 with conv3 behind it 1,463,168. So 1.4 MB train all but conv2, one by one; and 1.3 MB cannot train the end.
PARTIAL = TRIO | {"training__batch_size": 64, "fedepth__mutual_models": 1}


def test_parameters_that_no_client_trained_stay_as_they_were(tmp_path: Path) -> None:
    grid = RecordingGrid
    # no client can train conv2: what is then left of it is what is tested
    run = run_local(tmp_path, grid, fleet=fleet_json(small=1_500_000), faults__allow_untrained=True, **PARTIAL)
    assert [c["pieces"] for c in clients_of(run)] == [[[0], [2], [3], [4]]] * 3
    assert all("atoms.1.conv.weight" not in arrays_of(m) for m in training(grid.last.received))
    before, after = first_arrays(tiny_settings()), model_of(run)
    conv2 = [name for name in after if name.startswith("atoms.1.")]
    assert len(conv2) == 3
    assert same(before, after, conv2)
    changed = {name for name in after if not same(before, after, [name])}
    assert changed == set(after) - set(conv2)


def test_partial_training_leaves_out_or_dilutes(tmp_path: Path) -> None:
    fleet = fleet_json(rich=10_000_000, small=1_500_000, medium=1_700_000)
    models = {}
    for how in ("leave-out", "dilute"):
        grid = RecordingGrid
        run = run_local(tmp_path / how, grid, fleet=fleet, fedepth__partial_training=how, **PARTIAL)
        assert [c["pieces"] for c in clients_of(run)] == [
            [[0, 1, 2, 3, 4]],
            [[0], [2], [3], [4]],
            [[0], [1], [2], [3], [4]],
        ]
        replies, models[how] = training(grid.last.received), model_of(run)
        senders = [m for m in replies if "atoms.1.conv.weight" in arrays_of(m)]
        assert len(senders) == (2 if how == "leave-out" else 3)
        np.testing.assert_array_equal(models[how]["atoms.1.conv.weight"], average(senders, "atoms.1.conv.weight"))
    small = next(m for m in replies if m.metadata.src_node_id == FIRST_NODE + 1)
    assert same(arrays_of(small), first_arrays(tiny_settings()), ["atoms.1.conv.weight"])
    differ = {name for name in models["dilute"] if not same(models["dilute"], models["leave-out"], [name])}
    assert differ == {"atoms.1.conv.weight", "atoms.1.bn.weight", "atoms.1.bn.bias"}


@pytest.mark.slow
def test_number_of_workers_does_not_matter(tmp_path: Path) -> None:
    settings = {"num_rounds": 2, "fleet": "demo", "clients_per_round": 4, "data__partition": "dirichlet"}
    one = run_local(tmp_path / "one", workers=1, **settings)
    two = run_local(tmp_path / "two", workers=2, **settings)
    assert same(model_of(one), model_of(two))
    keys = ("client", "pieces", "measured_peak", "train_loss", "val_accuracy", "bytes_up", "simulated_seconds")
    assert [[c[k] for k in keys] for c in clients_of(one, 2)] == [[c[k] for k in keys] for c in clients_of(two, 2)]


# ---- what is recorded


def test_bytes_and_clients_are_as_on_the_messages(tmp_path: Path) -> None:
    grid = RecordingGrid
    run = run_local(tmp_path, grid, fleet="demo", num_rounds=2, architecture__batch_norm="batch")
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
    slowest = [max(c["simulated_seconds"] for c in record["clients"]) for record in run.rounds()]
    assert summary["simulated_seconds"] == pytest.approx(sum(slowest))
    assert min(slowest) > 0


def test_the_demo_keeps_to_its_budgets_and_predictions(tmp_path: Path) -> None:
    run = run_local(
        tmp_path,
        fleet="demo",
        clients_per_round=10,
        num_rounds=2,
        data__partition="dirichlet",
        training__local_epochs=2,
        training__lr=0.1,
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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "m-fedepth"])
def test_devices_that_measure_themselves(tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`device = "auto"`: the budget is free memory less the reserve, and every reply has the free memory before its task."""
    monkeypatch.setattr(prepare, "available_memory", lambda: 10**9)
    given = {"strategy": strategy, "num_rounds": 2, "clients": 2, "fleet": "demo", "memory__reserve": 64_000_000}
    settings = tiny_settings(output_dir=str(tmp_path), evaluation__on_clients_every=2, **given)
    node_config = {"device": "auto", "state-dir": str(tmp_path / "device")}
    run = RunDir(tmp_path / "run")
    with RecordingGrid(2, settings.to_run_config(), 1, node_config) as grid:
        run_experiment(grid, settings, run)
    for record in run.rounds():
        assert [(c["device"], c["status"]) for c in record["clients"]] == [("auto", "ok")] * 2
        assert all(c["measured_peak"] <= c["predicted_peak"] < c["budget"] for c in record["clients"])
        assert [c["budget"] for c in record["clients"]] == [936_000_000] * 2
        assert all(c["simulated_seconds"] > 0 for c in record["clients"])
    assert list((tmp_path / "device").iterdir()) == [
        tmp_path / "device" / json.loads(checkpoint_state(run))["experiment-id"]
    ]
    reported = {
        (m.metadata.message_type, m.content.metric_records["metrics"].get("memory-available")) for m in grid.received
    }
    kinds = ["query.device", "train", "evaluate"] + ["query.statistics"] * (strategy == "m-fedepth")
    assert reported == {(kind, 10**9) for kind in kinds}


def test_a_device_that_is_refused_reports_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1 had too little in round 1 only: the server's budget of round 2 follows from that answer, and 3's from 2's."""
    had = iter([10**9, 2**26 + 1000, *[10**9] * 4])
    monkeypatch.setattr(prepare, "memory_for_training", lambda device: next(had))
    settings = tiny_settings(strategy="fedavg", num_rounds=3, clients=2, fleet="demo", output_dir=str(tmp_path))
    run = RunDir(tmp_path / "run")
    with LocalGrid(2, settings.to_run_config(), 1, {"device": "auto", "state-dir": str(tmp_path / "device")}) as grid:
        run_experiment(grid, settings, run)
    found = [[(c["status"], c["budget"]) for c in record["clients"]] for record in run.rounds()]
    rich = "ok", 10**9 - 2**26
    assert found == [[rich, ("memory", 0)], [rich, ("memory", 0)], [rich, rich]]


def test_a_device_measures_its_speed_with_the_threads_of_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, threads = torch.get_num_threads(), list[int]()

    def measure(folder: Path) -> MeasuredDevice:
        threads.append(torch.get_num_threads())
        torch.set_num_threads(3)  # as the process of the next question may have
        return MeasuredDevice(10**9, 1e9, 1e8)

    monkeypatch.setattr(client, "measure_device", measure)
    given = {"strategy": "fedavg", "num_rounds": 1, "clients": 2, "fleet": "demo", "training__torch_threads": 2}
    settings = tiny_settings(output_dir=str(tmp_path), **given)
    torch.set_num_threads(3)
    try:
        with LocalGrid(
            2, settings.to_run_config(), 1, {"device": "auto", "state-dir": str(tmp_path / "device")}
        ) as grid:
            run_experiment(grid, settings, RunDir(tmp_path / "run"))
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 2]


def checkpoint_state(run: RunDir) -> str:
    return (run.path / "checkpoint" / "round-00002" / "state.json").read_text()


def test_clients_evaluate_in_every_nth_round(tmp_path: Path) -> None:
    grid = RecordingGrid
    run = run_local(
        tmp_path, grid, num_rounds=4, evaluation__on_clients_every=2, fleet="demo", architecture__batch_norm="batch"
    )
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
    run = run_local(tmp_path, num_rounds=3, evaluation__every=0, strategy="fedavg", **TRIO)
    accuracies = [record["accuracy"] for record in run.rounds()]
    assert accuracies[:2] == [None, None]
    assert accuracies[2] == run.summary()["accuracy"] > 0.1


# ---- the exchange itself


class Echo(LocalGrid):
    """Answers with what it was sent, the oldest first; counts how many messages are out at once."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, {})
        self.out: list[tuple[str, Message]] = []
        self.maximum = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        new = [(f"id{m.metadata.dst_node_id}", m) for m in messages]
        self.out += new
        self.maximum = max(self.maximum, len(self.out))
        return [identifier for identifier, _ in new]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        assert {identifier for identifier, _ in self.out} == set(message_ids)
        identifier, message = self.out.pop(0)
        message.metadata.__dict__["_message_id"] = identifier
        return [Message(message.content, reply_to=message)]


@pytest.mark.parametrize(("in_flight", "maximum"), [(1, 1), (2, 2), (7, 7), (50, 9)])
def test_exchange_keeps_to_in_flight_and_makes_messages_late(in_flight: int, maximum: int) -> None:
    identify(1)
    grid, made = Echo(9), [0]

    def messages() -> Iterator[Message]:
        for node in range(9):
            made[0] += 1
            yield Message(RecordDict(), dst_node_id=node + 2, message_type="train")

    answered = 0
    for reply in Transport(grid, in_flight, 100).exchange(1, messages()):
        answered += 1
        assert made[0] <= answered - 1 + in_flight
        assert reply.metadata.src_node_id == answered + 1
    assert (answered, grid.maximum) == (9, maximum)


def test_a_run_keeps_to_max_in_flight(tmp_path: Path) -> None:
    class Counts(RecordingGrid):
        maximum: dict[str, int]

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            identifiers = super().push_messages(messages)
            kind = self.sent[-1].metadata.message_type
            out = sum(m.metadata.message_type == kind for m in self.sent) - sum(
                m.metadata.message_type == kind for m in self.received
            )
            self.maximum = getattr(self, "maximum", {})
            self.maximum[kind] = max(self.maximum.get(kind, 0), out)
            return identifiers

    grid = Counts
    run_local(
        tmp_path,
        grid,
        clients_per_round=5,
        messages__max_in_flight=2,
        evaluation__on_clients_every=1,
        strategy="fedavg",
    )
    assert grid.last.maximum["train"] == grid.last.maximum["evaluate"] == 2


def test_an_exchange_without_messages_ends() -> None:
    assert list(Transport(Echo(1), 4, 100).exchange(1, [])) == []
