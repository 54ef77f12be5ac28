"""The Flower `Grid` that the engines without Flower's processes share: what is sent, and the replies in the order of messages.

A grid of this kind runs emulated clients in workers that it starts itself. Replies return in the order of the messages, so
results do not depend on how many workers there are, or where. Only when the time for answers is over do those return that wait
behind one which does not come.
"""

import logging
import math
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Set
from typing import Self

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message.message import make_message
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1
FIRST_NODE = 2  # client i is node FIRST_NODE + i
TOO_LATE = "no answer within messages.round-timeout"
LOG = logging.getLogger("piecework")


def identify(node_id: int) -> None:
    """Set the task that this process belongs to, because Flower creates no messages outside a task."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, node_id


def client_of(node_id: int) -> int:
    """Return the client of a grid's node."""
    return node_id - FIRST_NODE


class OrderedGrid(Grid):
    """A grid whose nodes are `clients` emulated clients, always connected.

    A subclass starts what waits (`_feed`), takes in one event (`_collect`), and gives up what a worker has (`_abandon`).
    """

    def __init__(self, clients: int) -> None:
        identify(SERVER)
        self._clients = clients
        self._order: dict[str, tuple[Metadata, float]] = {}  # whose replies nobody has pulled yet, and their deadlines
        self._done: dict[str, Message] = {}
        self._deadline = math.inf

    @abstractmethod
    def close(self) -> None:
        """End the workers."""

    @abstractmethod
    def _wait(self, identifier: str, message: Message) -> None:
        """Queue a message, as its worker will get it."""

    def _pushed(self) -> None:
        """Take in that a message waits."""
        self._feed()

    @abstractmethod
    def _feed(self) -> None:
        """Hand waiting messages to idle workers."""

    @abstractmethod
    def _collect(self, deadline: float) -> bool:
        """Take in what happens next, waiting for it until `deadline`. Returns whether there was anything."""

    @abstractmethod
    def _abandon(self, identifiers: set[str]) -> set[str]:
        """Forget these messages, and replace the workers that have some of them. Returns which those are."""

    def _has(self, identifier: str) -> bool:
        """Whether a message's reply is there."""
        return identifier in self._done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_run(self, run: Run) -> None:
        """Do nothing, because there is only one run."""

    @property
    def run(self) -> Run:
        """An empty run with id 1."""
        return Run.create_empty(1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to a node."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, which are always connected."""
        return range(FIRST_NODE, FIRST_NODE + self._clients)

    def answer_by(self, deadline: float) -> None:
        """Set the time of the monotonic clock by which workers are to answer the messages that are pushed from now on.

        What is not answered then is given up: the worker that has it is killed and replaced, and the client's reply, an error,
        returns late. A run in this process (`workers` = 1) cannot be interrupted, and answers when it is done.
        """
        self._deadline = deadline

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages, which idle workers receive at once. Returns their identifiers."""
        identifiers = []
        for message in messages:
            identifier = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = identifier
            self._order[identifier] = message.metadata, self._deadline
            self._wait(identifier, message)
            identifiers.append(identifier)
            self._pushed()
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Block until the oldest of these messages is answered, and return its reply; at its deadline, those that are there.

        Raises RunAbortedError if a worker cannot start. One that dies later is replaced, and its client's reply is an error.
        """
        asked = message_ids if isinstance(message_ids, Set) else set(message_ids)
        first = next((identifier for identifier in self._order if identifier in asked), None)
        while first is not None and not self._has(first):
            _, deadline = self._order[first]
            if not self._collect(deadline):
                wanted = [identifier for identifier in self._order if identifier in asked]
                found = [identifier for identifier in wanted if self._has(identifier)]
                now = time.monotonic()
                self._give_up({i for i in wanted if not self._has(i) and self._order[i][1] <= now})
                return [self._take(identifier) for identifier in found]
        return [] if first is None else [self._take(first)]

    def _take(self, identifier: str) -> Message:
        del self._order[identifier]
        return self._done.pop(identifier)

    def _give_up(self, identifiers: set[str]) -> None:
        """Answer messages in the place of their clients, which would answer too late; their workers are replaced."""
        begun = self._abandon(identifiers)
        for identifier in identifiers:
            error = Error(4, f"{TOO_LATE}: its worker was killed") if identifier in begun else Error(3, TOO_LATE)
            self._fail(identifier, error)
        LOG.warning("%d clients did not answer within messages.round-timeout", len(identifiers))

    def _fail(self, identifier: str, error: Error) -> None:
        """Answer a message with an error in the place of its client."""
        metadata, _ = self._order[identifier]
        self._done[identifier] = Message(error, reply_to=make_message(metadata, content=RecordDict()))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies in their order; after `timeout` seconds, those that have arrived."""
        pending = set(self.push_messages(messages))
        replies: list[Message] = []
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while pending and time.monotonic() < deadline:
            for reply in self.pull_messages(pending):
                pending.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies
