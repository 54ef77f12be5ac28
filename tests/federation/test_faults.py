"""Errors told apart, clients whose process died, answers and nodes that make no sense, rounds with too few clients."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Error, Message
from helpers import (
    TRIO,
    RecordingGrid,
    arrays_of,
    changing,
    clients_of,
    fleet_json,
    numpy_of,
    run_local,
    tiny_settings,
    training,
)
from report_helpers import text_of

from piecework.engines.launch import launch, report_from
from piecework.federation.errors import RunAbortedError, TooFewNodesError
from piecework.federation.faults import CrashHistory, status_of
from piecework.report.display import summary_table
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.server_app.records import RunDir
from piecework.strategies.state import StrategyState
from piecework.training.settings import Settings, SettingsError


class Faulty(RecordingGrid):
    """The answers in `errors`, {(round, client): code}, are errors of Flower's."""

    errors: dict[tuple[int, int], int]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for reply in super().pull_messages(message_ids):
            task = next(m for m in self.sent if m.metadata.message_id == reply.metadata.reply_to_message_id)
            where = int(task.metadata.group_id or 0), reply.metadata.src_node_id - FIRST_NODE
            code = self.errors.get(where) if reply.metadata.message_type == "train" else None
            replies.append(reply if code is None else Message(Error(code, "as told"), reply_to=task))
        return replies


def statuses(run: RunDir, server_round: int) -> dict[int, str]:
    return {c["client"]: c["status"] for c in clients_of(run, server_round)}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, "crashed"),
        (1, "failed"),
        (2, "failed"),
        (3, "gone"),
        (4, "gone"),
        (5, "gone"),
        (6, "failed"),
        (8, "crashed"),
    ],
)
def test_kinds_of_errors_are_distinguished(code: int, status: str) -> None:
    assert status_of(Error(code, "")) == status


def test_a_budget_shrinks_by_a_quarter_and_grows_by_a_fiftieth() -> None:
    crash_history = CrashHistory()
    assert crash_history.fraction(3) == 1
    crash_history.note_crash(3, 1, cuts=True)
    crash_history.note_crash(3, 2, cuts=True)
    assert crash_history.fraction(3) == 0.75 * 0.75
    crash_history.note_answer(3)
    assert crash_history.fraction(3) == pytest.approx(0.5825)
    assert crash_history.excluded_clients(3) == {}
    for _ in range(21):  # 0.5825 + 21 * 0.02 = 1.0025
        crash_history.note_answer(3)
    assert crash_history == CrashHistory()


def test_without_a_smaller_cut_a_client_is_excluded_for_1_2_4_rounds() -> None:
    crash_history, rounds_excluded = CrashHistory(), []
    for server_round in range(1, 12):
        if 5 in crash_history.excluded_clients(server_round):
            rounds_excluded.append(server_round)
        else:
            crash_history.note_crash(5, server_round, cuts=False)
    assert rounds_excluded == [2, 4, 5, 7, 8, 9, 10]
    assert crash_history.fraction(5) == 1
    crash_history.note_answer(5)
    assert crash_history == CrashHistory()


def test_the_crash_history_is_part_of_the_checkpoint() -> None:
    state = StrategyState()
    state.crash_history.note_crash(1, 4, cuts=True)
    state.crash_history.note_crash(2, 4, cuts=False)
    again = StrategyState.from_values(state.to_values())
    assert again == state
    assert (again.crash_history.fraction(1), again.crash_history.excluded_clients(5)) == (0.75, {2: 1})


