"""Send messages as earlier ones are answered, yield replies as they arrive, and separate late replies from current ones."""

import math
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

from flwr.app import Message

from piecework.training.messages import content_bytes
from piecework.training.settings import Settings

LEAST_PAUSE, MOST_PAUSE = 0.01, 0.5  # seconds between looks for replies
MESSAGE_LIFETIME = 2  # after this multiple of messages.round-timeout Flower drops a message, and its node is free again


@dataclass(frozen=True)
class Sent:
    """A message that awaits its reply: its kind and bytes. `time` and `expires` are of the monotonic clock, in seconds."""

    node_id: int
    server_round: int
    kind: str
    bytes: int
    time: float
    expires: float


Reply = tuple[Sent, Message, float]  # a message, its reply, and the seconds from its sending until the reply was seen


class Watch(Protocol):
    """Says how long each answer is awaited, and is told how long it was."""

    def seconds(self, sent: Sent, /) -> float:
        """Return the seconds for which the answer to a message is awaited, counted from its sending."""

    def note_end(self, sent: Sent, waited: float, /, *, answered: bool) -> None:
        """Take note that a message was answered after `waited` seconds, or is not awaited any more."""


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
        self._late: list[Reply] = []

    def exchange(
        self, server_round: int, messages: Iterable[Message], watch: Watch | None = None
    ) -> Generator[Message, None, None]:
        """Send messages, with at most `in_flight` unanswered at once, and yield replies as they arrive.

        Messages that are unanswered when the caller closes the generator are overdue, and replies that were not yet yielded
        are late. Overdue is also a message that was awaited as long as `watch` says, before the exchange ends; late replies are
        then taken in when they arrive.
        """
        waiting, pending, unread = iter(messages), dict[str, Sent](), deque[Reply]()
        last, exhausted = time.monotonic(), False
        deadline = last + self.timeout
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
                looked = time.monotonic()
                unread.extend(self._pull(pending))
                came, replied = time.monotonic(), bool(unread)
                while unread:
                    sent, reply, waited = unread.popleft()
                    pending.pop(reply.metadata.reply_to_message_id, None)
                    if watch is not None:
                        watch.note_end(sent, waited, answered=True)
                    yield reply
                if watch is not None:
                    self._take_late()
                    self._give_up(pending, watch, looked)  # what came while the caller dealt with others is in time
                if replied:
                    last = time.monotonic()
                else:  # a reply is then seen at most a tenth later than it came
                    time.sleep(min(MOST_PAUSE, max(LEAST_PAUSE, (came - last) / 10)))
        finally:
            self.grid.answer_by(math.inf)
            self._close(pending, unread, watch)

    def _pull(self, pending: dict[str, Sent]) -> list[Reply]:
        """Return the pending messages that have been answered, which remain pending."""
        replies = list(self.grid.pull_messages(set(pending)))
        came = time.monotonic()
        found = ((pending.get(reply.metadata.reply_to_message_id), reply) for reply in replies)
        return [(sent, reply, came - sent.time) for sent, reply in found if sent is not None]

    def _close(self, pending: dict[str, Sent], unread: Iterable[Reply], watch: Watch | None) -> None:
        """Make the pending messages of an exchange overdue, and the replies that nobody has read late."""
        if watch is not None:
            for sent in pending.values():
                watch.note_end(sent, time.monotonic() - sent.time, answered=False)
        answered = {reply.metadata.reply_to_message_id for _, reply, _ in unread}
        self.overdue |= {identifier: sent for identifier, sent in pending.items() if identifier not in answered}
        self._late += unread

    def _give_up(self, pending: dict[str, Sent], watch: Watch, now: float) -> None:
        """Make those of the pending messages overdue that had been awaited long enough by `now`."""
        for identifier, sent in [*pending.items()]:
            if now - sent.time >= watch.seconds(sent):
                watch.note_end(sent, now - sent.time, answered=False)
                self.overdue[identifier] = pending.pop(identifier)

    def _send(self, server_round: int, message: Message) -> dict[str, Sent]:
        now, metadata = time.monotonic(), message.metadata
        size = content_bytes(message.content)
        sent = Sent(metadata.dst_node_id, server_round, metadata.message_type, size, now, now + metadata.ttl)
        # For a message that Flower cannot accept, e.g. to a node that left, it returns an empty identifier.
        return {i: sent for i in self.grid.push_messages([message]) if i}

    def late(self) -> list[Reply]:
        """Return the replies to overdue messages that arrived since the last call, and drop expired messages."""
        self._take_late()
        now = time.monotonic()
        self.overdue = {i: sent for i, sent in self.overdue.items() if sent.expires > now}
        found, self._late = self._late, []
        return found

    def _take_late(self) -> None:
        now = time.monotonic()
        while self.overdue and (replies := list(self.grid.pull_messages(set(self.overdue)))):
            for reply in replies:
                sent = self.overdue.pop(reply.metadata.reply_to_message_id, None)
                # Flower itself answers an expired message with an error, which is not a late reply of a client.
                if sent is not None and not (reply.has_error() and sent.expires <= now):
                    self._late.append((sent, reply, now - sent.time))

    def busy(self) -> set[int]:
        """Return the nodes that have overdue messages."""
        return {sent.node_id for sent in self.overdue.values()}


def default_in_flight(settings: Settings) -> int:
    """Return how many messages may be unanswered: enough for all workers; for real devices, in effect all."""
    return max(4, 2 * settings.workers) if settings.engine != "deployment" else 2**16
