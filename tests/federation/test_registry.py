"""Whose client number it is: a node that returns, a second one with the same number, and one whose key is registered."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from helpers import TRIO, fleet_json, run_local

from piecework.device_profiles.fleet import load_fleet
from piecework.federation import registry
from piecework.federation.errors import TooFewNodesError
from piecework.federation.registry import FLOWERS_REASON, ClientRegistry
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE, SERVER, identify
from piecework.training import answers
from piecework.training.answers import Outcome, reply
from piecework.training.settings.shared import MemorySettings


class Nodes(LocalGrid):
    """Nodes that come and go: `claims` are those online, by id, with the client number and the name of the key of each."""

    def __init__(self, claims: dict[int, tuple[int, str]]) -> None:
        super().__init__(0, {})
        self.claims, self.asked = claims, dict[str, Message]()

    def get_node_ids(self) -> Iterable[int]:
        return list(self.claims)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=name or None) for node, (_, name) in self.claims.items()]

    def push_messages(self, sent: Iterable[Message]) -> list[str]:
        (message,) = sent
        message.metadata.__dict__["_message_id"] = str(message.metadata.dst_node_id)
        self.asked[message.metadata.message_id] = message
        return [message.metadata.message_id]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.answer(self.asked.pop(each)) for each in sorted(message_ids) if each in self.asked]

    def answer(self, message: Message) -> Message:
        client, _ = self.claims[message.metadata.dst_node_id]
        counts = {"num-examples": 10, "num-validation": 0, "num-test": 0}
        found = reply(message, Outcome("ok"), {"partition-id": client, "num-partitions": 2, **counts})
        found.content["node"] = answers.NodeInfo("", "").to_record()
        return found


class Gathering:
    """A registry with a clock that stands still between updates, of a run that has started or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, started: bool = True) -> None:
        identify(SERVER)
        self.now = time.monotonic()
        monkeypatch.setattr(registry, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.registry = ClientRegistry(load_fleet(fleet_json(all=1.0)), 0, 2, MemorySettings(), started=started)

    def see(self, *claims: tuple[int, int, str]) -> dict[int, int]:
        """Update with these nodes online (id, client, name); the node of each client afterwards."""
        self.now += registry.AGAIN_SECONDS
        self.registry.update(Nodes({node: (client, name) for node, client, name in claims}))
        return {client: member.node_id for client, member in self.registry.members.items()}


def test_a_client_is_replaced_only_when_its_node_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Gathering(monkeypatch)
    assert it.see((5, 0, "")) == {0: 5}
    assert it.see((5, 0, ""), (6, 0, ""), (7, 1, "")) == {0: 5, 1: 7}
    (refused,) = it.registry.unusable()
    assert refused["node"] == 6
    assert "partition-id 0 is that of node 5, which is online: node 6 needs its own" in str(refused["reason"])
    assert it.see((6, 0, "")) == {0: 6, 1: 7}
    assert it.registry.unusable() == []


def test_before_a_run_two_nodes_with_one_number_are_both_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers first, and whatever their names; the one that is left is the client."""
    it = Gathering(monkeypatch, started=False)
    assert it.see((5, 0, "shed"), (7, 1, "")) == {0: 5, 1: 7}
    reason = "partition-id 0 is claimed by node 5 ('shed') and node 6: none of them takes part until each has its own"
    for _ in range(2):  # asked again, they are refused again
        assert it.see((5, 0, "shed"), (6, 0, ""), (7, 1, "")) == {1: 7}
        refused = [{"node": node, "name": name, "reason": reason} for node, name in ((5, "shed"), (6, ""))]
        assert it.registry.unusable() == refused
        assert (it.registry.client_of(5), it.registry.client_of(6)) == (None, None)
    assert it.registry.bound == {}
    assert it.see((6, 0, ""), (7, 1, "")) == {0: 6, 1: 7}
    assert it.registry.unusable() == []


def test_why_a_node_was_refused_is_told_when_it_is_gone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a board that starts anew after each error may be when the time is up."""
    it = Gathering(monkeypatch, started=False)
    assert it.see((5, 7, "shed")) == {}
    with pytest.raises(
        TooFewNodesError, match=r"^0 of 2 .* Not used: node 5 \('shed'\), which is gone: .*7 is out of range"
    ):
        it.registry.wait_for_clients(Nodes({}), 0.0)


def test_nodes_refused_before_the_run_stay_so_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that began with `faults.min-clients`: neither is admitted until the other is gone, then it may be."""
    it = Gathering(monkeypatch, started=False)
    claims = (5, 0, ""), (6, 0, ""), (7, 1, "")
    assert it.see(*claims) == {1: 7}
    it.registry.started = True
    assert it.see(*claims) == {1: 7}
    assert it.see((5, 0, ""), (7, 1, "")) == {0: 5, 1: 7}
    assert it.see(*claims) == {0: 5, 1: 7}  # now 5 works
    assert [each["node"] for each in it.registry.unusable()] == [6]


def test_a_registered_node_keeps_its_client_for_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is away: neither another registered node nor one without a key can take it, nor it another's."""
    it = Gathering(monkeypatch)
    assert it.see((5, 0, "node-0")) == {0: 5}
    assert it.see((6, 0, "node-1"), (7, 0, "")) == {0: 5}
    assert [str(each["reason"]) for each in it.registry.unusable()] == [
        "partition-id 0 belongs to 'node-0': node 6 is registered as 'node-1'",
        "partition-id 0 belongs to 'node-0': node 7 is registered as ''",
    ]
    assert it.see((8, 1, "node-0")) == {0: 5}
    (refused,) = it.registry.unusable()
    assert "node 8, 'node-0', claims partition-id 1: its own is 0" in str(refused["reason"])
    assert it.see((9, 0, "node-0"), (6, 1, "node-1")) == {0: 9, 1: 6}  # a new key, registered for the same device
    assert it.registry.bound == {0: "node-0", 1: "node-1"}


def test_a_resumed_run_knows_whose_client_it_is(tmp_path: Path, grids: Any) -> None:
    """The names are in its checkpoint. Here the nodes of all clients have changed places."""

    class Named(LocalGrid):
        names: Sequence[str]

        def get_nodes(self) -> Iterable[NodeInfo]:
            return [NodeInfo(node_id=node, name=self.names[node - FIRST_NODE]) for node in self.get_node_ids()]

    values = TRIO | {"strategy": "fedavg", "messages__node_timeout": 0.01}
    run = run_local(tmp_path, grids(Named, names="abc"), **values)
    again = {"resume_from": str(run.path), "num_rounds": 2}
    with pytest.raises(TooFewNodesError, match="partition-id 2 belongs to 'c': node 4 is registered as 'b'"):
        run_local(tmp_path, grids(Named, names="acb"), **values | again)
    run_local(tmp_path, grids(Named, names="abc"), **values | again)
    assert run.last_complete_round() == 2


def test_an_exception_of_a_client_is_told_without_flowers_frame() -> None:
    told = [
        "<class 'piecework.federated_data.sources.DatasetError'>:<'no meta.json: it isn't here'>",
        "<class 'ValueError'>:<\"no 'x'\">",
        "the app was not found",
    ]
    assert [FLOWERS_REASON.sub(r"\1: \3", reason) for reason in told] == [
        "DatasetError: no meta.json: it isn't here",
        "ValueError: no 'x'",
        "the app was not found",
    ]
