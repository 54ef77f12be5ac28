"""Parcels: the arrays of a message in few, larger objects.

Flower sends each array of a message as two objects or more, each of which is announced, stored, pulled and deleted by itself,
which costs far more than the bytes of a small array. So the arrays travel in parcels. A parcel is a Flower array of at most
PARCEL bytes, or of one array that is larger: small enough that it is sent in one piece, and that Flower, which puts a message
together from its objects, holds little of it twice. It holds, one after another, 4 bytes with the length of a list
(little-endian), the list as JSON, with [name, dtype, shape, bytes] of each array, and the arrays as Flower serialises them
(.npy). A parcel of ENOUGH bytes ends with its unit: parts that several clients get are then mostly the same objects, which
Flower keeps once.

Messages have this form on all engines, although only Flower's own processes have objects: so there is one form to read, the
in-process engine's runs test it, and packing takes that engine no longer than pickling a record of single arrays.
"""

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from io import BytesIO
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from flwr.app import Array, ArrayRecord
from pydantic import FailFast, Field, TypeAdapter, ValidationError

from piecework.models.cascade import unit_of

PARCEL = 2**22  # bytes; with its list, a parcel is less than a chunk of Flower's
ENOUGH = 2**21  # bytes
STYPE = "piecework.parcel"
NUMPY = "numpy.ndarray"  # Flower's own serialisation
MOST_LISTED = 2**20  # bytes of the lists of a message
MOST_ARRAYS = 2**14  # of a message
PREFIX = 4  # bytes

Count = Annotated[int, Field(strict=True, ge=0)]


class ParcelError(ValueError):
    """A message's parcels cannot be read. The message says why."""


class Listed(NamedTuple):
    """An array in a parcel's list, as its sender describes it; `size` is its bytes in the parcel."""

    name: Annotated[str, Field(strict=True)]
    dtype: Annotated[str, Field(strict=True)]
    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    size: Count


LIST = TypeAdapter(Annotated[list[Listed], Field(max_length=MOST_ARRAYS), FailFast()])


def pack(arrays: Iterable[tuple[str, Array | np.ndarray]]) -> ArrayRecord:
    """Return named arrays, of which each name occurs once, in parcels.

    Each array is copied once, and is not held any longer when the next one is asked for after its parcel is full.
    """
    parcels, group = ArrayRecord(), list[tuple[str, Array | np.ndarray]]()
    size, unit = 0, ""

    def close() -> None:
        parcels[str(len(parcels))] = _parcel(group)
        group.clear()

    for name, array in arrays:
        more, own = len(array.data) if isinstance(array, Array) else array.nbytes, unit_of(name)
        if group and (size + more > PARCEL or (size >= ENOUGH and own != unit)):
            close()
            size = 0
        group.append((name, array))
        del array
        size, unit = size + more, own
        if size >= PARCEL:
            close()
            size = 0
    if group:
        close()
    return parcels


def _parcel(group: list[tuple[str, Array | np.ndarray]]) -> Array:
    listed, parts = [], list[bytes | memoryview]()
    for name, array in group:
        pieces = (array.data,) if isinstance(array, Array) else _as_npy(array)
        listed.append((name, str(array.dtype), array.shape, sum(memoryview(piece).nbytes for piece in pieces)))
        parts += pieces
    head = json.dumps(listed, separators=(",", ":")).encode()
    data = b"".join((len(head).to_bytes(PREFIX, "little"), head, *parts))
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def _as_npy(array: np.ndarray) -> tuple[bytes, memoryview]:
    """Return the bytes of Flower's `Array(array)` in two parts, not copied. Flower copies an array two to three times."""
    head, array = BytesIO(), np.asarray(array, order="C")
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    return head.getvalue(), array.data


def unpack(parcels: ArrayRecord) -> ArrayRecord:
    """Return the arrays in parcels as they were packed. Nothing is copied: the arrays' bytes are views of their parcels.

    What the arrays hold is not looked at. Raises ParcelError if the parcels are not as `pack` makes them, or have more than
    MOST_ARRAYS arrays, or lists of more than MOST_LISTED bytes.
    """
    found, left = ArrayRecord(), MOST_LISTED
    for parcel in parcels.values():
        listed, begin = _read_list(parcel, left)
        left -= begin - PREFIX
        if len(found) + len(listed) > MOST_ARRAYS:
            raise ParcelError(f"the message has more than {MOST_ARRAYS:,} arrays")
        data = memoryview(parcel.data)
        for name, dtype, shape, size in listed:
            if name in found:
                raise ParcelError(f"array {name!r:.100} is in the message twice")
            found[name] = array = Array(dtype=dtype, shape=shape, stype=NUMPY, data=b"")
            array.data = cast(bytes, data[begin : begin + size])  # Flower only reads it, and takes its length
            begin += size
    return found


def view(array: Array) -> np.ndarray:
    """Return an unpacked array, read-only and not copied; `Array.numpy` copies it twice. Raises ValueError for other bytes."""
    header = _read_header(bytes(array.data[: 10 + int.from_bytes(array.data[8:10], "little")]))
    if header is None:
        return array.numpy()
    shape, in_columns, dtype, begin = header
    if dtype.hasobject or not math.prod(shape):
        return array.numpy()
    values = np.frombuffer(array.data, dtype, math.prod(shape), begin)
    return values.reshape(shape, order="F" if in_columns else "C")


@lru_cache(maxsize=256)
def _read_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int] | None:
    """Return the shape, order and type in a header of version 1, and where the array begins; None of another version.

    numpy reads it as Python, which takes as long as copying 100 kB.
    """
    file = BytesIO(header)
    if np.lib.format.read_magic(file) != (1, 0):
        return None
    return (*np.lib.format.read_array_header_1_0(file), file.tell())


def count_bytes(arrays: ArrayRecord) -> int:
    """Return the bytes of a message's arrays, and of their names, as Flower would count them if they were not packed.

    Parcels that cannot be read count as they are.
    """
    size, left = 0, MOST_LISTED
    try:
        for parcel in arrays.values():
            listed, begin = _read_list(parcel, left)
            left -= begin - PREFIX
            size += len(parcel.data) - begin + sum(len(each.name) for each in listed)
    except ParcelError:
        return arrays.count_bytes()
    return size


def _read_list(parcel: Array, most: int) -> tuple[list[Listed], int]:
    """Return a parcel's list, of at most that many bytes, and where its arrays begin. Raises ParcelError."""
    if parcel.stype != STYPE:
        raise ParcelError(f"an array of the message is {parcel.stype!r:.100}: expected {STYPE!r}")
    begin = PREFIX + int.from_bytes(parcel.data[:PREFIX], "little")
    if begin > len(parcel.data) or begin - PREFIX > most:
        raise ParcelError(f"a parcel's list has {begin - PREFIX:,} bytes: it may have {min(most, len(parcel.data)):,}")
    try:
        listed = LIST.validate_json(bytes(parcel.data[PREFIX:begin]))  # which may be a view
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ParcelError(f"a parcel's list cannot be read: {first['msg']:.200}") from None
    if (size := sum(each.size for each in listed)) != len(parcel.data) - begin:
        raise ParcelError(f"a parcel's list has arrays of {size:,} bytes, the parcel has {len(parcel.data) - begin:,}")
    return listed, begin
