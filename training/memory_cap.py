"""Enforce a client's memory budget for a task, and measure the task.

The accounting (`PeakMemory`) wraps the first run of every phase and every new batch shape, because later runs repeat the same
operations. The resident set is recorded too; it is a bound only if a process serves one client and nothing else. On a GPU
torch's allocator is also limited to the budget.
"""

import ctypes
import errno
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from torch.utils._python_dispatch import _disable_current_modes

from piecework.device_profiles.memory import PeakMemory
from piecework.device_profiles.profile import is_unlimited
from piecework.training.accelerator import CPU, limit_allocator, release_cache

# Messages of torch's CPU allocator, of C++ and of oneDNN (which does not name memory) when memory is exhausted, then those of
# CUDA and of its libraries' handles.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "not enough memory",
    "create a primitive",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
)
PLENTY, SCANT = 2**30, 32 * 2**20  # bytes above the budget
LARGEST_IN_HEAP = 32 * 2**20  # bytes; older glibc allow no more
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


class MemoryCap:
    """The accounting of one task on a device. `allowed` is in bytes; without `enforced` it only measures.

    `gpu_peak_bytes` is the peak of torch's allocator during `task`, in bytes, and 0 on the CPU.
    """

    def __init__(self, allowed: int, *, enforced: bool, device: torch.device = CPU) -> None:
        self.device, self._limit = device, allowed if enforced else None
        self.gpu_peak_bytes = 0
        self._meter = PeakMemory(self._limit, device=device.type)
        self._seen: set[Hashable] = set()

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes alive at once so far."""
        return self._meter.peak

    @contextmanager
    def task(self) -> Iterator[None]:
        """Limit a GPU to the budget in the body. Raises torch.OutOfMemoryError."""
        with limit_allocator(self.device, self._limit) as peak:
            try:
                yield
            finally:
                self.gpu_peak_bytes = peak()

    @contextmanager
    def first(self, phase: str, *key: Hashable) -> Iterator[None]:
        """Count the body if it is the first of its phase and key. Raises MemoryBudgetExceededError."""
        if (phase, *key) in self._seen:
            yield
            return
        self._seen.add((phase, *key))
        self._meter.where = phase
        with self._meter:
            yield


@contextmanager
def pause_counting() -> Iterator[None]:
    """Exclude the body from a counted phase: it repeats counted operations and leaves nothing large behind."""
    with _disable_current_modes():
        yield


class Heap:
    """What is true of this process's heap. `spare` are the free bytes that `return_free_memory` leaves in it."""

    spare = 0


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, in bytes; `fordblks` are free in the heap, those that were returned already among them."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


@cache
def libc_function(name: str, result: type = ctypes.c_int) -> Callable[..., Any] | None:
    """Return a function of the C library, on Linux, if it has it."""
    found = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if found is not None:
        found.restype = result
    return found


def return_free_memory() -> None:
    """Return freed heap pages to the system, so that the resident set shows what is in use (glibc only).

    Where memory is plentiful, up to `Heap.spare` bytes stay for the next client, which would else begin with a page fault for
    each 4096 bytes of its step. On a GPU, also return the memory that torch's allocator caches.
    """
    release_cache()
    if not Heap.spare or free_in_heap() > Heap.spare:
        trim_heap()


def has_plenty() -> bool:
    """Return whether the device of the present task has far more memory available than its budget."""
    return Heap.spare > 0


def free_in_heap() -> float:
    """Return the bytes that are free in the heap; infinite where that is unknown (glibc before 2.33)."""
    look = libc_function("mallinfo2", Mallinfo)
    return math.inf if look is None else look().fordblks


def trim_heap() -> None:
    """Return the free pages of glibc's heap to the system."""
    if (trim := libc_function("malloc_trim")) is not None:
        trim(0)


def keep_heap_tight(budget: int, available: int) -> None:
    """Make large blocks leave the resident set when they are freed (glibc only); `budget` and `available` are bytes.

    By default glibc keeps blocks of up to 32 MiB: with a 100 MB model it held 90 MB unused. Smaller blocks stay in the heap,
    where they are quick to allocate but leave holes. With a limit of 2 MiB, a PreResNet-20 step at batch 128 (200 MB) took just
    the traced peak. With 8 MiB it took 40 to 75 MB more, but 11 to 20 % less CPU time. So the smaller limit is for devices and
    containers with little more memory than the budget.

    Micro-batches have blocks below 2 MiB. A device with almost no more memory than the budget returns those from 512 KiB on.
    Then four steps of ResNet-18 in micro-batches of 3 (benchmarks/container_piece.py) took 6 to 7 MB above the traced peak
    instead of 12, in the same CPU time.
    """
    _hand_back_from(heap_limit(budget, available))
    Heap.spare = LARGEST_IN_HEAP if is_plenty(budget, available) else 0


def is_plenty(budget: int, available: int) -> bool:
    """Return whether a device has far more memory available than its budget, both in bytes."""
    return is_unlimited(budget) or available - budget >= budget + PLENTY


def heap_limit(budget: int, available: int) -> int:
    """Return the size (bytes) from which freed blocks leave the resident set, for a budget and available memory in bytes."""
    if is_plenty(budget, available):
        return min(LARGEST_IN_HEAP, max(8 * 2**20, budget // 32))
    return 2 * 2**20 if available - budget >= SCANT else 2**19


def keep_heap_loose() -> None:
    """Keep freed memory of any size for reuse (glibc only): for a server, which has no budget.

    Under an attack, every layer's activations are allocated and freed in each step. By default AutoAttack spent half of its CPU
    time in the kernel, which reclaims and clears these pages; with this setting it spent 3 %. `return_free_memory` returns
    the kept memory.
    """
    Heap.spare = 0
    if not _hand_back_from(2**30):
        _hand_back_from(LARGEST_IN_HEAP)


def _hand_back_from(size: int) -> bool:
    """Make glibc return freed blocks of `size` bytes or more, and that much at the heap's end. Returns whether it accepted."""
    mallopt = libc_function("mallopt")
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, size)) and bool(mallopt(M_TRIM_THRESHOLD, size))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system was out of memory: the error of Python, numpy, torch's allocator, or a failed mapping."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | SafetensorError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


class ResidentPeak:
    """The largest resident set (bytes) of this process since `start`: exact on Linux, sampled elsewhere."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.start_bytes = self._process.memory_info().rss
        self._exact = _reset_high_water_mark()
        self._sampled = self.start_bytes
        self._stop = threading.Event()
        if not self._exact:
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self._sampled = max(self._sampled, self._process.memory_info().rss)

    def peak_bytes(self) -> int:
        """Return the peak so far and end the sampling."""
        self._stop.set()
        return _high_water_mark() if self._exact else max(self._sampled, self._process.memory_info().rss)


def _reset_high_water_mark() -> bool:
    """Reset VmHWM by writing 5 to clear_refs. Returns False if the kernel or the container does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _high_water_mark() > 0
    except OSError:
        return False


def _high_water_mark() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
