"""Late answers that enter a later round's model: by hand, on the simulated clock, and where answers arrive."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message
from helpers import (
    TRIO,
    RecordingGrid,
    arrays_of,
    changing,
    examples_of,
    model_of,
    run_in_parts,
    run_local,
    same,
    training,
)
from settings_helpers import settings_with
from test_deadlines import Clock, Down
from test_over_sample import OVER

from piecework.federation import transport
from piecework.federation.aggregation import CheckedUpdate, WeightedMean
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.server_app.records import RunDir
from piecework.server_app.used_settings import require_used
from piecework.strategies import find_method
from piecework.strategies.late_answers import LateAnswers, add_change, discount, measure_change
from piecework.strategies.method import Received
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.methods import METHODS
from piecework.training.settings import Settings, SettingsError

W = "head.fc.weight"
# Five clients, of which 0 takes 400 times as long as the quickest, and 2 and 3 twice as long: two of four are enough.
LATE = OVER | {"faults__accept_late": 3, "num_rounds": 5}


def test_an_old_update_counts_less() -> None:
    assert [discount(age) for age in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]


def test_a_change_is_added_to_the_present_model() -> None:
    """One client in time, 30 examples; one late by three rounds, 20 examples, which moved its weight from 1 to 1.5."""
    sent, trained, present = (np.array([value], np.float32) for value in (1.0, 1.5, 3.0))
    mean = WeightedMean()
    mean.add({"head.weight": np.array([2.0], np.float32)}, 30)
    late = add_change("head.weight", measure_change("head.weight", trained, sent), present)
    mean.add({"head.weight": late}, 20 * discount(3))
    assert mean["head.weight"].tolist() == [(30 * 2.0 + 10 * 3.5) / 40]


def test_statistics_and_counts_are_no_steps() -> None:
    for name, value in (("bn.running_var", np.float32(0.25)), ("bn.num_batches_tracked", np.int64(7))):
        sent, trained, present = np.asarray(value * 9), np.asarray(value), np.asarray(value * 4)
        assert add_change(name, measure_change(name, trained, sent), present) == value


def by_hand(
    run: RunDir,
    grid: RecordingGrid,
    server_round: int,
    before: dict[str, Any],
    weight: Callable[[Message], int] = examples_of,
) -> dict[str, np.ndarray]:
    """The model that a round has to make of what was sent and received, in float64; statistics are no steps."""
    before = {n: a for n, a in before.items() if not n.endswith("num_batches_tracked")}
    sent = {(int(m.metadata.group_id), m.metadata.dst_node_id - FIRST_NODE): m for m in training(grid.sent)}
    names = {m.metadata.message_id: key for key, m in sent.items()}
    found = {names[m.metadata.reply_to_message_id]: m for m in training(grid.received)}
    record = run.rounds()[server_round - 1]
    in_time = [found[server_round, c["client"]] for c in record["clients"] if c["status"] == "ok"]
    total: dict[str, np.ndarray] = {n: np.zeros(a.shape) for n, a in before.items()}
    weights = 0.0
    for reply in in_time:
        weights += weight(reply)
        total = {n: t + weight(reply) * arrays_of(reply)[n].astype(np.float64) for n, t in total.items()}
    for late in record["late_used"]:
        reply, task = (each[late["round"], late["client"]] for each in (found, sent))
        age = server_round - late["round"]
        discounted = weight(reply) / (1 + age) ** 0.5
        assert (late["age"], late["weight"]) == (age, pytest.approx(discounted))
        weights += discounted
        started, ended = arrays_of(task), arrays_of(reply)
        for name in total:
            own = 0.0 if name.endswith(("running_mean", "running_var")) else 1.0
            total[name] += discounted * (ended[name].astype(np.float64) + own * (before[name] - started[name]))
    return {n: t / weights for n, t in total.items()}


def test_a_late_answer_has_the_weight_that_the_method_gives_it(tmp_path: Path, grids: Any) -> None:
    """With equal weights, all but for its age: not its number of examples, beside which those in time would count nothing."""
    grid = grids(RecordingGrid)
    run = run_local(tmp_path, grid, **LATE | {"fedavg__client_weights": "equal"})
    late = [each for record in run.rounds() for each in record["late_used"]]
    assert [each["weight"] for each in late] == [pytest.approx((1 + each["age"]) ** -0.5) for each in late]
    assert min(each["examples"] for each in late) > 1
    number, *_ = [record["round"] for record in run.rounds() if record["late_used"]]
    sent = [next(m for m in training(grid.last.sent) if m.metadata.group_id == str(n)) for n in (number, number + 1)]
    before, after = map(arrays_of, sent)
    expected = by_hand(run, grid.last, number, before, weight=lambda _: 1)
    assert all(np.allclose(after[n], array, rtol=0, atol=1e-6) for n, array in expected.items())


@pytest.mark.parametrize(
    ("said", "weight"), [({}, 1), ({"weight": 3}, 3)], ids=["of an older version", "with a weight"]
)
def test_what_a_checkpoint_holds_keeps_its_weight(said: dict[str, int], weight: int) -> None:
    """One of an older version has none, and gets what the method gives an update: here 1 for 500 examples."""
    method = SimpleNamespace(weight=lambda update: update.examples // 500)
    settings = settings_with(strategy="fedavg", faults__accept_late=2)
    late = LateAnswers(SimpleNamespace(settings=settings, method=method))  # type: ignore[arg-type]
    held = {"client": 4, "round": 2, "device": "a", "examples": 500, "trained": [], "norms": {}, "arrived": True}
    late.restore([held | said], ArrayRecord())
    assert late.to_values() == [held | {"weight": weight}]


@pytest.mark.slow
def test_the_answers_of_emulated_clients_arrive_on_their_clock(tmp_path: Path, grids: Any) -> None:
    grid = grids(RecordingGrid)
    run = run_local(tmp_path / "unbroken", grid, **LATE)
    records, sent = run.rounds(), training(grid.last.sent)
    models = [arrays_of(next(m for m in sent if m.metadata.group_id == str(n))) for n in range(1, 6)]
    for number, (before, after) in enumerate(zip(models, [*models[1:], model_of(run)], strict=True), start=1):
        expected = by_hand(run, grid.last, number, before)
        assert all(np.allclose(after[n], array, rtol=0, atol=1e-6) for n, array in expected.items()), number
    used = [(late["client"], late["round"]) for record in records for late in record["late_used"]]
    arrived = [(late["client"], late["round"]) for record in records for late in record["late_replies"]]
    assert len(used) == len(set(used)) > 1
    assert used == arrived
    assert [record["late_dropped"] for record in records] == [[]] * 5
    # All that came late was counted at its arrival, and the model is another one than without.
    without = run_local(tmp_path / "dropping", **LATE | {"faults__accept_late": 0})
    assert not same(model_of(without), model_of(run))
    assert [r["late_replies"] for r in without.rounds()] == [r["late_replies"] for r in records]
    assert [r["simulated_seconds"] for r in without.rounds()] == [r["simulated_seconds"] for r in records]
    # A message has the path of the stores, and its bytes take time: both paths have the same length.
    broken = run_in_parts(tmp_path / "resuming", (1, 2, 3), **LATE)
    assert same(model_of(broken), model_of(run))
    assert [r["late_used"] for r in broken.rounds()] == [r["late_used"] for r in records]


def test_what_is_too_old_is_dropped(tmp_path: Path) -> None:
    """Answers are two rounds late, and client 0 is still at work when its own has become too old: all arrays are forgotten."""
    run = run_local(tmp_path, **LATE | {"faults__accept_late": 1})
    records, checkpoint = run.rounds(), run.load_checkpoint()
    (asked,) = [r["round"] for r in records if 0 in [c["client"] for c in r["clients"]]]
    assert asked < 5
    assert [record["late_used"] for record in records] == [[]] * 5
    dropped = [late for record in records for late in record["late_dropped"]]
    assert dropped
    assert all("more than 1 rounds old (faults.accept-late)" in late["reason"] for late in dropped)
    assert checkpoint is not None
    assert (0, asked) in [(held["client"], held["round"]) for held in checkpoint.values["late"]]
    assert {name.split("/")[1] for name in checkpoint.kept if name.startswith("late/")} <= {"5"}


@pytest.mark.slow
def test_a_strategy_that_trains_pieces_accepts_late_answers(tmp_path: Path) -> None:
    run = run_local(tmp_path / "unbroken", **LATE | {"strategy": "fedepth", "num_rounds": 3})
    assert any(record["late_used"] for record in run.rounds())
    broken = run_in_parts(tmp_path / "resuming", (1, 2), **LATE | {"strategy": "fedepth", "num_rounds": 3})
    assert same(model_of(broken), model_of(run))


def test_only_strategies_that_average_what_was_trained_of_one_model_accept_them() -> None:
    assert {name for name in METHODS if find_method(name).can.late} == {
        "fedavg",
        "fedprox",
        "exclusivefl",
        "allsmall",
        "fedepth",
        "m-fedepth",
    }
    refused = Settings.from_run_config({"strategy": "heterofl", "faults.accept-late": 2})
    with pytest.raises(
        SettingsError, match=r"faults\.accept-late = 2 has no effect here: it belongs to strategy.*fedavg"
    ):
        require_used(refused)


# ---- where answers arrive


def arriving(tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[RunDir, Any]:
    """A run of three clients in which client 1 answers the task of round 2 before round 4."""
    monkeypatch.setattr(transport, "time", Clock())
    settings = {"strategy": "fedavg", "engine": "deployment", "evaluation__every": 0, "num_rounds": 4} | TRIO
    settings |= {"faults__deadline_factor": 3.0, "faults__accept_late": 2}
    grid = grids(changes.pop("grid", Down), first=2, up=3)
    return run_local(tmp_path, grid, **settings | changes), grid.last


@pytest.mark.slow
def test_an_answer_that_arrives_late_is_used(tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, grid = arriving(tmp_path, grids, monkeypatch)
    records = run.rounds()
    (late,) = records[3]["late_used"]
    assert (late["client"], late["round"], late["age"]) == (1, 2, 2)
    assert [record["late_used"] for record in records[:3]] == [[]] * 3
    before = arrays_of(next(m for m in training(grid.sent) if m.metadata.group_id == "4"))
    expected, model = by_hand(run, grid, 4, before), model_of(run)
    assert all(np.allclose(model[n], array, rtol=0, atol=1e-6) for n, array in expected.items())
    one, _ = arriving(tmp_path / "one", grids, monkeypatch, faults__accept_late=1)
    assert one.rounds()[3]["late_used"] == []
    assert [each["client"] for each in one.rounds()[3]["late_dropped"]] == [1]


class Own(FedAvg):
    """Counts all examples of an update as one, when it checks it."""

    name = "own"

    def check(self, received: Received) -> CheckedUpdate:
        return replace(super().check(received), examples=1)


def test_a_late_answer_is_checked_by_its_method(tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = arriving(tmp_path, grids, monkeypatch, strategy=f"{__name__}:Own")
    (late,) = run.rounds()[3]["late_used"]
    assert (late["examples"], late["weight"]) == (1, pytest.approx(3**-0.5))  # two rounds old


def poisoned(reply: Message) -> None:
    with changing(reply) as arrays:
        arrays[W] = Array(np.full_like(arrays[W].numpy(), np.nan))


def enlarged(reply: Message) -> None:
    with changing(reply) as arrays:
        arrays[W] = Array(arrays[W].numpy() * 1000)


def boasting(reply: Message) -> None:
    reply.content["metrics"]["num-examples"] = 10**6


def without_figures(reply: Message) -> None:
    reply.content["metrics"]["seconds"] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (poisoned, "non-finite values"),
        (enlarged, "more than the limit"),
        (boasting, "the client has"),
        (without_figures, "seconds is nan"),
    ],
)
def test_a_late_answer_passes_the_checks_of_all_answers(
    tmp_path: Path, grids: Any, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Message], None], reason: str
) -> None:
    class Hostile(Down):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if self._is_late(reply):
                    spoil(reply)
            return replies

        def _is_late(self, reply: Message) -> bool:
            asked = {m.metadata.message_id: m.metadata for m in training(self.sent)}
            task = asked.get(reply.metadata.reply_to_message_id)
            return task is not None and (task.group_id, task.dst_node_id) == ("2", FIRST_NODE + 1)

    run, _ = arriving(tmp_path, grids, monkeypatch, grid=Hostile)
    record = run.rounds()[3]
    assert record["late_used"] == []
    ((client, said),) = [(each["client"], each["reason"]) for each in record["late_dropped"]]
    assert client == 1
    assert said.startswith("rejected: ")
    assert reason in said
