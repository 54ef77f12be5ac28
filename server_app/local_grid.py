"""A Flower `Grid` without Flower's processes: it runs the ClientApp in this process, or in spawned workers.

It is meant for tests, small studies and machines without Ray. Messages are always pickled, so a client never shares memory
with the server.
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
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, Error, Message, RecordDict

from piecework.client_app.disk import is_full
from piecework.device_profiles.plugins import refuse_exit
from piecework.device_profiles.profile import usable_cpus
from piecework.federation.errors import RunAbortedError
from piecework.models.imported.objects import is_object
from piecework.server_app.ordered_grid import SERVER, OrderedGrid, client_of, identify
from piecework.server_app.signals import end_with_parent, without_interrupts

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


NodeConfig = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def answer(data: list[bytes], run_config: Mapping[str, Any], clients: int, node_config: NodeConfig) -> bytes:
    """Run the ClientApp on one pickled message and return the pickled reply.

    `data` is a list with one element, which is removed, so that the caller does not keep the bytes in memory while the client
    trains.
    """
    message: Message = pickle.loads(data.pop())  # noqa: S301 (written by this program, never from a network)
    return pickle.dumps(reply_to(message, run_config, clients, node_config), protocol=5)


def reply_to(message: Message, run_config: Mapping[str, Any], clients: int, node_config: NodeConfig) -> Message:
    """Run the ClientApp on one message. An exception becomes an error reply, as in Flower's engines."""
    from piecework.client_app.app import app

    client = client_of(message.metadata.dst_node_id)
    own = node_config if isinstance(node_config, Mapping) else node_config[client]
    config = {"partition-id": client, "num-partitions": clients, **own}
    context = Context(1, message.metadata.dst_node_id, config, RecordDict(), dict(run_config))
    try:
        with refuse_exit():
            return app(message, context)
    except Exception as error:
        # where a disk is full, the message says all that there is to know
        LOG.error("client %d failed:\n%s", client, error if is_full(error) else traceback.format_exc())
        return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)


def work(connection: Connection) -> None:
    """Run a worker process: answer messages until the other end of the connection is closed.

    What comes first is the run's configuration, and the model if that is an object of the parent process.
    """
    identify(SERVER)
    run_config, clients, node_config, module = pickle.loads(connection.recv_bytes())  # noqa: S301 (from its parent)
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


def dump_module(run_config: Mapping[str, Any]) -> bytes:
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


def converse(
    connection: Connection, tasks: queue.SimpleQueue[bytes | None], arrived: Arrived, arguments: bytes
) -> None:
    """Hand a worker its `arguments`, then its messages, and take in what it sends, READY first.

    An error is the last that arrives of it. It runs in a thread of its own, because a suspended worker may leave off in the
    middle of either.
    """
    with connection:
        try:
            connection.send_bytes(arguments)
            arrived.put((connection, connection.recv_bytes()))
            while (task := tasks.get()) is not None:
                connection.send_bytes(task)
                del task
                arrived.put((connection, connection.recv_bytes()))
        except Exception as error:
            arrived.put((connection, error))


class LocalGrid(OrderedGrid):
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
        super().__init__(clients)
        self._arguments = (dict(run_config), clients, node_config or {})
        self._sent_first = pickle.dumps((*self._arguments, dump_module(run_config)), protocol=5) if workers > 1 else b""
        self._waiting: dict[str, bytes] = {}
        self._busy: dict[Connection, str] = {}
        self._workers: dict[Connection, Worker] = {}
        self._starting: set[Connection] = set()
        self._arrived: Arrived = queue.SimpleQueue()
        for _ in range(workers if workers > 1 else 0):
            self._start_worker()

    def _start_worker(self) -> None:
        context: Any = multiprocessing.get_context(self._start_method)
        ours, theirs = context.Pipe()
        worker = Worker(
            context.Process(target=self._work, args=(theirs,), daemon=True),
            queue.SimpleQueue(),
        )
        # a process that dies at its start, as in a script without a main guard, would not read large arguments, and starting it
        # would wait for that forever
        talk = (ours, worker.tasks, self._arrived, self._sent_first)
        thread = threading.Thread(target=converse, args=talk, daemon=True)
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

    def _wait(self, identifier: str, message: Message) -> None:
        self._waiting[identifier] = pickle.dumps(message, protocol=5)

    def _abandon(self, identifiers: set[str]) -> set[str]:
        begun = {connection: name for connection, name in self._busy.items() if name in identifiers}
        for connection in begun:
            del self._busy[connection]
            self._workers[connection].process.kill()
            self._replace(connection)
        for identifier in identifiers:
            self._waiting.pop(identifier, None)
        return set(begun.values())

    def _run_here(self) -> None:
        identifier = next(iter(self._waiting))
        reply = answer([self._waiting.pop(identifier)], *self._arguments)
        self._done[identifier] = pickle.loads(reply)  # noqa: S301

    def _feed(self) -> None:
        for connection, worker in self._workers.items():
            if self._waiting and connection not in self._busy and connection not in self._starting:
                identifier = next(iter(self._waiting))
                self._busy[connection] = identifier
                worker.tasks.put(self._waiting.pop(identifier))

    def _collect(self, deadline: float) -> bool:
        """Take in what a worker has sent, waiting for it until `deadline`; without workers, run the oldest message here."""
        if not self._workers:
            self._run_here()
            return True
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
            identifier = self._busy.pop(connection)
            if isinstance(content, Exception):
                code = self._replace(connection)
                self._fail(identifier, Error(8, f"the worker process ended with exit code {code}"))
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

    def _replace(self, connection: Connection) -> int | None:
        """Replace a worker that died, and return its exit code. Its thread closes the connection."""
        process, tasks = self._workers.pop(connection)
        process.join()
        tasks.put(None)
        self._start_worker()
        return process.exitcode


def default_workers(workers: int) -> int:
    """Return the number of workers; 0 = one for each core that this process may use."""
    return workers or usable_cpus()
