"""Send messages as earlier ones are answered, yield replies as they arrive, and separate late replies from current ones."""

import math
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

from flwr.app import Message

LIFE = 2  # after this multiple of messages.round-timeout Flower drops a message, and its node is free again


@dataclass(frozen=True)
class Sent:
    """A message that awaits its reply. `expires` is a time of the monotonic clock, in seconds."""

    node_id: int
    server_round: int
    expires: float


class TimedGrid(Protocol):
    """A grid that is told until when its nodes are to answer, because it may itself wait for them."""

    def push_messages(self, messages: Iterable[Message], /) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str], /) -> Iterable[Message]: ...

    def answer_by(self, deadline: float, /) -> None: ...


class Transport:
    """The unanswered messages to the nodes of a grid. An exchange waits at most `timeout` seconds for its replies.

    A message still unanswered then is overdue: its node counts as busy until the reply arrives or the message expires. The
    grid is told until when an exchange waits.
    """

    def __init__(self, grid: TimedGrid, in_flight: int, timeout: float) -> None:
        self.grid, self.in_flight, self.timeout = grid, in_flight, timeout
        self.overdue: dict[str, Sent] = {}

    def exchange(self, server_round: int, messages: Iterable[Message]) -> Generator[Message, None, None]:
        """Send messages, with at most `in_flight` unanswered at once, and yield replies as they arrive.

        Messages that are unanswered when the caller closes the generator are overdue.
        """
        waiting, pending = iter(messages), dict[str, Sent]()
        deadline, pause, exhausted = time.monotonic() + self.timeout, 0.01, False
        self.grid.answer_by(deadline)
        try:
            while time.monotonic() < deadline:
                while not exhausted and len(pending) < self.in_flight:
                    message = next(waiting, None)
                    exhausted = message is None
                    if message is not None:
                        pending |= self._send(server_round, message)
                if not pending:
                    return
                replies = list(self.grid.pull_messages(set(pending)))
                for reply in replies:
                    pending.pop(reply.metadata.reply_to_message_id, None)
                    yield reply
                pause = 0.01 if replies else min(2 * pause, 0.5)
                if not replies:
                    time.sleep(pause)
        finally:
            self.grid.answer_by(math.inf)
            self.overdue |= pending

    def _send(self, server_round: int, message: Message) -> dict[str, Sent]:
        node, expires = message.metadata.dst_node_id, time.monotonic() + message.metadata.ttl
        # For a message that Flower cannot accept, e.g. to a node that left, it returns an empty identifier.
        return {i: Sent(node, server_round, expires) for i in self.grid.push_messages([message]) if i}

    def late(self) -> list[tuple[Sent, Message]]:
        """Return the replies to overdue messages that arrived since the last call, and drop expired messages."""
        found, now = [], time.monotonic()
        while self.overdue and (replies := list(self.grid.pull_messages(set(self.overdue)))):
            for reply in replies:
                sent = self.overdue.pop(reply.metadata.reply_to_message_id, None)
                # Flower itself answers an expired message with an error, which is not a late reply of a client.
                if sent is not None and not (reply.has_error() and sent.expires <= now):
                    found.append((sent, reply))
        self.overdue = {i: sent for i, sent in self.overdue.items() if sent.expires > now}
        return found

    def busy(self) -> set[int]:
        """Return the nodes that have overdue messages."""
        return {sent.node_id for sent in self.overdue.values()}
