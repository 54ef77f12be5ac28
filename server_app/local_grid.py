"""A Flower `Grid` without Flower's processes: it runs the ClientApp in this process, or in spawned workers.

It is meant for tests, small studies and machines without Ray. Messages are always pickled, so a client never shares memory
with the server. Replies return in the order of the messages, so results do not depend on the number of workers.
"""

import logging
import multiprocessing
import pickle
import signal
import time
import traceback
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from piecework.device_profiles.profile import usable_cpus
from piecework.federation.errors import RunAbortedError
from piecework.server_app.signals import end_with_parent, without_interrupts

SERVER = 1
FIRST_NODE = 2  # client i is node FIRST_NODE + i
READY = b"ready"  # what a worker sends when it has started
NEVER_READY = (
    "a worker process ended with exit code {} before it could train; what it printed stands above. Each worker imports the "
    'script that starts the run, which must therefore start it under `if __name__ == "__main__":`. With workers = 1 the run '
    "trains in its own process"
)
LOG = logging.getLogger("piecework")


def identify(node_id: int) -> None:
    """Set the task that this process belongs to, because Flower creates no messages outside a task."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, node_id


NodeConfig = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def answer(data: list[bytes], run_config: Mapping[str, Any], clients: int, node_config: NodeConfig) -> bytes:
    """Run the ClientApp on one pickled message and return the pickled reply.

    An exception becomes an error reply, as in Flower's engines. `data` is a list with one element, which is removed, so that
    the caller does not keep the bytes in memory while the client trains.
    """
    from piecework.client_app.app import app

    message: Message = pickle.loads(data.pop())  # noqa: S301 (written by this program, never from a network)
    client = message.metadata.dst_node_id - FIRST_NODE
    own = node_config if isinstance(node_config, Mapping) else node_config[client]
    config = {"partition-id": client, "num-partitions": clients, **own}
    context = Context(1, message.metadata.dst_node_id, config, RecordDict(), dict(run_config))
    try:
        reply = app(message, context)
    except Exception as error:
        LOG.error("client %d failed:\n%s", client, traceback.format_exc())
        reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
    return pickle.dumps(reply, protocol=5)


def work(connection: Connection, run_config: Mapping[str, Any], clients: int, node_config: NodeConfig) -> None:
    """Run a worker process: answer messages until the other end of the connection is closed."""
    identify(SERVER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its workers
    end_with_parent()
    connection.send_bytes(READY)
    while True:
        try:
            message = [connection.recv_bytes()]
        except EOFError:
            return
        connection.send_bytes(answer(message, run_config, clients, node_config))


class LocalGrid(Grid):
    """A grid whose nodes are emulated clients. `workers` = 1 runs them in this process; more are spawned.

    `node_config` is added to the nodes' partition ids: one mapping for all nodes, or a sequence with one for each.
    """

    def __init__(
        self,
        clients: int,
        run_config: Mapping[str, Any],
        workers: int = 1,
        node_config: NodeConfig | None = None,
    ) -> None:
        identify(SERVER)
        self._clients = clients
        self._arguments = (dict(run_config), clients, node_config or {})
        self._order: deque[str] = deque()
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._done: dict[str, Message] = {}
        self._busy: dict[Connection, tuple[str, bytes]] = {}
        self._workers: dict[Connection, BaseProcess] = {}
        self._starting: set[Connection] = set()
        for _ in range(workers if workers > 1 else 0):
            self._start_worker()

    def _start_worker(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, *self._arguments), daemon=True)
        with without_interrupts():
            process.start()
        theirs.close()
        self._workers[ours] = process
        self._starting.add(ours)

    def close(self) -> None:
        """Terminate the workers."""
        for connection, process in self._workers.items():
            connection.close()
            process.terminate()
            process.join()
        self._workers.clear()
        self._starting.clear()

    def __enter__(self) -> "LocalGrid":
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

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages, which idle workers receive at once. Returns their identifiers."""
        identifiers = []
        for message in messages:
            identifier = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = identifier
            self._order.append(identifier)
            self._waiting.append((identifier, pickle.dumps(message, protocol=5)))
            identifiers.append(identifier)
            self._feed()
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Block until the oldest of these messages is answered, and return its reply.

        Raises RunAbortedError if a worker cannot start. One that dies later is replaced, and its client's reply is an error.
        """
        wanted = set(message_ids)
        oldest = next((identifier for identifier in self._order if identifier in wanted), None)
        if oldest is None:
            return []
        self._order.remove(oldest)
        while oldest not in self._done:
            self._collect() if self._workers else self._run_here()
        return [self._done.pop(oldest)]

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

    def _run_here(self) -> None:
        identifier, data = self._waiting.popleft()
        self._done[identifier] = pickle.loads(answer([data], *self._arguments))  # noqa: S301

    def _feed(self) -> None:
        for connection in [c for c in self._workers if c not in self._busy and c not in self._starting]:
            if self._waiting:
                identifier, data = self._waiting.popleft()
                try:
                    connection.send_bytes(data)
                    self._busy[connection] = identifier, data
                except OSError:  # the worker died while it was idle
                    self._done[identifier] = self._replace(connection, data)

    def _collect(self) -> None:
        for ready in wait([*self._busy, *self._starting]):
            assert isinstance(ready, Connection)
            if ready in self._starting:
                self._greet(ready)
                continue
            identifier, data = self._busy.pop(ready)
            try:
                self._done[identifier] = pickle.loads(ready.recv_bytes())  # noqa: S301
            except (EOFError, ConnectionResetError):
                self._done[identifier] = self._replace(ready, data)
        self._feed()

    def _greet(self, connection: Connection) -> None:
        """Take in a worker that has started. Raises RunAbortedError if it died instead: the next one would die like it."""
        try:
            connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            process = self._workers[connection]
            process.join()
            raise RunAbortedError(NEVER_READY.format(process.exitcode)) from None
        self._starting.discard(connection)

    def _replace(self, connection: Connection, data: bytes) -> Message:
        """Replace a worker that died, and return an error as the reply of its client."""
        process = self._workers.pop(connection)
        process.join()
        self._start_worker()
        reason = f"the worker process ended with exit code {process.exitcode}"
        return Message(Error(8, reason), reply_to=pickle.loads(data))  # noqa: S301


def default_workers(workers: int) -> int:
    """Return the number of workers; 0 = one for each core that this process may use."""
    return workers or usable_cpus()
