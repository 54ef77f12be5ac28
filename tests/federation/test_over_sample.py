"""Rounds that ask more clients than they wait for: on the simulated clock, and where answers really arrive."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers import FEW, RecordingGrid, average, clients_of, model_of, run_local, same, training

from piecework.device_profiles.clock import Stragglers, closing
from piecework.federation.pace import Done
from piecework.federation.registry import sample_clients
from piecework.plans.plan_rounds import Timed, awaited_seconds, time_rounds
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.training.settings import Settings, SettingsError

SPEEDS = {"quick": 4e9, "usual": 2e9, "slow": 1e7}
FLEET = json.dumps(
    {
        "name": "speeds",
        "assignment": "list",
        "clients": ["slow", "quick", "usual", "usual", "quick"],
        "device": [
            {"name": name, "memory-ratio": 1.0, "flops": flops, "bandwidth": 1e8, "disk-bandwidth": 1e9}
            for name, flops in SPEEDS.items()
        ],
    }
)
OVER = {
    "strategy": "fedavg",
    "dataset": FEW,
    "fleet": FLEET,
    "clients": 5,
    "clients_per_round": 2,
    "faults__over_sample": 2,
    "seed": 3,
    "evaluation__every": 0,
}


def tasks(*seconds: float | None) -> list[Timed | None]:
    """Tasks that take so many seconds; None cannot be trained."""
    return [None if each is None else Timed("board", Done(each, each, 1.0, 1)) for each in seconds]


def test_a_round_ends_with_the_last_answer_that_is_needed() -> None:
    answers = {0: 5.0, 1: 1.0, 2: 3.0}
    assert closing(answers, {}, 2) == ([1, 2], 3.0)
    assert [closing(answers, {}, enough) for enough in (0, 3, 4)] == [([1, 2, 0], 5.0)] * 3
    assert closing({}, {}, 2) == ([], 0.0)


def test_stragglers_answer_after_their_time() -> None:
    stragglers = Stragglers()
    stragglers.add(4, 1, 3.0)
    stragglers.add(2, 1, 5.0)
    stragglers.wait(2.0)
    assert (stragglers.take_answered(), stragglers.until_next(), stragglers.clients) == ([], 1.0, {2, 4})
    stragglers.wait(1.0)
    assert (stragglers.until_next(), stragglers.clients) == (2.0, {2})
    assert [task["client"] for task in stragglers.take_answered()] == [4]
    again = Stragglers(json.loads(json.dumps(stragglers.tasks)))
    again.wait(9.0)
    assert (again.take_answered(), again.until_next()) == ([{"client": 2, "round": 1, "left": -7.0, "done": []}], 0.0)


def test_a_plan_leaves_out_who_is_still_at_work() -> None:
    """Client 0 takes 10 s, 1 takes 1 s, 2 takes 2 s, and 3 cannot train; one answer is enough of two that are asked."""
    settings = Settings.from_run_config({"clients-per-round": 1, "faults.over-sample": 1, "seed": 2})
    seconds, left, found = [10.0, 1.0, 2.0, None], dict[int, float](), []
    for number in range(1, 7):
        chosen = sample_clients([client for client in range(4) if client not in left], 2, 2, number)
        answers = {client: needs for client in chosen if (needs := seconds[client]) is not None}
        end = min(answers.values())
        left = {c: s - end for c, s in (left | answers).items() if s > end}
        found.append((chosen, end))
    timed = time_rounds(settings, [tasks(*seconds)] * 6)
    assert [(each.asked, each.seconds) for each in timed] == found
    assert any(0 not in chosen and 0 in before for (before, _), (chosen, _) in pairwise(found))
    alone = [seconds[sample_clients(range(4), 1, 2, number)[0]] or 0.0 for number in range(1, 7)]
    assert awaited_seconds(settings, [tasks(*seconds)] * 6) == alone


def test_too_few_idle_clients_are_waited_for() -> None:
    settings = Settings.from_run_config({"clients-per-round": 2, "faults.over-sample": 1, "faults.min-clients": 2})
    # After round 1, client 2 is at work for 6 s more; with two of three clients idle, round 2 begins at once.
    found = time_rounds(settings, [tasks(1.0, 3.0, 9.0)] * 2)
    assert found == [([0, 1, 2], 3.0, 1), ([0, 1], 3.0, 0)]
    # Two are still at work when one has answered; the second round waits 2 s until client 1 is idle too.
    one = settings.with_values({"clients-per-round": 1, "faults.over-sample": 2})
    assert time_rounds(one, [tasks(1.0, 3.0, 9.0)] * 2)[1][:2] == ([0, 1], 2.0 + 1.0)


def test_the_slowest_are_late_and_a_resumed_run_knows_them(tmp_path: Path, grids: Any) -> None:
    run = run_local(tmp_path / "unbroken", num_rounds=3, **OVER)
    records = run.rounds()
    seconds = {c["client"]: c["simulated_seconds"] for r in records for c in r["clients"]}
    assert seconds[0] > 10 * seconds[2] > 12 * seconds[1]
    settings = Settings.from_run_config({"clients-per-round": 2, "faults.over-sample": 2, "seed": 3})
    expected = time_rounds(settings, [tasks(*map(seconds.get, range(5)))] * 3)
    asked = [[client["client"] for client in record["clients"]] for record in records]
    assert asked == [each.asked for each in expected]
    assert [record["simulated_seconds"] for record in records] == pytest.approx([each.seconds for each in expected])
    first = records[0]
    quickest = sorted(asked[0], key=lambda client: (seconds[client], client))[:2]
    assert {c["client"]: c["status"] for c in first["clients"]} == {
        client: "ok" if client in quickest else "late" for client in asked[0]
    }
    assert {c["reason"] for c in first["clients"] if c["status"] == "late"} == {
        "2 others had answered, which is enough (faults.over-sample)"
    }
    assert (first["answered"], first["failed"], first["simulated_seconds"]) == (2, 2, seconds[quickest[1]])
    # Client 0 is asked once, and is at work ever after; it does not count.
    assert [0 in record["busy"] for record in records] == [any(0 in a for a in asked[:n]) for n in range(3)]
    late = [(reply["client"], reply["status"]) for record in records for reply in record["late_replies"]]
    assert late and 0 not in dict(late)
    # A message has the path of the stores, and its bytes take time: both paths have the same length.
    grid = grids(RecordingGrid)
    broken = run_local(tmp_path / "resuming", grid, num_rounds=1, **OVER)
    counted = [m for m in training(grid.last.received) if m.metadata.src_node_id - FIRST_NODE in quickest]
    name = next(iter(model_of(broken)))
    assert model_of(broken)[name].tolist() == average(counted, name).tolist()
    run_local(tmp_path / "resuming", num_rounds=3, resume_from=str(broken.path), **OVER)
    assert same(model_of(broken), model_of(run))
    keys = ("busy", "late_replies", "simulated_seconds", "trained")
    assert [[r[k] for k in keys] for r in broken.rounds()] == [[r[k] for k in keys] for r in records]


def test_real_clients_are_late_by_their_arrival(tmp_path: Path, grids: Any) -> None:
    """On real devices nobody waits for the simulated clock: the first two that answer end the round."""
    grid = grids(RecordingGrid)
    settings = OVER | {"clients": 3, "faults__over_sample": 1, "engine": "deployment", "num_rounds": 1}
    run = run_local(tmp_path, grid, **settings | {"fleet": "reference-step"})
    assert [client["status"] for client in clients_of(run)] == ["ok", "ok", "late"]
    assert len(training(grid.last.received)) == 2
    assert run.rounds()[0]["simulated_seconds"] == max(c["simulated_seconds"] for c in clients_of(run)[:2])


def test_more_than_there_are_cannot_be_asked() -> None:
    with pytest.raises(
        SettingsError, match=r"clients-per-round = 8 and faults\.over-sample = 3 are more than the 10 clients"
    ):
        Settings.from_run_config({"clients": 10, "clients-per-round": 8, "faults.over-sample": 3})
    with pytest.raises(
        SettingsError, match=r"faults\.over-sample = 3: with clients-per-round = 0 a round asks all clients"
    ):
        Settings.from_run_config({"clients-per-round": 0, "faults.over-sample": 3})
