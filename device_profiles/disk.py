"""Measure a disk: how fast it writes and reads a file, and how long a small read and a small synced write take."""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

PROBE_FILE_BYTES, PROBE_BLOCK_BYTES = 8_000_000, 1_000_000
PAGE_BYTES = 4096
CACHE_CAN_BE_DROPPED = hasattr(os, "posix_fadvise")


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes/s of writing with a final sync and of reading back, and the median seconds of a small read and a small write."""

    write: float
    read: float
    latency: float
    write_latency: float


def measure_disk(directory: Path, size: int, accesses: int = 0) -> DiskSpeed:
    """Write and sync a file of `size` bytes (at least a block), read it back, read and write it at `accesses` random places.

    The file is removed. If the system's cache cannot be dropped, reads come from the cache. Raises OSError.
    """
    blocks = max(1, size // PROBE_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        block = os.urandom(PROBE_BLOCK_BYTES)
        start = time.perf_counter()
        for _ in range(blocks):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        _drop_cache(file.fileno())
        file.seek(0)
        start = time.perf_counter()
        while file.read(PROBE_BLOCK_BYTES):
            pass
        seconds = time.perf_counter() - start
        size = blocks * PROBE_BLOCK_BYTES
        reads = [_access(file, size) for _ in range(accesses)] or [0.0]
        writes = [_write_access(file, size) for _ in range(accesses)] or [0.0]
    return DiskSpeed(size / written, size / seconds, statistics.median(reads), statistics.median(writes))


def _access(file: FileIO, size: int) -> float:
    """Return the seconds until one byte of a random page is read."""
    _drop_cache(file.fileno())  # dropped every time, because the previous read may have fetched the pages around it
    if CACHE_CAN_BE_DROPPED:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    file.seek(int.from_bytes(os.urandom(8)) % size)
    start = time.perf_counter()
    file.read(1)
    return time.perf_counter() - start


def _write_access(file: FileIO, size: int) -> float:
    """Return the seconds until a random page is overwritten and on the disk."""
    page = os.urandom(PAGE_BYTES)
    file.seek(int.from_bytes(os.urandom(8)) % (size // PAGE_BYTES) * PAGE_BYTES)
    start = time.perf_counter()
    file.write(page)
    getattr(os, "fdatasync", os.fsync)(file.fileno())  # which some systems lack
    return time.perf_counter() - start


def _drop_cache(descriptor: int) -> None:
    if CACHE_CAN_BE_DROPPED:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
