"""Keeps what tracing found in the user's cache folder, so that another process does not trace the same parts again.

`recall` returns the result of a tracing function. The key is the whole call: the function and all its arguments (call_key.py),
the source of all code that decides what a trace finds, and the build of torch with the circumstances that it depends on. What
has no such key, as a model of one's own, is traced in each process. The environment variable PIECEWORK_NO_CACHE, which
`--no-cache` sets, lets everything be traced.

The results lie in one SQLite file, which several processes may use at once, and of which the oldest entries are removed.
"""

import logging
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from piecework.device_profiles.call_key import NoKeyError, call_key
from piecework.device_profiles.user_cache import NO_CACHE, traces_file

LOG = logging.getLogger("piecework")
MOST = 20_000  # results, of about 500 bytes each
DIGITS = 16  # of the checksum before each result
PATIENCE = 10.0  # seconds that a process waits for others that write
# The packages of Piecework whose code decides what a trace finds.
TRACED = ("client_app", "device_profiles", "models", "planning", "strategies", "training")
LIBRARIES = ("builtins", "functools", "math", "numpy", "operator", "torch", "types")
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_LOADED = time.time()  # code that changes later is not the code that runs here

P = ParamSpec("P")
T = TypeVar("T")


def recall(trace: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `trace(*args, **kwargs)`, as it was kept, or traced now and kept.

    The function's return annotation says how its results are written and read. What cannot be read is traced again, with one
    warning for a damaged file.
    """
    key = None if os.environ.get(NO_CACHE) else _key(trace, *args, **kwargs)
    if key is None:
        return trace(*args, **kwargs)
    adapter, path = _adapter(trace), traces_file()
    if (kept := _read(path, key)) is not None:
        text = kept[DIGITS:]
        try:
            if kept[:DIGITS] == _checksum(key, text):
                found: T = adapter.validate_json(text)
                return found
            _say_damaged(path)
        except ValidationError:
            _say_damaged(path)
    found = trace(*args, **kwargs)
    text = adapter.dump_json(found).decode()
    _write(path, key, _checksum(key, text) + text)
    return found


def _checksum(key: str, text: str) -> str:
    """Return the checksum that stands before a result: SQLite does not notice that a byte of it has changed."""
    return sha256(f"{key}{text}".encode()).hexdigest()[:DIGITS]


def _key(trace: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    code = code_digest()
    if code is None:
        return None
    try:
        call = call_key(_is_covered, trace, *args, **kwargs)
    except NoKeyError:
        return None
    return sha256(repr((code, circumstances(), call)).encode()).hexdigest()


def _is_covered(module: str) -> bool:
    """Return whether the code of a module is in `code_digest`, or of a library that `circumstances` names."""
    top, _, rest = module.partition(".")
    return top in LIBRARIES or (top == "piecework" and rest.partition(".")[0] in TRACED)


def circumstances() -> tuple[object, ...]:
    """Return what a trace depends on besides its arguments and our code: torch's build and state, and the machine's kind."""
    return (
        *(torch.__version__, torch.version.git_version, torch.backends.cpu.get_cpu_capability()),
        *(str(torch.get_default_dtype()), torch.is_grad_enabled()),
        *(torch._C._get_mkldnn_enabled(), torch.are_deterministic_algorithms_enabled()),
        *(sys.implementation.name, sys.version_info[:2], platform.system(), platform.machine()),
    )


@cache
def code_digest() -> str | None:
    """Return the digest of the source in TRACED; None if it has changed since it was loaded here, or cannot be read."""
    return digest_of(Path(__file__).parents[1], _LOADED)


def digest_of(root: Path, loaded: float) -> str | None:
    """Return the digest of the source of TRACED below `root`; None if there is none, or it is newer than `loaded`, seconds."""
    found = sha256()
    try:
        files = [path for package in TRACED for path in sorted((root / package).rglob("*.py"))]
        for path in files:
            if path.stat().st_mtime > loaded:
                return None
            found.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
            found.update(path.read_bytes())
    except OSError:
        return None
    return found.hexdigest() if files else None


@cache
def _adapter(trace: Callable[..., Any]) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(trace)["return"])


def _read(path: Path, key: str) -> str | None:
    """Return what is kept under a key, or None."""
    if not path.exists():
        return None
    with _file_errors(path), closing(_open(path)) as file:
        row = file.execute("SELECT result FROM traces WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else None
    return None


def _write(path: Path, key: str, text: str) -> None:
    """Keep a result. Beyond MOST results, the oldest are removed."""
    with _file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(_open(path)) as file, file:
            number = file.execute("INSERT OR REPLACE INTO traces VALUES (?, ?)", (key, text)).lastrowid
            file.execute("DELETE FROM traces WHERE rowid <= ?", ((number or 0) - MOST,))


def _open(path: Path) -> sqlite3.Connection:
    """Open the file, which is made if it is missing. Each access opens it, so that forked processes share no connection."""
    file = sqlite3.connect(path, timeout=PATIENCE)
    file.execute("PRAGMA synchronous = OFF")  # a crash of the machine may lose the file, which is made again
    file.execute("CREATE TABLE IF NOT EXISTS traces (key TEXT PRIMARY KEY, result TEXT NOT NULL)")
    return file


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Let a file that cannot be used be as none. A damaged one is removed, so that the next result begins a new one."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) in DAMAGED:
            _say_damaged(path)
            with suppress(OSError):
                path.unlink()
        else:
            _say_unusable(path, str(error))
    except OSError as error:
        _say_unusable(path, str(error))


@cache
def _say_damaged(path: Path) -> None:
    LOG.warning("the kept traces in %s are damaged: what cannot be read is traced and written again", path)


@cache
def _say_unusable(path: Path, error: str) -> None:
    LOG.info("traces are not kept in %s: %s; PIECEWORK_CACHE can name another folder", path, error)
