"""Deadlines from the predicted time of each client's own work: by hand, on the simulated clock, and where answers arrive."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from helpers import FEW, TRIO, RecordingGrid, clients_of, model_of, run_local, same, training

from piecework.device_profiles.clock import closing, seconds_awaited
from piecework.federation import transport
from piecework.federation.pace import KEPT, Done, Load, Pace, before_deadlines, predict_seconds
from piecework.federation.transport import Transport
from piecework.plans.plan_rounds import Timed, time_rounds
from piecework.server_app.ordered_grid import FIRST_NODE, identify
from piecework.server_app.records import RunDir
from piecework.training.settings import Settings, SettingsError

# 10 s of training in 16 s for 100 FLOPs and 1,000 bytes; 8 s in 20 s for 50 FLOPs and 2,000 bytes
TASKS = [Done(10, 16, 100, 1000), Done(8, 20, 50, 2000)]


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        (Load(100, 1000), 8 * 2 + 12),  # max(10 + 6, 16 + 12)
        (Load(50, 2000), 10 + 6 * 2),  # max(10 + 12, 8 + 12)
        (Load(10, 100), 20),  # less work and fewer bytes take no less time
        (Load(400, 4000), 8 * 8 + 12 * 2),  # max(40 + 24, 64 + 24)
        (Load(0, 3000), 12 * 1.5),  # no training: max(6 x 3, 12 x 1.5)
        (Load(0, 6000), 6 * 6),  # max(6 x 6, 12 x 3)
    ],
)
def test_a_task_is_predicted_from_those_before(load: Load, seconds: float) -> None:
    assert predict_seconds(TASKS, load) == seconds


def test_a_deadline_lies_between_its_floor_and_the_timeout() -> None:
    pace = Pace(factor=3, floor=60, longest=100)
    assert pace.deadline(4, "board", Load(100, 1000)) == 100  # nothing is known
    pace.note(4, "board", Done(10, 16, 100, 1000))
    assert pace.deadline(4, "board", Load(100, 1000)) == 60  # 3 x 16
    assert pace.deadline(4, "board", Load(200, 1000)) == 78  # 3 x (20 + 6)
    assert pace.deadline(4, "board", Load(400, 1000)) == 100  # 3 x (40 + 6)
    assert Pace(0, 60, 100, pace.tasks, pace.devices).deadline(4, "board", Load(100, 1000)) == 100


def test_an_unknown_client_is_as_slow_as_the_slowest_of_its_class() -> None:
    pace = Pace(factor=2, floor=0, longest=math.inf)
    known = ((0, "board", 5), (1, "board", 9), (2, "server", 1), (3, "auto", 1), (4, "auto", 1))
    for client, device, seconds in known:
        pace.note(client, device, Done(seconds, seconds, 100, 1000))
    found = {device: pace.deadline(7, device, Load(100, 1000)) for device in ("board", "server", "auto", "phone")}
    assert found == {"board": 18, "server": math.inf, "auto": math.inf, "phone": math.inf}  # one server may lie


def test_the_latest_tasks_are_kept_and_a_client_cannot_train_longer_than_it_takes() -> None:
    pace = Pace(factor=1, floor=0, longest=math.inf)
    for seconds in (50, 4, 3, 2):
        pace.note(5, "board", Done(1e9, seconds, 10, 10))
    assert pace.tasks == {5: [Done(4, 4, 10, 10), Done(3, 3, 10, 10), Done(2, 2, 10, 10)]}
    again = Pace(factor=1, floor=0, longest=math.inf)
    again.restore(json.loads(json.dumps(pace.to_values())))
    assert again == pace
    assert again.deadline(5, "board", Load(10, 10)) == 4
    assert len(pace.tasks[5]) == KEPT


def test_a_round_does_not_await_whoever_misses_a_deadline() -> None:
    answers = {0: 5.0, 1: 1.0, 2: 3.0}
    assert closing(answers, {0: 4.0, 1: 9.0, 2: 9.0}) == ([1, 2], 4.0)
    assert closing(answers, {0: 2.0, 1: 2.0, 2: 2.0}) == ([1], 2.0)
    assert closing(answers, {0: 4.0}, enough=2) == ([1, 2], 3.0)
    # One answer, or as many as are needed, are awaited in any case.
    assert closing(answers, dict.fromkeys(answers, 0.5)) == ([1], 1.0)
    assert closing(answers, dict.fromkeys(answers, 0.5), least=2) == ([1, 2], 3.0)
    assert closing(answers, dict.fromkeys(answers, 0.5), least=4) == ([1, 2, 0], 5.0)
    assert [seconds_awaited(5.0, 2.0, there) for there in (1.0, 3.0, 9.0)] == [2.0, 3.0, 5.0]


def test_no_deadline_is_before_the_predicted_time() -> None:
    with pytest.raises(SettingsError, match=r"faults\.deadline-factor = 0\.9: a client that takes its predicted time"):
        Settings.from_run_config({"faults.deadline-factor": 0.9})


# ---- on the simulated clock

DEVICE = {"memory-ratio": 1.0, "bandwidth": 1e8, "disk-bandwidth": 1e9}
CHANGING = json.dumps(  # each device has 10 to 100 % of its speed, another fraction in each round
    {
        "name": "changing",
        "assignment": "round-robin",
        "degradation": {"flops": [0.0, 0.9]},
        "device": [{"name": "quick", "flops": 1e8, **DEVICE}, {"name": "slow", "flops": 5e7, **DEVICE}],
    }
)
SIMULATED = {
    "strategy": "fedavg",
    "dataset": FEW,
    "fleet": CHANGING,
    "clients": 6,
    "clients_per_round": 0,
    "faults__deadline_factor": 1.2,
    "faults__deadline_floor": 0.0,
    "evaluation__every": 0,
    "seed": 2,
}


@pytest.mark.slow
def test_a_slow_round_of_a_client_is_late_and_a_resumed_run_knows_its_pace(tmp_path: Path) -> None:
    run = run_local(tmp_path / "unbroken", num_rounds=6, **SIMULATED)
    records = run.rounds()
    asked = [each for record in records for each in record["clients"]]
    late = [each for each in asked if each["status"] == "late"]
    assert 0 < len(late) < len(asked) / 2
    for record in records:
        seconds = sorted(each["simulated_seconds"] for each in record["clients"] if each["status"] == "ok")
        half = seconds[math.ceil(len(record["clients"]) / 2) - 1]  # nobody is late before
        for each in record["clients"]:
            if each["status"] == "late":
                assert each["deadline_seconds"] < each["simulated_seconds"]
                assert each["waited_seconds"] == max(each["deadline_seconds"], half)
    for each in late:
        assert (
            each["reason"]
            == f"no answer within its deadline of {each['deadline_seconds']:.4g} s (faults.deadline-factor)"
        )
    assert all(c["deadline_seconds"] is None for c in records[0]["clients"])  # nothing was known
    assert [r["simulated_seconds"] for r in records] == [
        max(c["waited_seconds"] for c in r["clients"]) for r in records
    ]
    # Who is late is at work until it has answered, and is not asked before.
    for number, record in enumerate(records[1:], start=1):
        assert not {c["client"] for c in record["clients"]} & set(record["busy"])
        assert all(reply["round"] <= number for reply in record["late_replies"])
    # A message has the path of the stores, and its bytes take time: both paths have the same length.
    broken = run_local(tmp_path / "resuming", num_rounds=3, **SIMULATED)
    run_local(tmp_path / "resuming", num_rounds=6, resume_from=str(broken.path), **SIMULATED)
    assert same(model_of(broken), model_of(run))
    keys = ("busy", "late_replies", "simulated_seconds", "trained")
    assert [[r[k] for k in keys] for r in broken.rounds()] == [[r[k] for k in keys] for r in records]


def test_a_plan_times_deadlines_as_a_run_does(tmp_path: Path) -> None:
    """Deadlines of 1.2 times the prediction, which is the slowest of the last three tasks."""
    taken = [[4.0, 10.0], [5.0, 8.0], [2.0, 13.0], [7.0, 9.0], [2.0, 9.0]]
    rounds = [[Timed(f"board {c}", Done(s, s, 1.0, 1)) for c, s in enumerate(seconds)] for seconds in taken]
    settings = Settings.from_run_config(
        {"clients-per-round": 0, "faults.deadline-factor": 1.2, "faults.deadline-floor": 0.0}
    )
    found = time_rounds(settings, rounds)
    # Round 1 knows nothing. 2: client 0 takes 5 s of 4.8, and is awaited, because there is no other answer yet. 3: client 1
    # takes 13 s of 12, and the round ends after 12. 4: client 1 has a second left; client 0 alone is asked, takes 7 s of 6, and
    # is awaited. 5: client 1 may take 1.2 x 13 s.
    assert found == [([0, 1], 10.0, 0), ([0, 1], 8.0, 0), ([0, 1], 12.0, 1), ([0], 7.0, 0), ([0, 1], 9.0, 0)]


# ---- where answers arrive


class Clock(SimpleNamespace):
    """A clock of which a transport reads the time. It goes on when the transport sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Down(RecordingGrid):
    """Client 1 is down from round `first` on: its answer arrives when a training message of round `up` is sent."""

    first: int
    up: int

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        sent = training(self.sent)
        held = {
            m.metadata.message_id
            for m in sent
            if m.metadata.dst_node_id == FIRST_NODE + 1 and int(m.metadata.group_id) == self.first
        }
        up = any(int(m.metadata.group_id) >= self.up for m in sent)
        ids = set(message_ids) - (set() if up else held)
        return super().pull_messages(ids) if ids else []


