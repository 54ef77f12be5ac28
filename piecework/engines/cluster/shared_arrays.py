"""Arrays of messages as objects that Ray brings to each node once, whatever number of clients gets them.

A message is taken apart: what remains is small, and names each larger array by its place in a list of references. Arrays of
equal bytes are one object. Nodes map objects, so that nothing is copied there before the client's store writes it.
"""

import hashlib
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import ray
from flwr.app import Array, Message

SMALL = 2**16  # bytes; smaller arrays stay in their message


class Apart(NamedTuple):
    """A message without its larger arrays: `rest` is its pickle, `places` are (record, array) of each array, in order."""

    rest: bytes
    places: tuple[tuple[str, str], ...]


def take_apart(message: Message) -> tuple[Apart, list[memoryview]]:
    """Take the larger arrays out of a message; return the rest, and their bytes. The message keeps none of them.

    An error has no content, and nothing is taken out of it.
    """
    places, buffers = [], []
    for key, record in message.content.array_records.items() if message.has_content() else ():
        for name, array in record.items():
            if len(array.data) >= SMALL:
                places.append((key, name))
                buffers.append(memoryview(array.data))
                record[name] = Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=b"")
    return Apart(pickle.dumps(message, protocol=5), tuple(places)), buffers


def put_together(apart: Apart, buffers: list[Any], *, copied: bool) -> Message:
    """Return a message with its arrays again: views of the buffers (uint8), or `copied`."""
    message: Message = pickle.loads(apart.rest)  # noqa: S301 (written by this program, never from a network)
    for (key, name), buffer in zip(apart.places, buffers, strict=True):
        data = memoryview(buffer)
        message.content.array_records[key][name].data = data.tobytes() if copied else cast(bytes, data)
    return message


def as_arrays(buffers: list[memoryview]) -> list[np.ndarray]:
    """Return buffers as arrays of bytes, not copied, which Ray writes once to where they are shared."""
    return [np.frombuffer(buffer, np.uint8) for buffer in buffers]


@dataclass
class Held:
    """An object, how many unanswered messages have it, and whether more than one had it."""

    reference: Any
    messages: int = 0
    shared: bool = False


class SharedArrays:
    """The objects of the messages that are not answered yet, by digest.

    One that several messages had is kept until `forget`, because the next message is likely to have it too; one of a single
    message goes with it.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, Held] = {}
        self._last: dict[int, tuple[bytes, bytes]] = {}  # the last message's bytes by identity, with their digests

    def put(self, buffers: list[memoryview]) -> list[bytes]:
        """Put those buffers into Ray's store that are not there yet; return the digest of each."""
        digests, last, self._last = [], self._last, {}
        for buffer in buffers:
            whole = buffer.obj if isinstance(buffer.obj, bytes) and buffer.nbytes == len(buffer.obj) else None
            known, digest = last.get(id(whole), (None, b""))
            if known is None:  # the next client often gets the same objects, of which one hash is enough
                digest = hashlib.blake2b(buffer, digest_size=16).digest()
            if whole is not None:
                self._last[id(whole)] = whole, digest
            if (held := self._held.get(digest)) is None:
                held = self._held[digest] = Held(ray.put(np.frombuffer(buffer, np.uint8)))
            held.shared |= held.messages > 0
            held.messages += 1
            digests.append(digest)
        return digests

    def references(self, digests: list[bytes]) -> list[Any]:
        """Return Ray's references of objects."""
        return [self._held[digest].reference for digest in digests]

    def release(self, digests: list[bytes]) -> None:
        """Note that a message with these objects is answered."""
        for digest in digests:
            held = self._held[digest]
            held.messages -= 1
            if not held.messages and not held.shared:
                del self._held[digest]

    def forget(self) -> None:
        """Drop what no unanswered message has."""
        self._held = {digest: held for digest, held in self._held.items() if held.messages}
        self._last.clear()

    def __len__(self) -> int:
        return len(self._held)
