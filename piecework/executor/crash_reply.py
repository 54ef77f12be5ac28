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
from flwr.common.serde_utils import metadata_from_proto, metadata_to_proto
from flwr.proto.message_pb2 import Metadata
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from piecework.executor.tasks import lone_command

Pull = Callable[[RuntimeHttpClient], tuple[Message, Context, Any, Any]]


def noting(pull: Pull, note: int) -> Pull:
    """Return a `pull_task_input` that also writes to the pipe `note` what an answer to the message needs, and closes it."""

    def pull_and_note(client: RuntimeHttpClient) -> tuple[Message, Context, Any, Any]:
        found = pull(client)
        with os.fdopen(note, "wb") as pipe:
            pipe.write(metadata_to_proto(found[0].metadata).SerializeToString())
        return found

    return pull_and_note


def client_of(words: list[str]) -> RuntimeHttpClient:
    """Return the connection to its SuperNode that a task has which `words` started."""
    parse = lone_command("supernode", "flwr_clientapp")._parse_args_run_flwr_clientapp
    options = parse().parse_args(words[1:])
    return RuntimeHttpClient.from_server_address(
        server_address=options.runtime_api_address,
        insecure=options.insecure,
        root_certificates=validate_and_resolve_root_certificates(options.root_certificates, options.insecure),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(options.token),
        ],
        retry_invoker=make_simple_http_retry_invoker(),
    )


def answer(words: list[str], note: bytes, reason: str) -> None:
    """Answer the message of `note` with an error of this reason, and end its task, which `words` had started."""
    metadata = metadata_from_proto(Metadata.FromString(note))
    message = make_message(metadata, RecordDict(), None)
    reply = Message(Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=reason), reply_to=message)
    context = Context(metadata.run_id, metadata.dst_node_id, {}, RecordDict(), {})
    client = client_of(words)
    try:
        push_message(client, reply, context)
        push_task_output(client, None, SubStatus.FAILED, reason)
    finally:
        client.close()
