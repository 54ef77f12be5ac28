"""The accounting of training memory: the bytes of all live tensor storages, and their peak.

`PeakMemory` has three uses: under fake tensors it *costs* a step without allocating anything (`trace`), around a real phase it
*enforces* a budget, and tests compare both with each other and with torch.profiler's memory events. The papers' own memory
models are in planning/paper_memory.
"""

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piecework.device_profiles.dispatch import Mode
from piecework.device_profiles.workspace import FLOPS, WORKSPACE


class MemoryBudgetExceededError(RuntimeError):
    """Work needs more training memory than its device has."""

    def __init__(self, needed: int, allowed: int, where: str) -> None:
        self.needed, self.allowed, self.where = needed, allowed, where
        super().__init__(f"{where} needs {needed:,} bytes of training memory, the budget allows {allowed:,}")


class PeakMemory(Mode):  # type: ignore[no-untyped-call]
    """Counts live tensor storages. It may be entered many times; what stays alive in between stays counted.

    `peak` and `live` are bytes. A storage is counted from the first operation that makes or reads it until it is freed. With
    `allowed` (bytes), an operation that exceeds the budget raises MemoryBudgetExceededError. Only storages on devices of type
    `device` count, because batches of a GPU wait in host memory.
    """

    def __init__(self, allowed: int | None = None, where: str = "this task", device: str = "cpu") -> None:
        super().__init__()
        self.allowed, self.where, self.device = allowed, where, device
        self._on_cpu = device == "cpu"
        self.live = self.peak = 0
        self.elsewhere: Container[int] = ()
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.KeyedRef[int, Any]] = {}

    def restart(self) -> None:
        """Forget everything, and count fake tensors of a CPU from now on."""
        self.device, self.live, self.peak, self.elsewhere = "cpu", 0, 0, ()
        self._sizes.clear()
        self._watched.clear()

    def count(self, value: object) -> None:
        """Count the storage of a tensor if it is on the device and not counted yet."""
        if isinstance(value, Tensor):
            self._count(value)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            if tensor.device.type != self.device or key in self.elsewhere:
                return
            self._watched[key] = weakref.KeyedRef(storage, self._forget, key)  # a `finalize` takes three times as long
        elif known >= size:
            return
        self._sizes[key] = size
        self.live += size - (known or 0)
        self._reach(self.live)

    def _count_all(self, values: Iterable[object]) -> None:
        # Operators nest no deeper than lists of tensors; torch's pytree, which handles any depth, is slow.
        for value in values:
            if isinstance(value, Tensor):
                self._count(value)
            elif isinstance(value, (list, tuple)):  # a union of types takes longer
                self._count_all(value)

    def _reach(self, size: int) -> None:
        self.peak = max(self.peak, size)
        if self.allowed is not None and size > self.allowed:
            raise MemoryBudgetExceededError(size, self.allowed, self.where)

    def _forget(self, gone: "weakref.KeyedRef[int, Any]") -> None:
        del self._watched[gone.key]
        self.live -= self._sizes.pop(gone.key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._count_all(args)
        if kwargs:
            self._count_all(kwargs.values())
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._count(result)
        else:
            self._count_all((result,))
        if self._on_cpu and (workspace := WORKSPACE.get(func)) is not None:
            self._reach(self.live + workspace(args))
        return result


class Overlap(NamedTuple):
    """What a step computes while it reads files: FLOPs, bytes read, and accesses. These are parts of the step's totals."""

    flops: float
    bytes_read: float
    accesses: float

    def times(self, flops: float, reads: float = 1.0) -> "Overlap":
        """Return this with so many times the FLOPs, and so many times the reads."""
        return Overlap(flops * self.flops, reads * self.bytes_read, reads * self.accesses)


@dataclass(frozen=True)
class StepCost:
    """The cost of one training step: peak bytes, and FLOPs (2 per multiply-accumulate, forward and backward).

    A paged step also reads and writes files of so many bytes, in so many accesses, of which `writes` write; some of them while
    it computes (`overlaps`). Of the bytes that it reads, `state_read` are those of the optimiser's state, which the first step
    of a task does not find.
    """

    peak_bytes: int
    flops: int
    bytes_read: int = 0
    bytes_written: int = 0
    accesses: int = 0
    state_read: int = 0
    writes: int = 0
    overlaps: tuple[Overlap, ...] = ()


def trace(
    work: Callable[[], object],
    memory: PeakMemory | None = None,
    flops: "FlopCount | None" = None,
    *,
    own_layers: bool = False,
) -> StepCost:
    """Run `work` without its memory and return its cost. It must create everything it uses, and may be run twice.

    It runs on torch's fake tensors. A step in float32 that consists of this package's `own_layers` runs on tensors without data
    (meta_steps.py) if these can stand in for a CPU's.

    A `memory` or `flops` lets `work` read what is counted meanwhile. Only servers use this function: fake tensors import
    torch's compiler, which would cost a device memory and time.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from piecework.device_profiles.cpu_results import AsOnTheCPU

    memory, flops = memory or PeakMemory(), flops or FlopCount()
    with torch.random.fork_rng(devices=[]):
        if not (own_layers and _ran_without_data(work, memory, flops)):
            with FakeTensorMode(allow_fallback_kernels=False), AsOnTheCPU(), memory, flops:
                work()
    return StepCost(memory.peak, flops.total)


def _ran_without_data(work: Callable[[], object], memory: PeakMemory, flops: "FlopCount") -> bool:
    """Run a step on tensors without data. Returns whether it could; if not, nothing is counted of it."""
    from piecework.device_profiles.meta_steps import OnMeta

    on_meta, before = OnMeta(), flops.total
    memory.device, memory.elsewhere = "meta", on_meta.nowhere
    try:
        with on_meta, memory, flops:
            work()
    except Exception:  # an UnsuitedError, or an error of the step itself, which fake tensors raise again
        on_meta.refused = True
    if on_meta.refused:
        memory.restart()
        flops.total = before
    return not on_meta.refused


class FlopCount(Mode):  # type: ignore[no-untyped-call]
    """Counts FLOPs, 2 per multiply-accumulate, by the formulas of torch.utils.flop_counter.

    torch's `FlopCounterMode` also follows modules by hooks that keep gradients alive, which makes peaks under attack too high.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from torch.utils.flop_counter import flop_registry

        if func is torch.ops.prim.device.default and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # half of all calls of a trace, which would pass through every mode
        result = func(*args, **(kwargs or {}))
        if (own := FLOPS.get(func)) is not None:
            self.total += own(args)
        elif (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=result))
        return result
