"""What a reply may bring, and in whose name: on Flower's HTTP client with a SuperLink of our own behind it, and in process."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.runtime import RuntimeHttpClient

from piecework.federation.faults import REFUSED, UNAVAILABLE, status_of
from piecework.federation.registry import ClientRegistry
from piecework.federation.reply_guard import ROOM, SUPERLINK, ReplyGuard, array_bytes, reply_limit
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import SERVER, identify
from piecework.training.parcels import pack, unpack
from piecework.training.settings.shared import MemorySettings

CHUNK = 5 * 2**20  # the bytes in which Flower sends arrays


class Unread(httpx.SyncByteStream):
    """The body of a response; `read` says whether somebody began to read it."""

    def __init__(self, content: bytes) -> None:
        self.content, self.read = content, False

    def __iter__(self) -> Iterator[bytes]:
        self.read = True
        yield self.content


class Link(LocalGrid):
    """Stands for Flower's HTTP grid: its own client, and behind that a SuperLink that holds what nodes have sent."""

    def __init__(self) -> None:
        super().__init__(3, {})
        self.node, self.objects, self.bodies = Node(node_id=SERVER), dict[str, bytes](), dict[str, Unread]()
        self.replies: list[tuple[Message, Any]] = []
        self.sent: list[Message] = []
        self.confirmed = 0
        self.client = RuntimeHttpClient("http://superlink")
        self.client._client = httpx.Client(transport=httpx.MockTransport(self.serve))

    @property
    def _runtime_client(self) -> RuntimeHttpClient:
        return self.client

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self.sent.append(message)
        return [message.metadata.message_id for message in self.sent]

    def hold(self, task: Message, reply: Message, objects: dict[str, bytes] | None = None) -> None:
        """Take in a reply to a task. Flower checks its envelope, which is therefore honest, and not what it says inside."""
        found = get_all_nested_objects(reply)
        self.objects |= {each: held.deflate() for each, held in found.items()} if objects is None else objects
        envelope = remove_content_from_message(Message(RecordDict(), reply_to=task))
        envelope.metadata.__dict__["_message_id"] = reply.object_id
        self.replies.append((envelope, get_object_tree(reply)))

    def serve(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("pull-messages"):
            wanted = PullAppMessagesRequest.FromString(request.content).message_ids
            due = [(e, tree) for e, tree in self.replies if e.metadata.reply_to_message_id in wanted]
            self.replies = [each for each in self.replies if each not in due]
            content = PullAppMessagesResponse(
                messages_list=[message_to_proto(e) for e, _ in due], message_object_trees=[tree for _, tree in due]
            ).SerializeToString()
            name = "list"
        elif request.url.path.endswith("pull-object"):
            name = PullObjectRequest.FromString(request.content).object_id
            held = self.objects.get(name, b"")
            content = PullObjectResponse(
                object_found=True, object_available=held != b"", object_content=held
            ).SerializeToString()
        else:
            self.confirmed += 1
            return httpx.Response(200, content=ConfirmMessageReceivedResponse().SerializeToString())
        self.bodies[name] = Unread(content)
        return httpx.Response(200, headers={"content-length": str(len(content))}, stream=self.bodies[name])


class Asked(SimpleNamespace):
    link: Link
    guard: ReplyGuard
    tasks: list[Message]

    def pull(self) -> dict[int, Message]:
        """What has arrived, by node."""
        replies = list(self.guard.pull_messages([task.metadata.message_id for task in self.tasks]))
        assert all(r.metadata.src_node_id - 2 == self.of(r) for r in replies)
        return {reply.metadata.src_node_id: reply for reply in replies}

    def of(self, reply: Message) -> int:
        return [task.metadata.message_id for task in self.tasks].index(reply.metadata.reply_to_message_id)


@pytest.fixture
def asked() -> Asked:
    return ask(60.0)


def ask(seconds: float) -> Asked:
    """Nodes 2, 3 and 4 were each sent the same task; their replies may bring 12 MB, and take some seconds."""
    identify(SERVER)
    link = Link()
    guard = ReplyGuard(link, 12_000_000, seconds)
    tasks = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in (2, 3, 4)]
    guard.push_messages(tasks)
    return Asked(link=link, guard=guard, tasks=tasks)


