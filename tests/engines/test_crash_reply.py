"""A SuperNode's own API is told at once that a task was killed or could not answer, and answers the task's message."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import uvicorn
from flwr.app import Array, ArrayRecord, Context, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.app.message.message import remove_content_from_message
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeState, NodeStateFactory
from flwr.supernode.runtime import run_clientapp

from piecework.executor.crash_reply import Notes, answer, client_of, read_unanswered

NODE, RUN = 7, 5


class Served:
    """The API of a SuperNode that has a message for its client, and the task that a client gets for it."""

    def __init__(self, content: RecordDict) -> None:
        store = ObjectStoreFactory()
        factory = NodeStateFactory(store)
        self.state: NodeState = factory.state()
        self.state.set_node_id(NODE)
        run = Run.create_empty(RUN)
        run.fab_hash = self.state.store_fab(Fab("", b"", {}))
        self.state.store_run(run)
        self.state.set_run_series_context(run.series_id, Context(RUN, NODE, {}, RecordDict(), {}))
        self.task = self.state.create_task(TaskType.CLIENT_APP, RUN, run.fab_hash) or pytest.fail()
        message = make_message(Metadata(RUN, "", 1, NODE, "", "1", time.time(), 60.0, "train"), content, None)
        message.metadata.__dict__["_message_id"] = self.message_id = message.object_id
        self.state.store_message(remove_content_from_message(message))  # as one that comes from a SuperLink
        store.store().preregister(RUN, get_object_tree(message))
        for object_id, part in get_all_nested_objects(message).items():
            store.store().put(object_id, part.deflate())
        self.state.record_message_processing_start(self.message_id)
        self.token = self.state.claim_task(self.task) or pytest.fail()
        self.server = uvicorn.Server(
            uvicorn.Config(create_app(factory), host="127.0.0.1", port=0, ws="none", log_level="error")
        )

    def words(self) -> list[str]:
        """The words that start the task."""
        (server,) = self.server.servers
        port = server.sockets[0].getsockname()[1]
        return ["flwr-clientapp", "--runtime-api-address", f"127.0.0.1:{port}", "--token", self.token, "--insecure"]


@contextmanager
def serving(content: RecordDict) -> Iterator[Served]:
    """An API whose message has this content."""
    found = Served(content)
    thread = threading.Thread(target=found.server.run)
    thread.start()
    while not found.server.started:
        thread.join(0.01)
        assert thread.is_alive()
    yield found
    found.server.should_exit = True
    thread.join()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(RecordDict()) as found:
        yield found


def pulled(served: Served) -> tuple[Notes, int]:
    """The notes of a task that has pulled its message, and the end of the pipe where they come out."""
    reader, writer = os.pipe()
    notes, client = Notes(writer), client_of(served.words())
    message = notes.of_message(run_clientapp.pull_task_input)(client)[0]
    client.close()
    assert message.metadata.message_id == served.message_id
    return notes, reader


def test_a_killed_task_is_answered_with_its_reason(served: Served) -> None:
    _, reader = pulled(served)
    noted = os.read(reader, 2**16)
    assert len(noted) < 4096  # which a pipe holds until it is read
    answer(served.words(), noted, "killed by signal 9 (Killed)")
    (reply,) = served.state.get_messages_legacy(is_reply=True)
    assert (reply.error.code, reply.error.reason) == (ErrorCode.CLIENT_APP_CRASHED, "killed by signal 9 (Killed)")
    assert reply.metadata.reply_to_message_id == served.message_id
    assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (NODE, 1)
    assert (reply.metadata.run_id, reply.metadata.group_id, reply.metadata.message_type) == (RUN, "1", "train")
    (task,) = served.state.get_tasks(task_ids=[served.task])
    assert (task.status.status, task.status.sub_status) == (Status.FINISHED, SubStatus.FAILED)


def test_a_task_that_was_killed_after_its_answer_is_not_answered_twice(served: Served) -> None:
    client = client_of(served.words())
    reader, writer = os.pipe()
    message, context, *_ = Notes(writer).of_message(run_clientapp.pull_task_input)(client)
    run_clientapp.push_message(client, Message(RecordDict(), reply_to=message), context)
    client.close()
    answer(served.words(), os.read(reader, 2**16), "killed by signal 9 (Killed)")
    (reply,) = served.state.get_messages_legacy(is_reply=True)
    assert not reply.has_error()


class TooLarge(RecordDict):
    """What a reply cannot be made of."""

    def deflate(self) -> bytes:
        raise MemoryError


def test_a_reply_that_cannot_be_made_is_an_error(served: Served) -> None:
    client, notes = client_of(served.words()), Notes(os.open(os.devnull, os.O_WRONLY))
    message, context, *_ = notes.of_message(run_clientapp.pull_task_input)(client)
    push, reply = (
        notes.of_failure("its reply was made", run_clientapp.push_message),
        Message(TooLarge(), reply_to=message),
    )
    with pytest.raises(MemoryError):
        push(client, reply, context)
    notes.of_end(run_clientapp.push_task_output)(client, None, SubStatus.COMPLETED, "")
    client.close()
    (answered,) = served.state.get_messages_legacy(is_reply=True)
    why = "the task ran out of memory while its reply was made (MemoryError())"
    assert (answered.error.code, answered.error.reason) == (ErrorCode.CLIENT_APP_CRASHED, why)
    (task,) = served.state.get_tasks(task_ids=[served.task])
    assert task.status.status == Status.FINISHED


# A task as the executor's child runs it: with less memory than its message takes, or told to end while its app works.
TASK = """
import os, resource, signal, sys, threading
from piecework.executor import tasks
from flwr.supernode.runtime import run_clientapp