def test_fedavg_leaves_a_client_out_after_a_crash(tmp_path: Path, grids: Any) -> None:
    grid = grids(Faulty, errors={(1, 1): 8, (3, 1): 8})
    run = run_local(tmp_path, grid, strategy="fedavg", num_rounds=6, **TRIO)
    assert statuses(run, 1) == {0: "ok", 1: "crashed", 2: "ok"}
    assert clients_of(run, 1)[1]["reason"] == "error 8: as told"
    assert [sorted(statuses(run, r)) for r in range(2, 7)] == [[0, 2], [0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert [record["excluded"] for record in run.rounds()] == [
        [],
        [{"client": 1, "crashes": 1}],
        [],
        [{"client": 1, "crashes": 2}],
        [{"client": 1, "crashes": 2}],
        [],
    ]
    assert statuses(run, 6)[1] == "ok"


def test_fedepth_gives_a_smaller_piece_after_a_crash(tmp_path: Path, grids: Any) -> None:
    grid = grids(Faulty, errors={(1, 1): 8})
    settings = {"fleet": fleet_json(board=1.2), "fedepth__mutual_models": 1, **TRIO}
    run = run_local(tmp_path, grid, strategy="fedepth", num_rounds=3, **settings)
    first, second, third = (clients_of(run, r)[1] for r in (1, 2, 3))
    assert (first["status"], second["status"], third["status"]) == ("crashed", "ok", "ok")
    assert second["budget"] == int(0.75 * first["budget"])
    assert third["budget"] == int(0.77 * first["budget"])
    assert clients_of(run, 2)[0]["pieces"] == [[0, 1, 2, 3, 4]]
    assert len(second["pieces"]) > 1  # 0.9 of a step of the whole model
    assert second["note"] == "given 75% of its budget since its process died"
    assert second["measured_peak"] <= second["budget"]


@pytest.mark.slow
def test_a_width_that_a_fleet_fixes_is_not_taken_away_by_a_crash(tmp_path: Path, grids: Any) -> None:
    """There is no smaller one to fall back to."""
    fleet = fleet_json({"board": 1.0}, board=1.2)
    for strategy in ("heterofl", "splitmix"):
        grid = grids(Faulty, errors={(1, 0): 8})
        run = run_local(
            tmp_path / strategy, grid, strategy=strategy, num_rounds=2, splitmix__width_ratio=0.25, **TRIO, fleet=fleet
        )
        assert [statuses(run, n)[0] for n in (1, 2)] == ["crashed", "ok"], strategy


def test_statistics_that_no_client_measured_are_measured_in_the_next_round(tmp_path: Path, grids: Any) -> None:
    grid = grids(Faulty, errors=dict.fromkeys([(1, 0), (1, 1), (1, 2)], 8))
    settings = TRIO | {
        "strategy": "profl",
        "architecture__batch_norm": "running",
        "faults__max_empty_rounds": 3,
        "num_rounds": 3,
    }
    run = run_local(tmp_path, grid, **settings, profl__stage_rounds=1, profl__distil_rounds=1, fleet="unlimited")
    assert [record["stage"] for record in run.rounds()] == ["statistics"] * 2 + ["shrinking, step 3"]
    assert [record["aggregated"] for record in run.rounds()] == [False, True, True]


def test_who_did_not_answer_is_not_asked_to_evaluate(tmp_path: Path, grids: Any) -> None:
    grid = grids(Faulty, errors={(1, 1): 5})
    run_local(tmp_path, grid, strategy="fedavg", evaluation__on_clients_every=1, **TRIO)
    asked = [m.metadata.dst_node_id for m in grid.last.sent if m.metadata.message_type == "evaluate"]
    assert asked == [FIRST_NODE, FIRST_NODE + 2]


@pytest.mark.parametrize(("code", "status"), [(5, "gone"), (2, "failed")])
def test_other_errors_have_no_consequence(tmp_path: Path, grids: Any, code: int, status: str) -> None:
    run = run_local(tmp_path, grids(Faulty, errors={(1, 1): code}), strategy="fedavg", num_rounds=2, **TRIO)
    assert statuses(run, 1) == {0: "ok", 1: status, 2: "ok"}
    assert statuses(run, 2) == {0: "ok", 1: "ok", 2: "ok"}


def test_min_clients(tmp_path: Path, grids: Any) -> None:
    """Two of three trained in round 1, which is enough for two, and not for three."""
    errors = {(1, 1): 2}
    enough = run_local(tmp_path / "2", grids(Faulty, errors=errors), strategy="fedavg", faults__min_clients=2, **TRIO)
    assert enough.rounds()[0]["aggregated"]
    why = r"only 2 clients trained \(faults\.min-clients = 3\) in round 1: 3 asked, 0 refused for memory\nclient 1: error 2"
    with pytest.raises(RunAbortedError, match=why):
        run_local(tmp_path / "3", grids(Faulty, errors=errors), strategy="fedavg", faults__min_clients=3, **TRIO)
    run = RunDir(tmp_path / "3" / "run")
    assert not run.rounds()[0]["aggregated"]
    assert run.load_checkpoint() is None


@pytest.mark.slow
def test_a_restart_does_not_make_an_aborted_run_complete(tmp_path: Path) -> None:
    values = {"strategy": "fedavg", "fleet": fleet_json(board=0.5), "output_dir": str(tmp_path), **TRIO}
    settings = tiny_settings(**values | {"dataset": "digits"})
    with pytest.raises(RunAbortedError, match="3 refused for memory"):
        launch(settings, RunDir(tmp_path / "run"), lambda _: None, restarts=1)
    summary = RunDir(tmp_path / "run").summary() or {}
    assert (summary["status"], summary["rounds"]) == ("failed", 1)
    with pytest.raises(RunAbortedError, match="3 refused for memory"):
        run_local(tmp_path, resume_from=str(tmp_path / "run"), **values | {"dataset": "digits"})


def test_a_client_is_not_given_less_than_it_needs_to_train(tmp_path: Path, grids: Any) -> None:
    """1.2 times the last atom: three quarters of it would be too little for anything."""
    minimum = 499_456  # bytes of training the last atom of the convnet, by the plan
    values = {"fleet": fleet_json(board=int(1.2 * minimum)), "fedepth__mutual_models": 1, **TRIO}
    run = run_local(tmp_path, grids(Faulty, errors={(1, 1): 8}), strategy="fedepth", num_rounds=2, **values)
    assert statuses(run, 1)[1] == "crashed"
    (again,) = [c for c in clients_of(run, 2) if c["client"] == 1]
    assert (again["status"], again["budget"]) == ("ok", minimum)


@pytest.mark.parametrize("asked", [{"clients": 2}, {"clients-per-round": 2}])
def test_more_than_are_asked_cannot_answer(asked: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match=rf"faults.min-clients = 3 is more than {next(iter(asked))} = 2"):
        Settings.from_run_config({"faults.min-clients": 3, **asked})


def test_excluded_clients_are_asked_if_min_clients_needs_them(tmp_path: Path, grids: Any) -> None:
    grid = grids(Faulty, errors={(1, 1): 8, (1, 2): 8})
    run = run_local(
        tmp_path, grid, strategy="fedavg", num_rounds=2, faults__min_clients=2, faults__max_empty_rounds=2, **TRIO
    )
    assert statuses(run, 2) == {0: "ok", 1: "ok", 2: "ok"}


def spoilt(**outcome: Any) -> Any:
    """A change of client 1's answer to a task."""

    def spoil(reply: Message) -> Message:
        reply.content.config_records["outcome"].update(outcome)
        return reply

    return staticmethod(spoil)


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        (spoilt(status="failed", reason=b"bytes"), "rejected"),
        (spoilt(status="memory", needed="much"), "rejected"),
        (spoilt(status="failed", reason="x" * 10**6), "failed"),
        (spoilt(pieces=["0,1,2,3,4"] * 10**4), "rejected"),
        (spoilt(pieces=[5]), "rejected"),
    ],
)
def test_an_answer_that_makes_no_sense_ends_nothing(tmp_path: Path, grids: Any, spoil: Any, status: str) -> None:
    class Spoils(RecordingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            return [
                spoil.__func__(m) if is_train(m) and m.metadata.src_node_id == FIRST_NODE + 1 else m for m in replies
            ]

    run = run_local(tmp_path, grids(Spoils), strategy="fedavg", **TRIO)
    assert statuses(run, 1) == {0: "ok", 1: status, 2: "ok"}
    assert len(clients_of(run)[1]["reason"]) <= 500
    assert (run.summary() or {})["status"] == "completed"


def is_train(message: Message) -> bool:
    return message.metadata.message_type == "train"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"device": "pi9"}, "pi9"),
        ({"partition-id": 7}, "partition-id 7 is out of range in a run with 3 clients"),
    ],
)
def test_a_node_that_fits_nowhere_is_named_and_excluded(
    tmp_path: Path, grids: Any, config: dict[str, str | int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A typo in the node-config of one device: the others train."""

    class Mixed(RecordingGrid):
        def __init__(self, clients: int, run_config: Any, workers: int) -> None:
            super().__init__(clients, run_config, workers, [{}, config, {}])

    run = run_local(
        tmp_path, grids(Mixed), strategy="fedavg", faults__min_clients=2, messages__node_timeout=0.3, **TRIO
    )
    assert statuses(run, 1) == {0: "ok", 2: "ok"}
    (unusable,) = run.rounds()[0]["unusable_nodes"]
    assert unusable["node"] == FIRST_NODE + 1
    assert reason in unusable["reason"]
    shown = text_of(summary_table(run.summary() or {}, run.rounds()), width=1000)
    assert f"left out node {FIRST_NODE + 1}: {unusable['reason']}" in " ".join(shown.split())
    caplog.clear()
    report_from(run, 0, lambda _: None)
    assert f"node {FIRST_NODE + 1} does not take part: {unusable['reason']}" in caplog.text


def test_two_nodes_with_one_number_are_named_and_excluded(tmp_path: Path, grids: Any) -> None:
    """The third of the three trains alone, if that is enough."""

    class Twice(RecordingGrid):
        def __init__(self, clients: int, run_config: Any, workers: int) -> None:
            super().__init__(clients, run_config, workers, [{}, {"partition-id": 0}, {}])

    settings: dict[str, Any] = {"strategy": "fedavg", "messages__node_timeout": 0.3, **TRIO}
    with pytest.raises(
        TooFewNodesError,
        match=r"1 of 3 clients.*Not used: node 2: .*partition-id 0 is claimed by node 2 and node 3.*; node 3: ",
    ):
        run_local(tmp_path, grids(Twice), faults__min_clients=2, **settings)
    run = run_local(tmp_path, grids(Twice), faults__min_clients=1, **settings)
    assert statuses(run, 1) == {2: "ok"}
    assert [each["node"] for each in run.rounds()[0]["unusable_nodes"]] == [FIRST_NODE, FIRST_NODE + 1]


@pytest.mark.parametrize(("who", "server_round"), [(0, 1), (1, 1), (2, 1), (1, 2)])
def test_an_update_a_hundred_times_too_large(tmp_path: Path, grids: Any, who: int, server_round: int) -> None:
    """Also in the first round, and whether it comes first or last."""

    class Magnifies(RecordingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in filter(is_train, replies):
                task = next(m for m in self.sent if m.metadata.message_id == reply.metadata.reply_to_message_id)
                if (reply.metadata.src_node_id, task.metadata.group_id) == (FIRST_NODE + who, str(server_round)):
                    before = arrays_of(task)
                    with changing(reply) as arrays:
                        for name, after in numpy_of(arrays).items():
                            if name.endswith("running_var"):  # below 0 it would be rejected for that
                                continue
                            larger = before[name] + 100 * (after - before[name])
                            arrays[name] = Array(np.asarray(larger, dtype=after.dtype))
            return replies

    run = run_local(tmp_path, grids(Magnifies), strategy="fedavg", num_rounds=2, **TRIO)
    assert statuses(run, server_round) == {c: "rejected" if c == who else "ok" for c in range(3)}
    assert "more than the limit" in clients_of(run, server_round)[who]["reason"]


class Thin(RecordingGrid):
    """Only the first two of its nodes are connected."""

    def get_node_ids(self) -> Iterable[int]:
        return list(super().get_node_ids())[:2]


def test_a_run_begins_with_min_clients(tmp_path: Path, grids: Any) -> None:
    settings = {"strategy": "fedavg", "messages__node_timeout": 0.3, **TRIO}
    with pytest.raises(TooFewNodesError, match=r"2 of 3 clients connected within 0\.3 s"):
        run_local(tmp_path, grids(Thin), **settings)
    with pytest.raises(TooFewNodesError, match="2 of 3 clients connected"):
        run_local(tmp_path, grids(Thin), faults__min_clients=3, **settings)
    run = run_local(tmp_path, grids(Thin), faults__min_clients=2, **settings)
    assert statuses(run, 1) == {0: "ok", 1: "ok"}


def test_a_late_crash_counts_as_one(tmp_path: Path, grids: Any) -> None:
    """Flower tells of a dead process after a minute: here after round 1 has timed out."""

    class Late(Faulty):
        """What client 1 answers in round 1 is held back until round 2 is about to begin."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            held = {m.metadata.message_id for m in training(self.sent) if m.metadata.dst_node_id == FIRST_NODE + 1}
            ids = set(message_ids) - (set() if self.over else held)
            return super().pull_messages(ids) if ids else []

        over = False

        def get_node_ids(self) -> Iterable[int]:
            self.over = len(training(self.sent)) >= 3  # no client asks for nodes while a round is on
            return super().get_node_ids()

    grid = grids(Late, errors={(1, 1): 8, (3, 1): 8})
    run = run_local(tmp_path, grid, strategy="fedavg", num_rounds=4, messages__round_timeout=3.0, **TRIO)
    assert statuses(run, 1) == {0: "ok", 1: "timeout", 2: "ok"}
    assert run.rounds()[1]["busy"] == [1]
    assert run.rounds()[2]["late_replies"] == [{"client": 1, "round": 1, "status": "crashed", "bytes": 0}]
    assert statuses(run, 3) == {0: "ok", 1: "crashed", 2: "ok"}
    assert run.rounds()[3]["excluded"] == [{"client": 1, "crashes": 2}]