def run_with_one_down(tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> RunDir:
    """A run of three clients as if on real devices, whose messages take no time but where a clock is waited for."""
    monkeypatch.setattr(transport, "time", Clock())
    first, up = changes.pop("first", 2), changes.pop("up", 3)
    settings = {"strategy": "fedavg", "engine": "deployment", "evaluation__every": 0, "num_rounds": 4} | TRIO
    return run_local(tmp_path, grids(Down, first=first, up=up), **settings | {"faults__deadline_factor": 3.0} | changes)


@pytest.mark.slow
def test_a_client_that_is_down_does_not_hold_its_round(
    tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_one_down(tmp_path, grids, monkeypatch)
    assert [[c["status"] for c in record["clients"]] for record in run.rounds()] == [
        ["ok", "ok", "ok"],
        ["ok", "late", "ok"],
        ["ok", "ok"],
        ["ok", "ok", "ok"],
    ]
    late = clients_of(run, 2)[1]
    assert (late["deadline_seconds"], late["reason"]) == (
        60.0,
        "no answer within its deadline of 60 s (faults.deadline-factor)",
    )
    assert 60 <= late["waited_seconds"] < 61
    assert [record["busy"] for record in run.rounds()] == [[], [], [1], []]
    (reply,) = run.rounds()[3]["late_replies"]
    assert reply == {"client": 1, "round": 2, "status": "ok", "bytes": clients_of(run, 3)[0]["bytes_up"]}
    # The next task of the client is awaited three times as long as its last took.
    again = clients_of(run, 4)
    assert [c["deadline_seconds"] for c in again] == [60.0, pytest.approx(3 * late["waited_seconds"], rel=0.05), 60.0]


def test_who_never_answered_is_compared_with_its_class(
    tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_one_down(tmp_path, grids, monkeypatch, first=1, up=2, num_rounds=1)
    down = clients_of(run)[1]
    assert (down["status"], down["deadline_seconds"]) == ("late", 60.0)
    own = {"memory-ratio": 1.0, "flops": 1e9, "bandwidth": 1e6, "disk-bandwidth": 1e7}
    devices = [{"name": name, **own} for name in ("usual", "other")]
    fleet = {"name": "two", "assignment": "list", "clients": ["usual", "other", "usual"], "device": devices}
    values = {"fleet": json.dumps(fleet), "num_rounds": 1, "first": 1, "up": 2}
    alone = clients_of(run_with_one_down(tmp_path / "alone", grids, monkeypatch, **values))[1]
    assert (alone["status"], alone["deadline_seconds"]) == ("timeout", None)
    assert 3600 <= alone["waited_seconds"] < 3601


def test_a_client_that_does_not_take_its_frozen_units_is_not_awaited_either(
    tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(RecordingGrid):
        """Client 1 answers nothing any more once it gets frozen units."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            kinds = {m.metadata.message_id: m.metadata for m in self.sent}
            ids = {
                i
                for i in message_ids
                if kinds[i].message_type != "query.units" or kinds[i].dst_node_id != FIRST_NODE + 1
            }
            return super().pull_messages(ids) if ids else []

    monkeypatch.setattr(transport, "time", Clock())
    settings = TRIO | {
        "strategy": "profl",
        "profl__shrinking": False,
        "profl__stage_rounds": 1,
        "engine": "deployment",
        "fleet": "unlimited",
        "num_rounds": 2,
    }
    run = run_local(tmp_path, grids(Deaf), **settings, faults__deadline_factor=3.0)
    assert [c["status"] for c in clients_of(run, 2)] == ["ok", "late", "ok"]
    assert 60 <= clients_of(run, 2)[1]["waited_seconds"] < 61


class Zero(Down):
    """Nobody says how long it trained."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if "metrics" in reply.content and "seconds" in reply.content["metrics"]:
                reply.content["metrics"]["seconds"] = 0.0
        return replies


def test_a_client_that_does_not_say_how_long_it_trained_has_a_deadline(
    tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "time", Clock())
    changes = {"engine": "deployment", "evaluation__every": 0, "num_rounds": 2, "faults__deadline_factor": 3.0}
    run = run_local(tmp_path, grids(Zero, first=9, up=9), strategy="fedavg", **TRIO, **changes)
    assert [c["deadline_seconds"] for c in clients_of(run, 2)] == [60.0] * 3


class Dead(RecordingGrid):
    """Client 1 answers nothing of round 2 and of what follows it."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        begun = [m.metadata.group_id for m in training(self.sent)].count("2") > 0
        lost = {m.metadata.message_id for m in self.sent if m.metadata.dst_node_id == FIRST_NODE + 1 and begun}
        ids = set(message_ids) - lost
        return super().pull_messages(ids) if ids else []


@pytest.mark.slow
def test_a_late_client_is_not_asked_for_batch_norms_after_the_last_round(
    tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)
    model = {"model": "preresnet20", "architecture__width": 0.25, "architecture__batch_norm": "static"}
    changes = {"engine": "deployment", "num_rounds": 2, "evaluation__every": 0, "faults__deadline_factor": 3.0}
    run = run_local(tmp_path, grids(Dead), strategy="heterofl", **TRIO, **model, **changes)
    assert clients_of(run, 2)[1]["status"] == "late"
    assert clock.now < 200  # not messages.round-timeout, an hour


def test_an_answer_that_comes_while_another_is_dealt_with_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come after 59 and 59.5 s of 60, and the first keeps the server busy for five."""
    clock, times = Clock(), {"1": 59.0, "2": 59.5}
    monkeypatch.setattr(transport, "time", clock)
    ended = list[tuple[int, bool]]()

    def pull(ids: Iterable[str]) -> list[Any]:
        return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=i)) for i in ids if times[i] <= clock.now]

    grid = SimpleNamespace(
        push_messages=lambda messages: [str(each.metadata.dst_node_id) for each in messages],
        pull_messages=pull,
        answer_by=lambda _: None,
    )
    watch = SimpleNamespace(
        seconds=lambda _: 60.0, note_end=lambda sent, waited, answered: ended.append((sent.node_id, answered))
    )
    identify(1)
    asked = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in (1, 2)]
    for _ in Transport(grid, 10, 3600.0).exchange(1, asked, watch):  # type: ignore[arg-type]
        clock.now += 5
    assert ended == [(1, True), (2, True)]


def test_half_of_the_clients_answer_before_others_are_late() -> None:
    assert [before_deadlines(clients, 1) for clients in (0, 1, 2, 3, 10)] == [1, 1, 1, 2, 5]
    assert before_deadlines(3, 4) == 4