threading.stack_size(2**18)  # address space that the limit below counts is then only what holds something
tasks.IMPORTED = ()
tasks.import_all()
what, *words = sys.argv[1:]

def less_memory(more):
    size = int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + more * 2**20, resource.RLIM_INFINITY))

def app(message, context):
    os.kill(os.getpid(), signal.SIGTERM)

if what == "pull":
    pull = run_clientapp.pull_task_input
    run_clientapp.pull_task_input = lambda client: (less_memory(100), pull(client))[1]
run_clientapp.install_from_fab = lambda *_, **named: None
run_clientapp.get_project_dir = lambda *_: None
run_clientapp.get_load_client_app_fn = lambda **_: lambda *_: app
tasks.install_once = lambda install: install
tasks.run_task(words, os.open(os.devnull, os.O_WRONLY))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the executor is of Linux")
@pytest.mark.parametrize(
    ("what", "code", "why"),
    [
        (
            "pull",
            ErrorCode.CLIENT_APP_CRASHED,
            "the task ran out of memory while its message was pulled (MemoryError(",
        ),
        ("ended", ErrorCode.MESSAGE_UNAVAILABLE, "the task was ended before it answered"),
    ],
)
def test_a_task_that_ends_by_itself_is_answered(what: str, code: int, why: str) -> None:
    """Flower takes it for finished: a request for memory was refused beside the app, or it was told to end."""
    weight = Array(np.zeros(2**24 if what == "pull" else 0, np.float32))
    with serving(RecordDict({"arrays": ArrayRecord({"weight": weight})})) as served:
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
        command = [sys.executable, "-c", TASK, what, *served.words(), "--parent-pid", str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        replies = served.state.get_messages_legacy(is_reply=True)
        (task,) = served.state.get_tasks(task_ids=[served.task])
    assert [reply.error.code for reply in replies] == [code], done.stderr
    assert replies[0].error.reason.startswith(why)
    assert replies[0].metadata.reply_to_message_id == served.message_id
    assert task.status.status == Status.FINISHED


@pytest.mark.parametrize("notes", [b"", b"0a0b", b"0a\nanswered\n"])
def test_what_no_answer_is_made_of(notes: bytes) -> None:
    """Nothing was noted, or not whole, or the task answered."""
    assert read_unanswered(notes) == b""


def test_what_an_answer_is_made_of() -> None:
    assert read_unanswered(b"0a0b\n") == read_unanswered(b"0a0b\nans") == b"\x0a\x0b"