def content(*arrays: np.ndarray, **words: str) -> RecordDict:
    named = ArrayRecord({str(i): Array(array) for i, array in enumerate(arrays)})
    return RecordDict({"arrays": named, "words": ConfigRecord(words)})


def noise(size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


def test_honest_replies_come_through_whole(asked: Asked) -> None:
    sent = [content(noise(11_000_000 + i), a="b") for i in range(2)]
    for task, each in zip(asked.tasks, sent, strict=False):
        asked.link.hold(task, Message(each, reply_to=task))
    found = asked.pull()
    assert {node: reply.content for node, reply in found.items()} == {2: sent[0], 3: sent[1]}
    assert asked.link.confirmed == 2
    assert asked.pull() == {}


def test_parcels_are_pulled_in_pieces(asked: Asked) -> None:
    """An array larger than a parcel, and ten small ones in one: no piece is larger than Flower's, and all of it arrives."""
    arrays = {"atoms.0.w": noise(7_000_000)} | {f"atoms.{n}.w": noise(10_000 + n) for n in range(1, 11)}
    asked.link.hold(asked.tasks[0], Message(RecordDict({"arrays": pack(arrays.items())}), reply_to=asked.tasks[0]))
    assert sorted(len(content) // 2**20 for content in asked.link.objects.values()) == [0] * 6 + [1, 5]
    found = unpack(asked.pull()[2].content.array_records["arrays"])
    assert {name: array.numpy().tobytes() for name, array in found.items()} == {
        n: a.tobytes() for n, a in arrays.items()
    }


def test_what_is_too_large_is_not_read(asked: Asked) -> None:
    """A single object by its header; many objects as soon as they add up; and a list of objects that is itself too long."""
    one, other, third = asked.tasks
    whole = Message(content(noise(3)), reply_to=one)
    (chunk,) = [each for each, held in get_all_nested_objects(whole).items() if type(held).__name__ == "ArrayChunk"]
    asked.link.hold(one, whole)
    asked.link.objects[chunk] = bytes(12_000_001)
    asked.link.hold(other, Message(content(noise(6 * CHUNK)), reply_to=other))
    asked.link.hold(third, Message(content(a="fine"), reply_to=third))
    found = asked.pull()
    reason = "its reply brings more than the 12,000,000 bytes that it may bring"
    assert [(found[n].error.code, found[n].error.reason) for n in (2, 3)] == [(REFUSED, reason)] * 2
    assert status_of(found[2].error) == "rejected"
    assert found[4].content["words"]["a"] == "fine"
    assert not asked.link.bodies[chunk].read
    large = [body for body in asked.link.bodies.values() if len(body.content) > CHUNK]
    assert sum(body.read for body in large) <= 4  # two fit; two more may be on their way when they are counted
    assert asked.link.confirmed == 3  # so that the SuperLink keeps none of it


def test_an_array_that_repeats_a_chunk_is_not_put_together(asked: Asked) -> None:
    task = asked.tasks[0]
    reply = Message(content(noise(1_000_000)), reply_to=task)
    objects = {each: held.deflate() for each, held in get_all_nested_objects(reply).items()}
    (array,) = [held for held in get_all_nested_objects(reply).values() if isinstance(held, Array)]
    plain = objects[array.object_id]
    body = plain.partition(b"\x00")[2].replace(b"[0]", b"[0" + b",0" * 12 + b"]")
    assert plain.count(b"[0]") == 1
    asked.link.hold(task, reply, objects | {array.object_id: add_header_to_object_body(body, array)})
    assert asked.pull()[2].error.reason.startswith("its reply brings more than")


@pytest.mark.parametrize(
    "made_up",
    [
        b"ConfigRecord,,0\x00",
        b"Message,,9\x00\xff\xff\xff\xff",
        b"Nothing  0\x00",
        b"Message  1000000\x00",
        b"\xff\xff\x00",
    ],
)
def test_what_cannot_be_read_is_refused_and_the_others_count(asked: Asked, made_up: bytes) -> None:
    for task in asked.tasks[:2]:
        asked.link.hold(task, Message(content(a="b"), reply_to=task))
    bad = asked.link.replies[0][0].metadata.message_id
    asked.link.objects[bad] = made_up
    found = asked.pull()
    assert found[2].error.code == REFUSED
    assert found[2].error.reason.startswith("its reply cannot be read: ")
    assert found[3].has_content()


def test_objects_that_never_come_are_not_waited_for() -> None:
    """For longer than a round: here, 0 s."""
    asked = ask(0.0)
    task = asked.tasks[0]
    asked.link.hold(task, Message(content(a="b"), reply_to=task), {})
    assert asked.pull()[2].error.code == UNAVAILABLE


def test_a_list_of_objects_that_is_too_long_hurts_its_sender_alone(asked: Asked) -> None:
    for again in range(2):
        one, other = asked.tasks[:2]
        asked.link.hold(one, Message(content(a="b"), reply_to=one))
        envelope, _ = asked.link.replies[0]
        envelope.metadata.group_id = "x" * (3 * ROOM)
        asked.link.hold(other, Message(content(a="b"), reply_to=other))
        found = asked.pull()
        if not again:
            assert found == {}  # the first time the others in the list are lost with it
    assert (found[2].error.code, found[3].has_content()) == (REFUSED, True)
    assert found[2].error.reason == "its reply's list of objects cannot be read, or is too long"


def test_a_reply_in_the_name_of_another_node_is_refused(asked: Asked) -> None:
    """Flower looks at the envelope, which names the sender, and hands over what is inside, which names node 3."""
    one, other = asked.tasks[:2]
    asked.link.hold(one, Message(content(a="a lie"), reply_to=other))
    asked.link.hold(other, Message(content(a="the truth"), reply_to=other))
    found = asked.pull()
    assert (found[2].error.code, found[2].error.reason) == (
        REFUSED,
        "its reply is made out in the name of another node, 3",
    )
    assert found[3].content["words"]["a"] == "the truth"


def test_what_the_superlink_reports_of_a_node_is_of_that_node(asked: Asked) -> None:
    """Flower writes it in its own name: until now nobody took it in, and the client was waited for."""
    task = asked.tasks[0]
    report = Message(Error(5, "it is offline"), reply_to=task)
    report.metadata.__dict__["_src_node_id"] = SUPERLINK
    asked.link.hold(task, report)
    found = asked.pull()[2]
    assert (found.metadata.src_node_id, status_of(found.error)) == (2, "gone")


def test_nobody_can_guess_which_message_another_node_was_sent(asked: Asked) -> None:
    """Its identifier is the hash of its content, which was the same for all."""
    nonces = {str(message.content["nonce"]["nonce"]) for message in asked.link.sent}
    assert sorted(map(len, nonces)) == [32, 32, 32]
    assert get_object_id(asked.link.sent[0].content.deflate()) != get_object_id(asked.link.sent[1].content.deflate())


def test_in_process_too_a_reply_is_checked() -> None:
    """And of an answer to the registry's query the record says why it could not be used."""

    class Talks(LocalGrid):
        sent: Message

        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            (self.sent,) = messages
            self.sent.metadata.__dict__["_message_id"] = "1"
            return ["1"]

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            return [Message(content(noise(1000)), reply_to=self.sent)]

    registry = ClientRegistry(SimpleNamespace(), 0, 1, MemorySettings())  # type: ignore[arg-type]
    registry.update(ReplyGuard(Talks(1, {}), 1000, 1.0))
    size = array_bytes(content(noise(1000)))
    assert size > 1000
    (refused,) = registry.unusable()
    assert (
        refused["reason"] == f"ValueError: error 400: its reply brings {size:,} bytes, of the 1,000 that it may bring"
    )


def test_the_limit_is_of_the_model() -> None:
    assert reply_limit(100, 300) == 600 + ROOM
    assert reply_limit(1000, 300) == 1000 + ROOM
