"""What befalls a cluster while a run goes on: memory that is used up or that others have, lost and new nodes, an interrupt."""

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import clients_of, run_local
from ray_helpers import (
    MEMORY,
    TINY_RUN,
    facts,
    grid_that_ends,
    is_alive,
    is_training,
    lose_node,
    make_ready,
    require_same_model,
    require_same_run,
    states,
    statuses,
    store_of,
    third_node,
    wait_until,
)

from piecework.server_app.records import RunDir

pytest.importorskip("ray")
pytestmark = [pytest.mark.processes, pytest.mark.slow]
ROOM = 6 * 2**30  # bytes that are free where a test uses up memory


def grid_before_rounds(base: Any = None, **happens: Callable[[Any], None]) -> Any:
    """A grid that calls `round_1` when that round is about to be trained, and so on."""

    def wait(self: Any, identifier: str, message: Any) -> None:
        metadata = message.metadata
        if metadata.message_type == "train" and (action := left.pop(f"round_{metadata.group_id}", None)):
            action(self)
        super(own, self)._wait(identifier, message)

    left = dict(happens)
    own: Any = type("Happens", (base or grid_that_ends(),), {"_wait": wait})
    return own


# ---- memory


def befalling_grid(happens: Callable[[Any], None], node_id: str = "") -> Any:
    """A grid in which a worker runs this before it trains its client of round 1: on a node, or client 1's.

    `befell` is the client; `begun` has how often each began in round 1.
    """
    from piecework.engines.cluster.grid import RayGrid

    class Befalls(RayGrid):
        befell: int | None = None
        begun: list[int]

        def _begin(self, want: Any, node: Any, worker: str) -> None:
            own = type(self)
            if is_training(self, want, "1"):
                own.begun.append(want.client)
                if own.befell is None and (node.name == node_id if node_id else want.client == 1):
                    own.befell = want.client
                    self._nodes.actor(worker).__ray_call__.remote(happens)
            super()._begin(want, node, worker)

    Befalls.begun = []
    return Befalls


def test_a_task_that_runs_out_of_memory_is_answered_by_its_client(tmp_path: Path, two_nodes: Any) -> None:
    """Its worker lives, and trains others; the client is not asked again within the round."""

    def want_too_much(worker: Any) -> None:
        import numpy as np
        import torch

        backward = torch.Tensor.backward

        def once(*_: Any, **__: Any) -> None:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            np.empty(2**60, np.uint8)

        torch.Tensor.backward = once  # type: ignore[method-assign,assignment]

    grid = befalling_grid(want_too_much)
    run = run_local(tmp_path, grid, **TINY_RUN | {"strategy": "fedavg", "clients": 3})
    assert statuses(run)[0] == {0: "ok", 1: "memory", 2: "ok"}
    assert sorted(grid.begun) == [0, 1, 2]
    (report,) = [client for client in clients_of(run) if client["client"] == 1]
    assert "MemoryError" in report["reason"]
    assert len(run.rounds()) == 2


