"""What holds any grid of emulated clients: in this process, in workers, and on two nodes of Ray."""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from helpers import few_digits, tiny_settings

from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE, TOO_LATE, OrderedGrid, client_of

pytestmark = pytest.mark.processes
CLIENTS = 3


@pytest.fixture(scope="module", params=["this process", "workers", pytest.param("ray", marks=pytest.mark.slow)])
def grid(request: pytest.FixtureRequest) -> Iterator[OrderedGrid]:
    config = tiny_settings(strategy="fedavg", dataset=f"npz:{few_digits()}", clients=CLIENTS).to_run_config()
    kind, workers = LocalGrid, 2 if request.param == "workers" else 1
    if request.param == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("two_nodes")
        from piecework.engines.cluster.grid import RayGrid

        kind = RayGrid  # type: ignore[assignment]
    with kind(CLIENTS, config, workers) as found:
        yield found


def question(client: int, kind: str = "query.device") -> Message:
    return Message(RecordDict(), dst_node_id=FIRST_NODE + client, message_type=kind)


def pull(grid: OrderedGrid, asked: Iterable[str]) -> list[Message]:
    """All replies, in the order in which they come."""
    pending, replies = set(asked), list[Message]()
    while pending:
        for reply in grid.pull_messages(pending):
            pending.remove(reply.metadata.reply_to_message_id)
            replies.append(reply)
    return replies


def clients_of(replies: Iterable[Message]) -> list[int]:
    return [client_of(reply.metadata.src_node_id) for reply in replies]


def test_replies_come_in_the_order_of_messages(grid: OrderedGrid) -> None:
    """Each client answers for itself, one that is asked twice does so twice, and nothing is answered again."""
    assert [client_of(node) for node in grid.get_node_ids()] == [0, 1, 2]
    asked = [2, 0, 1, 0]
    identifiers = list(grid.push_messages([question(client) for client in asked]))
    replies = pull(grid, identifiers)
    assert clients_of(replies) == asked
    assert [reply.content.metric_records["metrics"]["partition-id"] for reply in replies] == asked
    assert [reply.metadata.reply_to_message_id for reply in replies] == identifiers
    assert list(grid.pull_messages(identifiers)) == []


def test_a_client_that_fails_answers_with_an_error(grid: OrderedGrid) -> None:
    """And what was asked after it is answered."""
    replies = list(grid.send_and_receive([question(0, "train"), question(1), question(0)]))
    assert clients_of(replies) == [0, 1, 0]
    assert [reply.has_error() for reply in replies] == [True, False, False]
    assert (replies[0].error.code, replies[0].error.reason) == (
        2,
        "MessageError: the message has no record 'task' of values",
    )


def test_what_comes_too_late_is_given_up(grid: OrderedGrid) -> None:
    """A run in this process cannot be interrupted, and answers. Others answer in the place of clients, and then go on."""
    grid.answer_by(time.monotonic())
    identifiers = list(grid.push_messages([question(n % CLIENTS) for n in range(6)]))
    last = max(pull(grid, identifiers), key=lambda reply: identifiers.index(reply.metadata.reply_to_message_id))
    grid.answer_by(math.inf)
    here = type(grid) is LocalGrid and not grid._workers
    error: Any = last.error if last.has_error() else None
    assert (error and (error.code, error.reason)) == (None if here else (3, TOO_LATE))
    (after,) = pull(grid, grid.push_messages([question(2)]))
    assert not after.has_error()
