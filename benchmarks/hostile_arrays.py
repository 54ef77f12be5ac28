"""How `benchmarks.hostile` spoils the arrays of an answer: what they hold, and how they are packed."""

import json
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from hypothesis import strategies as st

from piecework.training.parcels import PREFIX, unpack

NESTED = ["[" * 100_000, '{"a":' * 50_000, "9" * 5000, "[7]", "[[]]", "null", '[{"atoms":[0]}]']
WORDS = st.sampled_from(NESTED) | st.text(max_size=20)
# The ways to change an array.
WAYS = ["nan", "inf", "large", "zero", "negative", "type", "shape", "words", "header", "cut", "pickle", "name", "gone"]
WAYS += ["more"]
ARRAYS = st.sampled_from(WAYS)
SIZES: st.SearchStrategy[Any] = st.sampled_from([0, 1, -1, 64, 127, 128, 2**31, 2**63, 10**30, True, None, 1.5, "1"])
LISTED: st.SearchStrategy[Any] = st.one_of(
    st.tuples(st.just("size"), SIZES),  # of one array, so that it ends beyond the parcel, or in another array
    st.tuples(st.just("shift"), SIZES),  # as much of the next one's, so that the sum is right
    st.tuples(st.just("dtype"), WORDS | SIZES),
    st.tuples(st.just("shape"), st.lists(SIZES, max_size=3) | SIZES),
    st.tuples(st.just("name"), WORDS | SIZES),
    st.tuples(st.just("order"), st.none()),
    st.tuples(st.just("twice"), st.none()),
    st.tuples(st.just("fields"), SIZES),
)
PARCELS: st.SearchStrategy[Any] = st.one_of(
    LISTED,
    st.tuples(st.just("list"), st.sampled_from([*NESTED, "[]", "{}", "[0]", "\ud800"]) | st.text(max_size=20)),
    st.tuples(st.just("prefix"), st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**20, 2**32 - 1])),
    st.tuples(st.just("data"), st.binary(max_size=20)),
    st.tuples(st.just("cut"), st.integers(0, 2000)),
    st.tuples(st.just("padded"), st.integers(1, 2000)),
    st.tuples(st.just("stype"), WORDS),
    st.tuples(st.just("again"), st.none()),
    st.tuples(st.just("plain"), st.none()),
)
SPOILT = {"nan": np.nan, "inf": np.inf, "large": 3e38, "negative": -1.0}


def changed_array(array: Array, kind: str) -> Array:
    """Return an array as a client may send it that means harm."""
    data = array.numpy()
    if kind in SPOILT:
        data = data.copy()
        data.reshape(-1)[:1] = np.array(SPOILT[kind] if data.dtype.kind == "f" else -1).astype(data.dtype)
        return Array(data)
    if kind == "zero":
        return Array(np.zeros_like(data))
    if kind == "type":
        return Array(data.astype(np.float64))
    if kind == "shape":
        return Array(data[None])
    if kind == "words":
        return Array(np.array(["a", "b"]))
    if kind == "header":
        return Array(array.dtype, (2**40, 2**40), array.stype, bytes(array.data[:64]))
    return Array(array.dtype, array.shape, array.stype, bytes(array.data[:-3]) if kind == "cut" else b"\x80\x04K\x01.")


def change_arrays(arrays: ArrayRecord, number: int, kind: str) -> None:
    """Change one array of a record in place; the number says which."""
    names = list(arrays)
    name = names[number % len(names)] if names else "atoms.0.conv.weight"
    if kind == "more" or not names:
        arrays[f"{name}.more"] = Array(np.zeros(3, np.float32))
    elif kind == "name":
        arrays[name + "\x1b[2A"] = arrays.pop(name)
    elif kind == "gone":
        del arrays[name]
    else:
        arrays[name] = changed_array(arrays[name], kind)


def change_parcels(parcels: ArrayRecord, number: int, drawn: tuple[str, Any]) -> None:
    """Change how arrays are packed, in place; the number says which array."""
    kind, value = drawn
    key = next(iter(parcels), "0")
    if kind == "plain":
        arrays = unpack(parcels)
        parcels.clear()
        parcels.update(arrays)
    elif kind == "again":
        parcels["again"] = parcels[key]
    elif kind == "stype":
        parcels[key] = Array("uint8", parcels[key].shape, value, parcels[key].data)
    else:
        data = changed_parcel(parcels[key].data, number, kind, value)
        parcels[key] = Array("uint8", (len(data),), parcels[key].stype, data)


def changed_parcel(data: bytes, number: int, kind: str, value: Any) -> bytes:
    """Return a parcel as a client may send it that means harm."""
    begin = PREFIX + int.from_bytes(data[:PREFIX], "little")
    if kind in ("data", "cut", "padded"):
        return {"data": lambda: value, "cut": lambda: data[:-value], "padded": lambda: data + bytes(value)}[kind]()
    if kind == "prefix":
        return int(value).to_bytes(PREFIX, "little") + data[PREFIX:]
    head = value.encode(errors="surrogatepass") if kind == "list" else b""
    if kind != "list":
        listed = json.loads(data[PREFIX:begin])
        change_list(listed, number % len(listed), kind, value)
        head = json.dumps(listed).encode()
    return len(head).to_bytes(PREFIX, "little") + head + data[begin:]


def change_list(listed: list[Any], number: int, kind: str, value: Any) -> None:
    """Change an entry of a parcel's list, in place."""
    entry, other = listed[number], listed[(number + 1) % len(listed)]
    if kind == "shift":
        entry[3], other[3] = entry[3] + value, other[3] - value
    elif kind == "order":
        listed.reverse()
    elif kind == "twice":
        listed.append(entry)
    elif kind == "fields":
        entry.append(value)
    else:
        entry[("name", "dtype", "shape", "size").index(kind)] = value
