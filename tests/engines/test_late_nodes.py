"""Nodes of a Ray cluster that take long to start a worker: a run that goes on waits longer, and tells it."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers import tiny_settings

from piecework.engines.cluster import nodes as cluster_nodes
from piecework.engines.cluster.nodes import Nodes

GIB = 2**30
Make = Callable[..., Nodes]
ADDRESSES = {"a1": "10.0.0.1", "b2": "10.0.0.2"}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """The nodes a1 and b2, of which neither has started a worker, of a run that began so many seconds ago; without Ray."""

    def of_a_run(resume_from: str, seconds: float, **changes: Any) -> Nodes:
        listed = [
            {"NodeID": name, "Alive": True, "NodeManagerAddress": address, "Resources": {"CPU": 1.0, "memory": GIB}}
            for name, address in ADDRESSES.items()
        ]
        monkeypatch.setattr(cluster_nodes, "_list_nodes", lambda: listed)
        monkeypatch.setattr(Nodes, "_start", lambda nodes, name: None)
        began = time.monotonic() - seconds
        monkeypatch.setattr(cluster_nodes.time, "monotonic", lambda: began)
        nodes = Nodes(tiny_settings(resume_from=resume_from, **changes).to_run_config(), 2, {}, 1)
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
        f"node 10.0.0.2 of the Ray cluster has said nothing of its clients' states in {patience} s: "
        "the run goes on without them"
    ]
    assert late.all_came(lambda name: False)
    assert caplog.messages[1].startswith("node 10.0.0.1 ")


def test_it_waits_for_half_of_the_time_that_messages_have_at_most(make: Make) -> None:
    assert not make("runs/one", 90, messages__round_timeout=240.0).all_came("a1".__eq__)
    assert make("runs/one", 121, messages__round_timeout=240.0).all_came("a1".__eq__)
    assert not make("runs/one", 30, messages__round_timeout=30.0).all_came("a1".__eq__)
