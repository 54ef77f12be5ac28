"""A Flower `Grid` without Flower's processes: it runs the ClientApp in this process, or in spawned workers.

It is meant for tests, small studies and machines without Ray. Messages are always pickled, so a client never shares memory
with the server. Replies return in the order of the messages, so results do not depend on the number of workers. Only when the
time for answers is over do those return that wait behind one which does not come.
"""

import logging
import math
import multiprocessing
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from piecework.device_profiles.plugins import refuse_exit
from piecework.device_profiles.profile import usable_cpus
from piecework.federation.errors import RunAbortedError
from piecework.models.imported.objects import is_object
from piecework.server_app.signals import end_with_parent, without_interrupts

SERVER = 1
FIRST_NODE = 2  # client i is node FIRST_NODE + i
READY = b"ready"  # what a worker sends when it has started
NEVER_READY = (
    "a worker process ended with exit code {} before it could train; what it printed stands above. Each worker imports the "
    'script that starts the run, which must therefore start it under `if __name__ == "__main__":`. With workers = 1 the run '
    "trains in its own process"
)
NO_FILE = (
    "a worker process ended with exit code {} before it could train: each worker imports the script that starts the run, and "
    "this one, {}, is no file. Write it to a file, or run with workers = 1, which trains in this process"
)
LOG = logging.getLogger("piecework")