def used_memory() -> tuple[int, int]:
    """The bytes that Ray's monitor of a node takes to be in use, and those that there are: a container's, if it has a limit."""
    from ray._common.utils import get_system_memory
    from ray._private.utils import get_used_memory

    system, total = psutil.virtual_memory(), get_system_memory()
    return (get_used_memory(), total) if total < system.total else (system.total - system.available, total)


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="Ray's monitor of memory is Linux's")
def test_a_worker_that_ray_ends_for_memory_has_crashed(tmp_path: Path, two_nodes: Any) -> None:
    """What it trained would use up the memory again: it is not trained on another node. The others count.

    The monitor of one node gives the alarm at a third of what is free, or 4 GiB, and ends workers of that node only. It looks
    at the whole machine's memory, so nothing else may take much meanwhile.
    """
    used, total = used_memory()
    if total - used < ROOM:
        pytest.skip("too little memory is free to use up a part of it")
    much = min((total - used) // 3, 4 * 2**30)

    def use_up(worker: Any) -> None:
        import threading

        import numpy as np

        held = [np.ones(2**26, np.uint8) for _ in range(2 * much // 2**26)]
        threading.Event().wait(60.0)
        raise AssertionError(f"nobody cares that {len(held)} times 64 MiB are used")

    limit = {"RAY_memory_usage_threshold": f"{(used + much) / total:.4f}", "RAY_memory_monitor_refresh_ms": "20"}
    with third_node(two_nodes, **limit) as third:
        name = third.node_id
        grid = grid_before_rounds(befalling_grid(use_up, name), round_1=partial(make_ready, name=name))
        run = run_local(tmp_path, grid, **TINY_RUN | {"strategy": "fedavg"})
    first = statuses(run)[0]
    assert grid.befell is not None
    assert first.pop(grid.befell) == "crashed"
    assert set(first.values()) == {"ok"}
    assert len(first) == 2
    (report,) = [client for client in clients_of(run) if client["client"] == grid.befell]
    assert "OutOfMemoryError" in report["reason"]
    assert grid.begun.count(grid.befell) == 1
    assert len(run.rounds()) == 2


def hold_memory(node_id: str) -> Any:
    """What another job on the cluster does: it has all memory of a node but what one worker takes."""
    from ray.util import placement_group

    from piecework.engines.cluster.book import FLOOR

    group = placement_group([{"memory": MEMORY - FLOOR}], bundle_label_selector=[{"ray.io/node-id": node_id}])
    assert group.wait(60)
    return group


def let_go(groups: list[Any]) -> None:
    from ray.util import remove_placement_group

    while groups:
        remove_placement_group(groups.pop())


def all_memory_is_back(nodes: int = 2) -> bool:
    import ray

    return bool(ray.available_resources().get("memory") == nodes * MEMORY)


@pytest.mark.parametrize("everywhere", [False, True], ids=["one-node", "all-nodes"])
def test_memory_that_another_job_has_is_not_used(tmp_path: Path, two_nodes: Any, *, everywhere: bool) -> None:
    """Clients train on the other node, or begin when the other job has let go; at the end all memory is given back."""
    from piecework.engines.cluster.grid import RayGrid

    wait_until(all_memory_is_back, "another test has left memory reserved")
    nodes = [node.node_id for node in two_nodes.list_all_nodes()]
    held = {name: hold_memory(name) for name in (nodes if everywhere else nodes[1:])}
    places, waited = set[str](), list[int]()

    class Sees(RayGrid):
        def _begin(self, want: Any, node: Any, worker: str) -> None:
            places.add(node.name)
            assert node.name not in held
            super()._begin(want, node, worker)
            reserved = self._nodes._reserved[node.name].bytes
            assert sum(node.prices.values()) <= reserved <= MEMORY - sum(node.floors.values())

        def _look(self) -> None:
            super()._look()
            if everywhere and self._nodes.ready and self._waiting and not self._calls and held:
                waited.append(len(self._waiting))
                if len(waited) == 2:
                    let_go([held.popitem()[1] for _ in nodes])

    settings = TINY_RUN | {"strategy": "fedavg"}
    try:
        run = run_local(tmp_path / "ray", Sees, **settings)
    finally:
        let_go([*held.values()])
    assert len(waited) == (2 if everywhere else 0)
    assert everywhere or places == {nodes[0]}
    require_same_run(run, run_local(tmp_path / "local", **settings))
    wait_until(all_memory_is_back, "memory is reserved for a run that has ended")


# ---- nodes that go and come


def groups_in_use() -> list[Any]:
    from ray.util import placement_group_table

    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_clients_whose_states_were_on_a_lost_node_begin_without(tmp_path: Path, two_nodes: Any) -> None:
    """As on the local engine if their folders are lost, and their records say so. Nothing is asked of Ray for the node."""
    settings = TINY_RUN | {"strategy": "spafl", "clients_per_round": 0, "num_rounds": 3, "training__lr_rounds": 3}
    with third_node(two_nodes, PIECEWORK_STATE_DIR=str(tmp_path / "third")) as third:
        lost = list[int]()

        def lose(grid: Any) -> None:
            lost.extend(client for client, place in grid._homes.places.items() if place == third.node_id)
            lose_node(two_nodes, third)  # its worker may live on for a moment, and answer
            wait_until(lambda: not is_alive(third), "Ray does not see that the node is gone")

        run = run_local(
            tmp_path / "ray",
            grid_before_rounds(round_1=partial(make_ready, name=third.node_id), round_2=lose),
            **settings,
        )
    assert lost
    assert {status for each in statuses(run) for status in each.values()} == {"ok"}
    notes = [{client["client"]: client["note"] for client in clients_of(run, number)} for number in (1, 2, 3)]
    assert [client for client, note in notes[1].items() if "starts without a state" in note] == sorted(lost)
    assert {*notes[0].values(), *notes[2].values()} == {""}
    part = run_local(tmp_path / "local", **settings | {"num_rounds": 1})
    for client in lost:
        shutil.rmtree(store_of(part) / str(client))
    local = run_local(tmp_path / "local", **settings | {"resume_from": str(part.path)})
    require_same_model(run, local)
    assert states(run) == states(local)
    wait_until(lambda: not groups_in_use(), "memory of a node that is gone is still asked for")


def test_a_node_that_joins_trains_clients(tmp_path: Path, two_nodes: Any) -> None:
    """The run waits for it here, so that the round does not end before its worker has started."""
    settings = TINY_RUN | {"strategy": "spafl", "num_rounds": 3}
    with ExitStack() as stack:
        joined = list[str]()

        def join(grid: Any) -> None:
            own = {"PIECEWORK_STATE_DIR": str(tmp_path / "third")}
            name = stack.enter_context(third_node(two_nodes, **own)).node_id
            joined.append(name)
            make_ready(grid, name)

        grid = grid_before_rounds(round_2=join)
        run = run_local(tmp_path / "ray", grid, **settings)
    assert joined[0] in grid.ended_with.values()
    local = run_local(tmp_path / "local", **settings)
    require_same_run(run, local)
    assert states(run) == states(local)


# ---- an interrupt


def test_an_interrupted_run_goes_on_where_its_states_are(tmp_path: Path, two_nodes: Any) -> None:
    """Ctrl-C comes when the first client of round 2 has answered; nothing is brought home then. It begins round 2 again."""

    def settle(self: Any, reference: Any) -> None:
        identifier = self._calls[reference].identifier
        metadata = self._order[identifier][0]
        super(type(self), self)._settle(reference)
        if (metadata.message_type, metadata.group_id) == ("train", "2"):
            raise KeyboardInterrupt

    def start_workers(grid: Any) -> None:
        for node in two_nodes.list_all_nodes():
            make_ready(grid, node.node_id)

    settings = TINY_RUN | {"strategy": "spafl", "num_rounds": 3}
    ready: Any = grid_before_rounds(round_1=start_workers)
    broken, whole = type("Broken", (ready,), {"_settle": settle}), grid_that_ends()
    with pytest.raises(KeyboardInterrupt):
        run_local(tmp_path / "ray", broken, **settings)
    assert len(set(broken.ended_with.values())) == 2  # neither node has them all
    part = RunDir(tmp_path / "ray" / "run")
    assert part.last_complete_round() == 1
    run = run_local(tmp_path / "ray", whole, **settings, resume_from=str(part.path))
    local = run_local(tmp_path / "local", **settings)
    require_same_model(run, local)
    assert facts(run, "note") == facts(local, "note")  # a task whose worker was ended may have left something
    assert states(run) == states(local)
    assert states(run)
