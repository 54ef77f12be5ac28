"""How files of each format are spoilt: their bytes, or a value within them that is then written again."""

import io
import json
import tomllib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import tomli_w

from benchmarks.mutations import any_value, as_json, is_toml, kept, spoil_bytes, spoil_value

NAMES = ("x_train", "y_train", "x_test", "y_test", "group_train", "x", "../x", "")
LENGTH = 8  # bytes of the length of a safetensors header


def toml(data: bytes, drawn: Random) -> bytes:
    """Return TOML with another value; a value that TOML cannot say is left out."""
    return tomli_w.dumps(kept(spoil_value(tomllib.loads(data.decode()), drawn), is_toml)).encode()


def js(data: bytes, drawn: Random) -> bytes:
    """Return JSON with another value."""
    return as_json(spoil_value(json.loads(data), drawn), drawn).encode(errors="surrogatepass")


def json_lines(data: bytes, drawn: Random) -> bytes:
    """Return lines of JSON of which one has another value, or which stand in another order."""
    lines = data.splitlines()
    at = drawn.randrange(len(lines))
    if drawn.random() < 0.1:
        drawn.shuffle(lines)
    elif drawn.random() < 0.1:
        lines.insert(at, lines[drawn.randrange(len(lines))])
    else:
        lines[at] = js(lines[at], drawn)
    return b"\n".join(lines) + b"\n"


def npy(data: bytes, drawn: Random) -> bytes:
    """Return an array with another header: of another type, shape or order than the bytes behind it."""
    old = data[10 : 10 + int.from_bytes(data[8:10], "little")].decode("latin-1")
    spoilt: list[tuple[str, str]] = [
        ("'descr': '", f"'descr': '{drawn.choice(['<f8', '|O', '|V9', 'x', '<U5', '<M8[s]', '>f4'])}' #"),
        ("'fortran_order': False", f"'fortran_order': {drawn.choice(['True', '1', 'None', '[', '__import__'])}"),
        ("(", drawn.choice(["(99999999999,", "(-1,", "(0,", "((", "(1e9,", "(True,", "(" * 200])),
        ("'shape'", "'shapes'"),
    ]
    new = old.replace(*drawn.choice(spoilt), 1)
    return data[:8] + len(new).to_bytes(2, "little") + new.encode("latin-1") + data[10 + len(old) :]


def npz(data: bytes, drawn: Random) -> bytes:
    """Return an archive of arrays of which one is gone, another, or of another type, shape or name."""
    arrays: dict[str, Any] = dict(np.load(io.BytesIO(data)))
    name = drawn.choice(list(arrays))
    found = arrays[name]
    changes: list[Callable[[], Any]] = [
        lambda: found.astype(drawn.choice([np.float64, np.int8, np.uint16, np.complex64, bool, np.float16, "U5"])),
        lambda: found[None],
        lambda: found[: drawn.randrange(3)],
        lambda: found.reshape(-1),
        lambda: found[::-1] * -1.0,
        lambda: np.where(np.arange(found.size).reshape(found.shape) == 3, drawn.choice([np.nan, np.inf, 1e300, -5]), found),
        lambda: np.zeros(drawn.choice([(), (0,), (3, 0, 4), (2, 2, 2, 2, 2, 2)]), found.dtype),
        lambda: found.astype(np.int64) + drawn.choice([2**62, 10**6, 300]),
        lambda: np.array(["a", "b"]),
    ]  # fmt: skip
    if (kind := drawn.randrange(12)) == 0:
        del arrays[name]
    elif kind == 1:
        arrays[drawn.choice(NAMES)] = arrays.pop(name)
    else:
        arrays[name] = drawn.choice(changes)()
    file = io.BytesIO()
    (np.savez_compressed if drawn.random() < 0.3 else np.savez)(file, **arrays)
    return file.getvalue()


def safetensors(data: bytes, drawn: Random) -> bytes:
    """Return a file of arrays with another header, or with another value in the description that is within it."""
    size = int.from_bytes(data[:LENGTH], "little")
    head = json.loads(data[LENGTH : LENGTH + size])
    if "__metadata__" in head and drawn.random() < 0.7:
        (name,) = head["__metadata__"]
        head["__metadata__"][name] = as_json(spoil_value(json.loads(head["__metadata__"][name]), drawn), drawn)
    else:
        head = spoil_value(head, drawn)
    new = as_json(head, drawn).encode(errors="surrogatepass")
    length = drawn.choice([len(new)] * 20 + [0, 2**40, 2**63])
    return length.to_bytes(LENGTH, "little") + new + data[LENGTH + size :]


FORMATS = {"toml": toml, "json": js, "jsonl": json_lines, "npy": npy, "npz": npz, "safetensors": safetensors}


def spoil(form: str, data: bytes, drawn: Random) -> bytes:
    """Return a file's content, spoilt once: in its bytes, or, more often, in what they stand for."""
    if drawn.random() < 0.4:
        return spoil_bytes(data, drawn)
    try:
        return FORMATS[form](data, drawn)
    except (ValueError, TypeError, OverflowError, AttributeError, RecursionError, KeyError):  # what cannot be written
        return str(any_value(drawn)).encode(errors="replace")