def why_never_ready(code: int | None) -> str:
    """Return why a worker never began, from how it ended."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return NO_FILE.format(code, script) if script and not Path(script).is_file() else NEVER_READY.format(code)


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
        with refuse_exit():
            reply = app(message, context)
    except Exception as error:
        LOG.error("client %d failed:\n%s", client, traceback.format_exc())
        reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
    return pickle.dumps(reply, protocol=5)


def work(
    connection: Connection, run_config: Mapping[str, Any], clients: int, node_config: NodeConfig, module: bytes
) -> None:
    """Run a worker process: answer messages until the other end of the connection is closed.

    `module` is the model if that is an object of the parent process.
    """
    identify(SERVER)
    if module:
        from piecework.models.imported.objects import take_object

        take_object(str(run_config["model"]), module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its workers
    end_with_parent()
    connection.send_bytes(READY)
    while True:
        try:
            message = [connection.recv_bytes()]
        except EOFError:
            return
        connection.send_bytes(answer(message, run_config, clients, node_config))


def _dump_module(run_config: Mapping[str, Any]) -> bytes:
    """Return the model for worker processes if it is an object of this process, else nothing."""
    name = str(run_config.get("model", ""))
    if not is_object(name):
        return b""
    from piecework.models.imported.objects import dump_object

    return dump_object(name)


class Worker(NamedTuple):
    """A worker process, and the queue of the messages that its thread hands to it; None ends the thread."""

    process: BaseProcess
    tasks: queue.SimpleQueue[bytes | None]


Arrived = queue.SimpleQueue[tuple[Connection, bytes | Exception]]


def converse(connection: Connection, tasks: queue.SimpleQueue[bytes | None], arrived: Arrived) -> None:
    """Hand a worker its messages and take in what it sends, READY first; an error is the last that arrives of it.

    It runs in a thread of its own, because a suspended worker may leave off in the middle of either.
    """
    with connection:
        try:
            arrived.put((connection, connection.recv_bytes()))
            while (task := tasks.get()) is not None:
                connection.send_bytes(task)
                del task
                arrived.put((connection, connection.recv_bytes()))
        except Exception as error:
            arrived.put((connection, error))


class LocalGrid(Grid):
    """A grid whose nodes are emulated clients. `workers` = 1 runs them in this process; more are spawned.

    `node_config` is added to the nodes' partition ids: one mapping for all nodes, or a sequence with one for each.
    """

    _start_method, _work = "spawn", staticmethod(work)

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
        self._module = _dump_module(run_config) if workers > 1 else b""
        self._order: deque[str] = deque()
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._done: dict[str, Message] = {}
        self._busy: dict[Connection, tuple[str, bytes]] = {}
        self._workers: dict[Connection, Worker] = {}
        self._starting: set[Connection] = set()
        self._arrived: Arrived = queue.SimpleQueue()
        self._deadline, self._deadlines = math.inf, dict[str, float]()
        for _ in range(workers if workers > 1 else 0):
            self._start_worker()

    def _start_worker(self) -> None:
        context: Any = multiprocessing.get_context(self._start_method)
        ours, theirs = context.Pipe()
        worker = Worker(
            context.Process(target=self._work, args=(theirs, *self._arguments, self._module), daemon=True),
            queue.SimpleQueue(),
        )
        thread = threading.Thread(target=converse, args=(ours, worker.tasks, self._arrived), daemon=True)
        with without_interrupts():
            worker.process.start()
            thread.start()
        theirs.close()
        self._workers[ours] = worker
        self._starting.add(ours)

    def close(self) -> None:
        """Terminate the workers."""
        for process, tasks in self._workers.values():
            process.kill()  # a suspended one would not heed SIGTERM
            process.join()
            tasks.put(None)
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
            self._order.append(identifier)
            self._deadlines[identifier] = self._deadline
            self._waiting.append((identifier, pickle.dumps(message, protocol=5)))
            identifiers.append(identifier)
            self._feed()
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Block until the oldest of these messages is answered, and return its reply; at its deadline, those that are there.

        Raises RunAbortedError if a worker cannot start. One that dies later is replaced, and its client's reply is an error.
        """
        asked = set(message_ids)
        wanted = [identifier for identifier in self._order if identifier in asked]
        while wanted and wanted[0] not in self._done:
            if not self._workers:
                self._run_here()
            elif not self._collect(self._deadlines[wanted[0]]):
                found = [identifier for identifier in wanted if identifier in self._done]
                self._give_up({i for i in wanted if i not in self._done and self._deadlines[i] <= time.monotonic()})
                return [self._take(identifier) for identifier in found]
        return [self._take(identifier) for identifier in wanted[:1]]

    def _take(self, identifier: str) -> Message:
        self._order.remove(identifier)
        del self._deadlines[identifier]
        return self._done.pop(identifier)

    def _give_up(self, identifiers: set[str]) -> None:
        """Answer messages in the place of their clients, which would answer too late; their workers are replaced."""
        reason = "no answer within messages.round-timeout"
        for connection, (identifier, data) in [*self._busy.items()]:
            if identifier in identifiers:
                del self._busy[connection]
                self._workers[connection].process.kill()
                self._done[identifier] = self._replace(connection, data, Error(4, f"{reason}: its worker was killed"))
        for entry in [entry for entry in self._waiting if entry[0] in identifiers]:
            self._waiting.remove(entry)
            self._done[entry[0]] = Message(Error(3, reason), reply_to=pickle.loads(entry[1]))  # noqa: S301
        LOG.warning("%d clients did not answer within messages.round-timeout", len(identifiers))

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
        for connection, worker in self._workers.items():
            if self._waiting and connection not in self._busy and connection not in self._starting:
                self._busy[connection] = self._waiting.popleft()
                worker.tasks.put(self._busy[connection][1])

    def _collect(self, deadline: float) -> bool:
        """Take in what a worker has sent, waiting for it until `deadline`. Returns whether there was anything."""
        patience = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            connection, content = self._arrived.get(timeout=patience)
        except queue.Empty:
            return False
        if isinstance(content, Exception) and not isinstance(content, EOFError | OSError):
            raise content
        if connection in self._starting:
            self._greet(connection, content)
        elif connection in self._busy:  # and not given up
            identifier, data = self._busy.pop(connection)
            if isinstance(content, Exception):
                self._done[identifier] = self._replace(connection, data)
            else:
                self._done[identifier] = pickle.loads(content)  # noqa: S301
        self._feed()
        return True

    def _greet(self, connection: Connection, content: bytes | Exception) -> None:
        """Take in a worker that has started. Raises RunAbortedError if it died instead: the next one would die like it."""
        if isinstance(content, Exception):
            process = self._workers[connection].process
            process.join()
            raise RunAbortedError(why_never_ready(process.exitcode))
        self._starting.discard(connection)

    def _replace(self, connection: Connection, data: bytes, error: Error | None = None) -> Message:
        """Replace a worker that died, and return an error as the reply of its client. Its thread closes the connection."""
        process, tasks = self._workers.pop(connection)
        process.join()
        tasks.put(None)
        self._start_worker()
        error = error or Error(8, f"the worker process ended with exit code {process.exitcode}")
        return Message(error, reply_to=pickle.loads(data))  # noqa: S301


def default_workers(workers: int) -> int:
    """Return the number of workers; 0 = one for each core that this process may use."""
    return workers or usable_cpus()
