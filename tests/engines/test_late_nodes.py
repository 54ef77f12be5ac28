"""Nodes of a Ray cluster that take long to start a worker: a run that goes on waits longer, and tells what it did not read."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import tiny_settings

from piecework.engines.cluster import nodes as cluster_nodes
from piecework.engines.cluster.book import HEAD, Node
from piecework.engines.cluster.homes import Homes
from piecework.engines.cluster.nodes import Nodes

GIB = 2**30
Make = Callable[[str, float], Nodes]
ADDRESSES = {"a1": "10.0.0.1", "b2": "10.0.0.2"}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """The nodes a1 and b2, of which neither has started a worker, of a run that began so many seconds ago; without Ray."""

    def of_a_run(resume_from: str, seconds: float) -> Nodes:
        listed = [
            {"NodeID": name, "Alive": True, "NodeManagerAddress": address, "Resources": {"CPU": 1.0, "memory": GIB}}
            for name, address in ADDRESSES.items()
        ]
        monkeypatch.setattr(cluster_nodes, "_list_nodes", lambda: listed)
        monkeypatch.setattr(Nodes, "_start", lambda nodes, name: None)
        began = time.monotonic() - seconds
        monkeypatch.setattr(cluster_nodes.time, "monotonic", lambda: began)
        nodes = Nodes(tiny_settings(resume_from=resume_from).to_run_config(), 2, {}, 1)
        monkeypatch.undo()
        return nodes

    return of_a_run


@pytest.mark.parametrize(("resume_from", "patience"), [("", 60), ("runs/one", 600)])
def test_a_run_that_goes_on_waits_ten_times_as_long(
    make: Make, resume_from: str, patience: int, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(resume_from, patience - 30), make(resume_from, patience + 1)
    assert not early.all_came("a1".__eq__)
    assert early.all_came(lambda name: True)
    assert caplog.messages == []
    assert late.all_came("a1".__eq__)
    assert late.all_came("a1".__eq__)  # told once
    assert caplog.messages == [
        f"node 10.0.0.2 of the Ray cluster has started no worker in {patience} s: the run goes on without it until it has"
    ]
    assert late.all_came(lambda name: False)
    assert caplog.messages[1].startswith("node 10.0.0.1 ")


def test_what_a_silent_node_may_hold_is_told(make: Make, tmp_path: Path) -> None:
    """A client whose state is found trains with it, and another one's record says where its state may be."""
    homes = Homes(make("runs/one", 601))
    (tmp_path / "run" / "1" / "state" / "3").mkdir(parents=True)
    homes._folders = {"a1": ""}
    homes.look(str(tmp_path), "run")
    assert homes.places == {1: HEAD}
    assert homes.prepare(1, Node("a1", GIB))[2] == ""
    assert homes.prepare(0, Node("a1", GIB))[2] == (
        "its state may be on a node that has started no worker (10.0.0.2), starts without a state"
    )
    homes._folders["b2"] = str(tmp_path / "own")
    assert homes.prepare(0, Node("a1", GIB))[2] == ""


def test_a_new_run_has_no_states_to_miss(make: Make, tmp_path: Path) -> None:
    homes = Homes(make("", 61))
    homes.look(str(tmp_path), "run")
    assert homes.prepare(0, Node("a1", GIB))[2] == ""
