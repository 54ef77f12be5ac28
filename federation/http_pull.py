"""Pull replies over Flower's HTTP grid: no more bytes than a limit, and nothing that Flower's parsers raise on.

Flower's own `pull_messages` takes whatever a reply brings, waits up to two hours for objects that a node never sends, and
raises if one reply cannot be read, which would end the run. What it does is done here with these three bounds. A reply's
object tree, which comes first, has no sizes; those are in the headers of the responses that bring the objects.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Array, Error, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents, pull_objects

from piecework.federation.faults import REFUSED, UNAVAILABLE

if TYPE_CHECKING:  # importing it takes seconds, which only Flower's own engines need to spend
    from flwr.superlink.grid import HttpGrid

ROOM = 2**22  # bytes: the most that a reply may bring besides its arrays, object ids included
OBJECT_ID = 64  # bytes
BOUNDED = ("/v1/runtime/pull-messages", "/v1/runtime/pull-object")
LOG = logging.getLogger("piecework")


class TooLargeError(Exception):
    """A response, or what is made of it, has more bytes than it may have."""


@dataclass
class Meter:
    """The bytes that may still be pulled."""

    left: float
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size: int) -> None:
        """Count bytes. Raises TooLargeError if there is no room for them."""
        with self.lock:
            self.left -= size
            if self.left < 0:
                raise TooLargeError


class HttpPull:
    """Pulls replies from Flower's HTTP grid. It waits at most `seconds` for the objects of one reply."""

    def __init__(self, grid: "HttpGrid", seconds: float) -> None:
        self.grid, self.seconds = grid, seconds
        self.client = grid._runtime_client
        self.meter = Meter(ROOM)
        self.one_by_one = False
        self.client._client.event_hooks["response"].append(self._refuse_large)

    def _refuse_large(self, response: httpx.Response) -> None:
        """Refuse a response by its header, before its body is read: httpx calls this in between."""
        if response.request.url.path in BOUNDED:
            size = int(response.headers.get("content-length", 0))
            if size > self.meter.left:
                raise TooLargeError

    def pull(self, message_ids: Iterable[str], limit: int) -> Iterator[tuple[str, Message | Error]]:
        """Yield (id of the answered message, the reply or why there is none) for the replies that have arrived.

        A reply may bring `limit` bytes.
        """
        wanted = set(message_ids)
        for batch in [{each} for each in wanted] if self.one_by_one else [wanted]:
            self.meter = Meter(ROOM * len(batch))
            try:
                answer = self.client.PullMessages(PullAppMessagesRequest(message_ids=batch))
            except (TooLargeError, ValueError, httpx.HTTPStatusError) as error:
                LOG.warning("a list of replies could not be read (%s): %s", type(error).__name__, error)
                self.one_by_one = True  # the others in this batch are lost; from now on only the bad one is
                if len(batch) == 1:
                    yield batch.pop(), Error(REFUSED, "its reply's list of objects cannot be read, or is too long")
                continue
            for envelope, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                identifier, asked = envelope.metadata.message_id, envelope.metadata.reply_to_message_id
                yield asked, self._reply(identifier, tree, limit)
                self.client.ConfirmMessageReceived(  # the SuperLink deletes its objects
                    ConfirmMessageReceivedRequest(
                        node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=identifier
                    )
                )

    def _reply(self, identifier: str, tree: ObjectTree, limit: int) -> Message | Error:
        try:
            contents = self._objects(tree, limit)
            require_bounded(contents, limit)
            reply = inflate_object_from_contents(identifier, contents)
            if not isinstance(reply, Message):
                raise TypeError(f"it is a {type(reply).__name__}")
        except TooLargeError:
            return Error(REFUSED, f"its reply brings more than the {limit:,} bytes that it may bring")
        except ObjectPullError as error:
            return Error(UNAVAILABLE, f"its reply did not arrive: {error}")
        except Exception as error:  # Flower's parsers raise anything on what a node made up
            return Error(REFUSED, f"its reply cannot be read: {type(error).__name__}: {error}")
        reply.metadata.__dict__["_message_id"] = identifier
        return reply

    def _objects(self, tree: ObjectTree, limit: int) -> dict[str, bytes]:
        """Return the objects of a reply by id. Raises TooLargeError or ObjectPullError."""
        identifiers = [each.object_id for each in iterate_object_tree(tree)]
        meter = self.meter = Meter(limit)
        meter.take(OBJECT_ID * len(identifiers))
        fetch: Callable[[str], bytes] = make_pull_object_fn_protobuf(
            self.client.PullObject, self.grid.node, self.grid.run.run_id
        )
        deadline = time.monotonic() + self.seconds

        def fetch_counted(identifier: str) -> bytes:
            if time.monotonic() > deadline:
                raise ObjectPullError(identifier, f"not all of it came within {self.seconds:g} s")
            content = fetch(identifier)
            meter.take(len(content))
            return content

        return pull_objects(identifiers, fetch_counted, max_time=self.seconds, max_tries_per_object=None)


def require_bounded(contents: Mapping[str, bytes], limit: int) -> None:
    """Raise TooLargeError if arrays, put together, exceed `limit` bytes, or everything else exceeds ROOM.

    An array lists its chunks, and may list one chunk any number of times.
    """
    arrays, others = Meter(limit), Meter(ROOM)
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == "ArrayChunk":
            continue
        others.take(len(content))
        if kind == "Array":
            body: dict[str, Any] = json.loads(get_object_body(content, Array))
            for index in body["arraychunk_ids"]:
                arrays.take(len(contents[children[index]]))
