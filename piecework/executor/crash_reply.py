"""The answer to the message of a task whose process was killed.

Flower itself notices that after a minute, when the task's heartbeats are missed. The executor knows at once, and answers with
the same error.
"""

import os
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import Metadata
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from piecework.executor.lone_command import lone_command

ANSWERED = b"answered"
TRIES = 5  # of a request: where the SuperNode is gone too nobody waits for an answer


class Notes:
    """What a task writes to a pipe, a line each: the metadata of its message, in hexadecimal, and that it begins to answer."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def of_message(self, pull: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a `pull_task_input` that notes which message there is before it pulls what the message consists of."""

        def pull_and_note(client: Any) -> Any:
            pull_messages = client.PullMessages

            def noted(request: Any) -> Any:
                found = pull_messages(request)
                for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                    metadata = Metadata.FromString(message.metadata.SerializeToString())
                    metadata.message_id = tree.object_id
                    os.write(self.pipe, metadata.SerializeToString().hex().encode() + b"\n")
                return found

            client.PullMessages = noted
            return pull(client)

        return pull_and_note

    def of_answer(self, push: Callable[..., None]) -> Callable[..., None]:
        """Return a `push_message` that notes first that the task answers itself: a second answer would be one too many."""

        def note_and_push(*arguments: Any, **named: Any) -> None:
            os.write(self.pipe, ANSWERED + b"\n")
            push(*arguments, **named)

        return note_and_push


def unanswered(notes: bytes) -> bytes:
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
    if not (known := unanswered(notes)):
        return
    metadata = metadata_from_proto(Metadata.FromString(known))
    message = make_message(metadata, RecordDict(), None)
    reply = Message(Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=reason), reply_to=message)
    context = Context(metadata.run_id, metadata.dst_node_id, {}, RecordDict(), {})
    client = client_of(words)
    try:
        push_message(client, reply, context)
        push_task_output(client, None, SubStatus.FAILED, reason)
    finally:
        client.close()
