"""Draw how data from elsewhere is spoilt: values as JSON and TOML have them, and bytes. All draws come from a `Random`."""

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.hostile import EXTREMES, ITEMS, LIMITS, SHOWN

DEEP = 60  # levels: more than the project's readers take
SCALARS: list[Any] = [
    *EXTREMES,
    *LIMITS,
    *SHOWN,
    *ITEMS,
    None,
    True,
    False,
    10**400,
    0.1,
    2,
    7,
    "x" * 100_000,
    "\0",
    "../x",
    "\ud800",
]
SPLICED = [
    b"\xff",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"NaN",
    b"1e999",
    b'"',
    b"{",
    b"[",
    b"]",
    b"}",
    b"\n",
    b"\r",
    b",",
    b"=",
    b"-",
]


def any_value(drawn: Random) -> Any:
    """Return a value of any type."""
    kind = drawn.randrange(8)
    if kind == 0:
        return [drawn.choice(SCALARS) for _ in range(drawn.randrange(4))]
    if kind == 1:
        return {
            drawn.choice(["a", "", "atoms", "round", "name"]): drawn.choice(SCALARS) for _ in range(drawn.randrange(3))
        }
    if kind == 2:
        value: Any = 0
        for _ in range(DEEP):
            value = [value] if drawn.random() < 0.5 else {"a": value}
        return value
    return drawn.choice(SCALARS)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values within a value, of which the first is empty: itself."""
    found = [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inner:
        found += places(held, (*path, key))
    return found


def spoil_value(value: Any, drawn: Random) -> Any:
    """Return a value of JSON or TOML, changed in one place: another value, or a key that is gone, new, or another."""
    path = drawn.choice(places(value))
    if not path:
        return any_value(drawn)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, old = path[-1], holder[path[-1]]
    kind = drawn.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[f"{key}{drawn.choice(['s', '-', '.', ' '])}"] = holder.pop(key)
    elif kind == 1:
        holder.append(old)
    elif kind == 2 and isinstance(holder, dict):
        holder[drawn.choice(["new", "", "a.b", "\n", "__class__"])] = any_value(drawn)
    elif kind == 3 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = drawn.choice(
            [-old, old + 1, old * 1000, str(old), old / 3, [old], float(old) if abs(old) < 10**300 else 0]
        )
    elif kind == 4 and isinstance(old, str):
        holder[key] = drawn.choice([old + "x", old[:-1], old.upper(), [old], {old: 1}, old * 1000, "\x1b" + old])
    else:
        holder[key] = any_value(drawn)
    return value


def spoil_bytes(data: bytes, drawn: Random) -> bytes:
    """Return bytes that are cut, flipped, spliced, doubled or taken out in one or a few places."""
    kind, at = drawn.randrange(7), drawn.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + drawn.choice(SPLICED) * drawn.choice([1, 1, 2, 1000, 100_000]) + data[at:]
    if kind == 2:
        return data[:at] + data[at + drawn.choice([1, 2, 8, 100]) :]
    if kind == 3:
        end = at + drawn.randrange(200)
        return data[:end] + data[at:end] + data[end:]
    if kind == 4:
        return bytes(drawn.randrange(256) for _ in range(drawn.randrange(100)))
    if kind == 5 and data:  # text in another encoding
        return data.decode("latin-1").encode(drawn.choice(["utf-16", "utf-32", "utf-8-sig"]))
    changed = bytearray(data)
    for _ in range(drawn.choice([1, 1, 4, 20])):
        if changed:
            changed[drawn.randrange(len(changed))] = drawn.randrange(256)
    return bytes(changed)


def as_json(value: Any, drawn: Random) -> str:
    """Return JSON, or nearly: with NaN, and now and then with a key twice."""
    text = json.dumps(value, default=str)
    if drawn.random() < 0.1 and text.startswith("{") and len(text) > 2:
        inner = text[1:-1]
        text = f"{{{inner},{inner}}}"
    return text


def kept(value: Any, wanted: Callable[[Any], bool]) -> Any:
    """Return a value of JSON without those parts that are not `wanted`; None in a list, and nothing in a table."""
    if isinstance(value, dict):
        return {str(key): kept(held, wanted) for key, held in value.items() if wanted(held)}
    if isinstance(value, list):
        return [kept(held, wanted) for held in value if wanted(held)]
    return value


def is_toml(value: Any) -> bool:
    """Return whether TOML can say a value: it has no null, and no whole number beyond 64 bits that readers agree on."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))
