"""A grid that takes each reply only from the node that was asked, and none that brings more bytes than it may.

Flower does not ensure either. A node's requests are signed, but Flower takes the source of a reply, and which message it
answers, from the reply itself, so a node could answer in another's name.
"""

import math
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message.message import make_message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from piecework.federation.faults import REFUSED
from piecework.federation.http_pull import ROOM, HttpPull

SUPERLINK = 1  # Flower's node id of the server, which reports in its own name that a node is gone


def reply_limit(max_bytes: int, model_bytes: int) -> int:
    """Return the most bytes that a reply may bring: twice the model's, or `messages.max-bytes` if that is more, and ROOM.

    No strategy's client sends more than the arrays of the model, with statistics and masks that are no larger.
    """
    return max(max_bytes, 2 * model_bytes) + ROOM


def array_bytes(content: RecordDict) -> int:
    """Return the bytes of all arrays of a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


@runtime_checkable
class WaitingGrid(Protocol):
    """A grid that waits for replies when it is asked for them, as the in-process grid does and Flower's do not."""

    def answer_by(self, deadline: float, /) -> None: ...


@runtime_checkable
class ForeseeingGrid(Protocol):
    """A grid that is told for how many seconds its nodes will compute, so that it can begin with what takes longest."""

    in_flight: int

    def expect(self, seconds: Mapping[int, float], /) -> None: ...


class ReplyGuard(Grid):
    """Wraps a grid: of each message it remembers the node that was asked. `limit` is the most bytes that a reply may bring.

    A reply of another kind becomes an error of the node that was asked, with code REFUSED. On Flower's HTTP grid nothing
    beyond the limit is pulled. Flower's simulation and the in-process grid run this project's own client, and its replies are
    in this machine's memory when they are checked. `seconds` is how long one reply may take to be pulled.
    """

    def __init__(self, grid: Grid, limit: int, seconds: float) -> None:
        self.grid, self.limit = grid, limit
        self._asked: dict[str, int] = {}
        self._http = HttpPull(cast(Any, grid), seconds) if hasattr(type(grid), "_runtime_client") else None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their identifiers, empty for those that Flower does not accept."""
        messages = list(messages)
        if self._http:
            # Here a message's identifier is the hash of its content. With a number in it that only its node gets, no other
            # node can name the message as the one that it answers. Other grids draw their identifiers at random.
            for message in messages:
                message.content["nonce"] = ConfigRecord({"nonce": secrets.token_hex(16)})
        identifiers = list(self.grid.push_messages(messages))
        nodes = [message.metadata.dst_node_id for message in messages]
        self._asked |= {each: node for each, node in zip(identifiers, nodes, strict=False) if each}
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived; what is no reply of the node that was asked becomes an error."""
        if self._http:
            found = self._http.pull(message_ids, self.limit)
            return [self._check(asked, answer) for asked, answer in found if asked in self._asked]
        replies = [(reply.metadata.reply_to_message_id, reply) for reply in self.grid.pull_messages(message_ids)]
        return [self._check(asked, reply) for asked, reply in replies if asked in self._asked]

    def answer_by(self, deadline: float) -> None:
        """Tell a grid that waits for replies until when, as a time of the monotonic clock."""
        if isinstance(self.grid, WaitingGrid):
            self.grid.answer_by(deadline)

    @property
    def in_flight(self) -> int:
        """How many messages the grid would have unanswered at once; 0 = it does not say."""
        return self.grid.in_flight if isinstance(self.grid, ForeseeingGrid) else 0

    def expect(self, seconds: Mapping[int, float]) -> None:
        """Tell a grid that can begin with what takes longest for how many seconds nodes will compute."""
        if isinstance(self.grid, ForeseeingGrid):
            self.grid.expect(seconds)

    def _check(self, asked: str, answer: Message | Error) -> Message:
        node = self._asked.pop(asked)
        if isinstance(answer, Error):
            return error_of(node, asked, answer)
        source, named = answer.metadata.src_node_id, answer.metadata.reply_to_message_id
        if answer.has_error() and source in (node, SUPERLINK):
            return error_of(node, asked, answer.error)
        if (source, named) != (node, asked):
            return error_of(node, asked, Error(REFUSED, f"its reply is made out in the name of another node, {source}"))
        if (size := array_bytes(answer.content)) > self.limit:
            return error_of(
                node, asked, Error(REFUSED, f"its reply brings {size:,} bytes, of the {self.limit:,} that it may bring")
            )
        return answer

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return what Flower knows of the connected nodes."""
        return self.grid.get_nodes()

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run, as Flower describes it."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to a node."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that arrive within `timeout` seconds."""
        pending, found = {each for each in self.push_messages(messages) if each}, list[Message]()
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while pending and time.monotonic() < deadline:
            replies = list(self.pull_messages(pending))
            pending -= {reply.metadata.reply_to_message_id for reply in replies}
            found += replies
            time.sleep(0.0 if replies else 0.1)
        return found


def error_of(node: int, asked: str, error: Error) -> Message:
    """Return an error as a node's reply to a message."""
    metadata = Metadata(0, "", node, SUPERLINK, asked, "", 0.0, 0.0, "query")
    return make_message(metadata, error=error)
