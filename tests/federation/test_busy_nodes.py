"""Nodes that are still at their last task: replies that come late, and a worker that is suspended."""

import math
import os
import pickle
import signal
from collections.abc import Iterable
from contextlib import closing
from multiprocessing.connection import Connection

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from piecework.federation.faults import status_of
from piecework.federation.reply_guard import ReplyGuard
from piecework.federation.transport import Transport
from piecework.server_app.local_grid import READY, LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE, identify


class Dispatcher(LocalGrid):
    """Answers when it is told to; keeps what was pushed. Node 9 cannot be reached."""

    def __init__(self) -> None:
        super().__init__(4, {})
        self.pushed: dict[str, Message] = {}
        self.ready: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        (message,) = messages
        name = f"{message.metadata.dst_node_id}/{message.metadata.group_id}"
        message.metadata.__dict__["_message_id"] = name
        self.pushed[name] = message
        return [None if message.metadata.dst_node_id == 9 else name]  # type: ignore[list-item] # as Flower does

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = sorted(set(message_ids) & self.ready)
        self.ready -= set(found)
        return [Message(RecordDict(), reply_to=self.pushed[name]) for name in found]


def to(node: int, server_round: int, ttl: float = 100.0, content: RecordDict | None = None) -> Message:
    return Message(content or RecordDict(), dst_node_id=node, message_type="train", group_id=str(server_round), ttl=ttl)


def test_late_replies_and_busy_nodes() -> None:
    identify(1)
    grid = Dispatcher()
    transport = Transport(grid, 10, timeout=0.05)
    grid.ready = {"2/1"}
    assert [r.metadata.src_node_id for r in transport.exchange(1, [to(2, 1), to(3, 1), to(9, 1)])] == [2]
    assert (transport.busy(), transport.late()) == ({3}, [])
    assert list(transport.exchange(2, [to(4, 2, ttl=0.01)])) == []
    assert transport.busy() == {3, 4}
    assert (transport.late(), transport.busy()) == ([], {3})  # what has expired is not waited for
    grid.ready = {"3/1"}
    ((sent, reply, _),) = transport.late()
    assert (sent.node_id, sent.server_round, reply.metadata.src_node_id) == (3, 1, 3)
    assert transport.busy() == set()


def test_replies_pulled_with_the_one_that_ends_a_round_are_late() -> None:
    identify(1)
    grid = Dispatcher()
    transport = Transport(grid, 10, timeout=5.0)
    grid.ready = {"2/1", "3/1"}
    with closing(transport.exchange(1, [to(2, 1), to(3, 1), to(4, 1)])) as replies:
        assert next(replies).metadata.src_node_id == 2
    ((sent, reply, _),) = transport.late()
    assert (sent.node_id, reply.metadata.src_node_id) == (3, 3)
    assert transport.busy() == {4}


class Forked(LocalGrid):
    """Its workers are copies of this process, which answer at once. In round 1, client 1 is suspended, 2 within its reply."""

    _start_method = "fork"

    @staticmethod
    def _work(connection: Connection) -> None:
        connection.recv_bytes()  # its arguments
        connection.send_bytes(READY)
        while True:
            message = pickle.loads(connection.recv_bytes())
            client = message.metadata.dst_node_id - FIRST_NODE
            if message.metadata.group_id == "1" and client in (1, 2):
                os.write(connection.fileno(), b"\x00\x10\x00\x00the first of 2**20 bytes" if client == 2 else b"")
                os.kill(os.getpid(), signal.SIGSTOP)
            connection.send_bytes(pickle.dumps(Message(RecordDict(), reply_to=message)))


def test_a_suspended_worker_is_replaced_after_the_timeout() -> None:
    """One that does not read its message, one that trains, one within its reply: the answers behind them still count.

    Each client's reply comes late, and then it is asked again.
    """
    identify(1)
    nodes, large = [FIRST_NODE + client for client in range(5)], RecordDict({"a": ArrayRecord([np.zeros(2**18)])})
    with Forked(5, {}, workers=4) as grid:
        before = [worker.process.pid for worker in grid._workers.values()]
        while grid._starting:
            grid._collect(math.inf)
        os.kill(before[0] or 0, signal.SIGSTOP)  # the first gets the first message
        transport = Transport(ReplyGuard(grid, 1000, 1.0), 10, timeout=1.0)  # as in a run
        found = transport.exchange(1, [to(node, 1, content=large) for node in nodes])
        assert [reply.metadata.src_node_id for reply in found] == nodes[3:]
        assert transport.busy() == {*nodes[:3]}
        after = [worker.process.pid for worker in grid._workers.values()]
        assert (len(after), len({*before, *after})) == (4, 7)
        late = transport.late()
        assert [(sent.node_id, status_of(reply.error)) for sent, reply, _ in late] == [
            (node, "gone") for node in nodes[:3]
        ]
        reasons = {reply.error.reason for _, reply, _ in late}
        assert reasons == {"no answer within messages.round-timeout: its worker was killed"}
        assert transport.busy() == set()
        found = transport.exchange(2, [to(node, 2) for node in nodes])
        assert [reply.metadata.src_node_id for reply in found] == nodes
