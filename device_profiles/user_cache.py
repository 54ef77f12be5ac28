"""The user's cache: the folder of what can be made again, which are converted data sets and kept traces.

It imports nothing heavy, because commands that trace nothing import it too.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_CACHE = "PIECEWORK_NO_CACHE"  # if this environment variable is not empty, costs are traced anew


def default_cache() -> Path:
    """Return $PIECEWORK_CACHE, else $XDG_CACHE_HOME/piecework, else ~/.cache/piecework."""
    if own := os.environ.get("PIECEWORK_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "piecework"


def traces_file() -> Path:
    """Return the file of the kept traces (trace_cache.py), which may not exist."""
    return default_cache() / "traces" / "traces.sqlite"


@contextmanager
def trace_anew(wanted: bool) -> Iterator[None]:
    """If `wanted`, neither read nor write kept traces meanwhile, nor let processes do so that are started meanwhile."""
    before = os.environ.get(NO_CACHE)
    if wanted:
        os.environ[NO_CACHE] = "1"
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(NO_CACHE)
            os.environ.update({NO_CACHE: before} if before is not None else {})
