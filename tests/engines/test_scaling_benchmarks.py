"""The benchmarks of a Ray cluster: a round's seconds are all accounted for, and what the head takes in is a real update."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import parts_of
from piecework.engines.cluster.address import protect

ROUND: dict[str, Any] = {
    "began": 10.0,
    "ended": 30.0,
    # Node a has two clients, which train for 4 and 5 of 6 and 6 seconds; b has one, and is done four seconds before a.
    "calls": [("a", 1, 12.0, 18.0), ("b", 2, 13.0, 21.0), ("a", 3, 19.0, 25.0)],
    "trained": {1: 4.0, 2: 7.0, 3: 5.0},
}


def test_the_parts_of_a_round_add_up_to_it() -> None:
    assert parts_of(ROUND, 2) == (8.0, 2.0, 1.0, 2.0, 7.0)
    assert sum(parts_of(ROUND, 2)) == 20.0


def test_a_node_without_clients_waits_for_the_others() -> None:
    assert parts_of(ROUND, 4) == (4.0, 1.0, 0.5, 7.5, 7.0)


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_trains_once_answers_every_task(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    protect()
    from benchmarks.head_run import rounds_of, write_images

    write_images(tmp_path / "random.npz", 3)
    (watched,), (record,) = rounds_of("lenet5x0.3", "fedavg", 3, 1, tmp_path)
    assert (record["answered"], record["aggregated"]) == (3, True)
    assert len({client["train_loss"] for client in record["clients"]}) == 1  # each trained alone would have its own
    assert sorted(call.client for call in watched.calls) == [0, 1, 2]
    assert all(watched.began < call.began < call.ended < watched.ended for call in watched.calls)
    assert sum(watched.seconds.values()) == pytest.approx(watched.ended - watched.began)
    assert min(watched.seconds[phase] for phase in ("send", "share", "receive", "check", "add", "write", "wait")) > 0
