"""The answer to the message of a task that could not give one: it was killed, or ended beside its app.

That a process was killed Flower itself notices after a minute, when the task's heartbeats are missed. The executor knows at
once, and answers with the same error. A task that ends by itself Flower takes for finished. If it was told to end, or could not
pull its message or make its reply because a large request for memory was refused, nobody would answer, and its round would wait
for it: here such a task answers with an error before it ends.
"""

import os
from collections.abc import Callable
from logging import WARNING
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import Metadata
from flwr.supercore import log
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output
from httpx import HTTPError

from piecework.executor.lone_command import lone_command

ANSWERED = b"answered"
TRIES = 5  # of a request: where the SuperNode is gone too nobody waits for an answer


class Notes:
    """What a task writes to a pipe, a line each: the metadata of its message, in hexadecimal, and that it begins to answer.

    `metadata` is that of its message, `answered` whether it has begun to answer: a second answer would be one too many.
    `failure` is what it says if it ends before that.
    """

    def __init__(self, pipe: int) -> None:
        self.pipe, self.metadata, self.answered = pipe, b"", False
        self.failure = Error(ErrorCode.MESSAGE_UNAVAILABLE, "the task was ended before it answered")

    def of_message(self, pull: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a `pull_task_input` that notes which message there is before it pulls what the message consists of.

        From then on its connection notes the answer.
        """

        def pull_and_note(client: Any) -> Any:
            pull_messages, push_messages = client.PullMessages, client.PushMessages

            def pull_and_note_messages(request: Any) -> Any:
                found = pull_messages(request)
                for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                    metadata = Metadata.FromString(message.metadata.SerializeToString())
                    metadata.message_id = tree.object_id
                    self.metadata = metadata.SerializeToString()
                    os.write(self.pipe, self.metadata.hex().encode() + b"\n")
                return found

            def answering(request: Any) -> Any:
                self.answered = True
                os.write(self.pipe, ANSWERED + b"\n")
                return push_messages(request)

            client.PullMessages, client.PushMessages = pull_and_note_messages, answering
            return self.of_failure("its message was pulled", pull)(client)

        return pull_and_note

    def of_failure(self, doing: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the work, and notes why it failed, and what the task was `doing`."""

        def done(*arguments: Any, **named: Any) -> Any:
            try:
                return work(*arguments, **named)
            except Exception as error:
                self.failure = failure(error, doing)
                raise

        return done

    def of_end(self, push: Callable[..., None]) -> Callable[..., None]:
        """Return a `push_task_output` that answers the task's message first, with an error, if nothing has answered it."""

        def answer_and_push(client: Any, *arguments: Any, **named: Any) -> None:
            if self.metadata and not self.answered:
                try:
                    push_error(client, self.metadata, self.failure)
                except HTTPError as error:
                    log(WARNING, "the task's message stays unanswered: %s", error)
            push(client, *arguments, **named)

        return answer_and_push


def failure(error: Exception, doing: str) -> Error:
    """Return the error of a task that failed beside its app. Without memory it is the one of a process that was killed."""
    why = f"while {doing} ({error!r})"
    if isinstance(error, MemoryError):
        return Error(ErrorCode.CLIENT_APP_CRASHED, f"the task ran out of memory {why}")
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"the task failed {why}")


def read_unanswered(notes: bytes) -> bytes:
    """Return the metadata of the message that a task had and had not begun to answer; empty if there is none."""
    *lines, _ = notes.split(b"\n")  # what follows the last end of a line was not written whole
    return bytes.fromhex(lines[0].decode()) if len(lines) == 1 else b""


def client_of(words: list[str]) -> RuntimeHttpClient:
    """Return a connection to its SuperNode as a task has it which `words` started, which does not try for ever."""
    parse = lone_command("supernode", "flwr_clientapp")._parse_args_run_flwr_clientapp
    options = parse().parse_args(words[1:])
    retry_invoker = make_simple_http_retry_invoker()
    retry_invoker.max_tries = TRIES
    return RuntimeHttpClient.from_server_address(
        server_address=options.runtime_api_address,
        insecure=options.insecure,
        root_certificates=validate_and_resolve_root_certificates(options.root_certificates, options.insecure),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(options.token),
        ],
        retry_invoker=retry_invoker,
    )


def answer(words: list[str], notes: bytes, reason: str) -> None:
    """Answer the message of a task's notes with an error of this reason, and end the task, which `words` had started.

    One that it had begun to answer itself is left to Flower.
    """
    if not (known := read_unanswered(notes)):
        return
    client = client_of(words)
    try:
        push_error(client, known, Error(ErrorCode.CLIENT_APP_CRASHED, reason))
        push_task_output(client, None, SubStatus.FAILED, reason)
    finally:
        client.close()


def push_error(client: RuntimeHttpClient, known: bytes, error: Error) -> None:
    """Answer the message that has this metadata with an error."""
    metadata = metadata_from_proto(Metadata.FromString(known))
    message = make_message(metadata, RecordDict(), None)
    context = Context(metadata.run_id, metadata.dst_node_id, {}, RecordDict(), {})
    push_message(client, Message(error, reply_to=message), context)
