"""A SuperNode's own API is told at once that the process of a task was killed, and answers the task's message."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from flwr.app import Context, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeState, NodeStateFactory
from flwr.supernode.runtime import run_clientapp
from flwr.supernode.start_client_internal import _insert_message

from piecework.executor.crash_reply import Notes, answer, client_of, unanswered

NODE, RUN = 7, 5


class Served:
    """The API of a SuperNode that has a message for its client, and the task that a client gets for it."""

    def __init__(self) -> None:
        store = ObjectStoreFactory()
        factory = NodeStateFactory(store)
        self.state: NodeState = factory.state()
        self.state.set_node_id(NODE)
        run = Run.create_empty(RUN)
        run.fab_hash = self.state.store_fab(Fab("", b"", {}))
        self.state.store_run(run)
        self.state.set_run_series_context(run.series_id, Context(RUN, NODE, {}, RecordDict(), {}))
        self.task = self.state.create_task(TaskType.CLIENT_APP, RUN, run.fab_hash) or pytest.fail()
        message = make_message(Metadata(RUN, "", 1, NODE, "", "1", time.time(), 60.0, "train"), RecordDict(), None)
        _insert_message(message, self.state, store.store())
        self.message_id = message.metadata.message_id
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


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    thread = threading.Thread(target=found.server.run)
    thread.start()
    while not found.server.started:
        thread.join(0.01)
        assert thread.is_alive()
    yield found
    found.server.should_exit = True
    thread.join()


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
    notes, reader = pulled(served)
    pushed = list[str]()
    notes.of_answer(lambda *words: pushed.extend(words))("a reply")
    answer(served.words(), os.read(reader, 2**16), "killed by signal 9 (Killed)")
    assert pushed == ["a reply"]
    assert served.state.get_messages_legacy(is_reply=True) == []


def test_a_message_that_could_not_be_pulled_whole_is_answered_too(served: Served) -> None:
    """Its process ran out of memory over it."""
    reader, writer = os.pipe()
    client = client_of(served.words())

    def pull_object(*_: Any) -> None:
        raise MemoryError

    client.PullObject = pull_object  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        Notes(writer).of_message(run_clientapp.pull_task_input)(client)
    client.close()
    answer(served.words(), os.read(reader, 2**16), "killed by signal 9 (Killed)")
    (reply,) = served.state.get_messages_legacy(is_reply=True)
    assert reply.metadata.reply_to_message_id == served.message_id


@pytest.mark.parametrize("notes", [b"", b"0a0b", b"0a\nanswered\n"])
def test_what_no_answer_is_made_of(notes: bytes) -> None:
    """Nothing was noted, or not whole, or the task answered."""
    assert unanswered(notes) == b""


def test_what_an_answer_is_made_of() -> None:
    assert unanswered(b"0a0b\n") == unanswered(b"0a0b\nans") == b"\x0a\x0b"
