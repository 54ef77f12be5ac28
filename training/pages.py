"""The pages of a step: tensors that leave memory and come back, in files of their own.

`Pages` counts what a step reads and writes, and moves nothing: with it, planners compute a step's cost. `PageFiles` moves the
bytes of tensors as they lie in memory, without a copy, and can read them on a second thread. What a task writes is in its own
folder, which ends with the task: a client that dies in the middle of a write has lost the task, and no step is ever half done.
The files leave nothing in the page cache, which would count as memory of a container, unless a device has plenty.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from piecework.training.accelerator import CPU

Wanted = list[tuple[str, Sequence[Tensor]]]  # names of pages, and the tensors that they are read into
T = TypeVar("T")
READER = "reads pages ahead"  # the name of the thread


def packed(tensor: Tensor) -> Tensor:
    """Return a tensor that fills its storage without gaps, in whatever memory format: itself, or a copy."""
    return tensor if _is_dense(tensor) else tensor.contiguous()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the strides are those of some order of the dimensions, without gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Reading(Protocol):
    """Pages that are read while something else is computed."""

    def wait(self) -> None:
        """Return when all is read. Raises what reading raised."""

    def join(self) -> None:
        """Return when nothing is read any more, whether it was read or not."""


class Read:
    """Pages that have been read."""

    def wait(self) -> None:
        """Do nothing."""

    def join(self) -> None:
        """Do nothing."""


class Pages:
    """Counts the bytes and files that a step reads and writes. `device` is where tensors are in memory."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self.bytes_read = self.bytes_written = self.accesses = 0
        self._wanted: Wanted | None = None

    @property
    def moved(self) -> tuple[int, int, int]:
        """Bytes read and written, and accesses."""
        return self.bytes_read, self.bytes_written, self.accesses

    def holds(self, name: str) -> bool:
        """Return whether a page was written."""
        return True

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep the values of tensors, which must be dense, under a name."""
        self.bytes_written += count_bytes(tensors)
        self.accesses += 1

    def read(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Give tensors of the same shapes and formats the values that were written under a name.

        Raises FileNotFoundError if nothing was, OSError if the file is shorter than the tensors.
        """
        self.bytes_read += count_bytes(tensors)
        self.accesses += 1
        if self._wanted is None:
            self._fetch(name, tensors)
        else:
            self._wanted.append((name, tensors))

    def read_ahead(self, make: Callable[[], T]) -> tuple[T, Reading]:
        """Return what `make` makes, and the reading of what it reads, which has just begun on a second thread.

        Tensors are allocated here, in this thread, and only filled in the other one: when they are there does not depend on how
        fast a disk is. Nothing may use their values, or write these pages, before the end of the reading.
        """
        wanted = self._wanted = Wanted()
        try:
            made = make()
        finally:
            self._wanted = None
        return made, self._begin(wanted)

    def _fetch(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Fill tensors."""

    def _begin(self, wanted: Wanted) -> Reading:
        """Begin to fill tensors."""
        return Read()


def count_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the values of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class PageFiles(Pages):
    """Pages in files of a folder, which is made when the first is written.

    With `cached`, the system may keep them in its page cache, as it does with all files, and write them when it likes. This is
    for devices with far more memory than their budget: waiting for the disk was 0.4 of a PreResNet-20's step.
    """

    def __init__(self, folder: Path, device: torch.device = CPU, *, cached: bool = False) -> None:
        super().__init__(device)
        self.folder, self.cached = folder, cached

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.page"

    def holds(self, name: str) -> bool:
        """Return whether a page was written."""
        return self._path(name).exists()

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep the values of tensors, which must be dense, under a name; what was there is replaced.

        It is overwritten where it lies: a file that is emptied first gets new blocks, and a sync then also waits for the file
        system's journal, which took twice as long.
        """
        super().write(name, tensors)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._path(name), "wb", buffering=0, opener=_open_to_overwrite) as file:
            for tensor in tensors:
                _write_all(file.fileno(), _as_bytes(tensor.detach().to(CPU)))
            file.truncate()
            if not self.cached:
                _forget(file.fileno(), written=True)

    def _fetch(self, name: str, tensors: Sequence[Tensor]) -> None:
        with self._path(name).open("rb", buffering=0) as file:
            for tensor in tensors:
                found = tensor.detach() if tensor.device == CPU else torch.empty_like(tensor, device=CPU)
                _read_all(file.fileno(), _as_bytes(found), name)
                if found.device != tensor.device:
                    tensor.detach().copy_(found)
            if not self.cached:
                _forget(file.fileno(), written=False)

    def _begin(self, wanted: Wanted) -> Reading:
        return _Reader(self._fetch, wanted)


class _Reader(Thread):
    """Fills tensors, and holds none of them when it has ended."""

    def __init__(self, fetch: Callable[[str, Sequence[Tensor]], None], wanted: Wanted) -> None:
        super().__init__(name=READER)
        self._fetch, self._wanted = fetch, wanted
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Read one page after another, until one cannot be read."""
        try:
            while self._wanted:
                self._fetch(*self._wanted.pop(0))
        except Exception as error:  # raised where it is waited for
            self._error = error

    def wait(self) -> None:
        """Return when all is read. Raises what reading raised."""
        self.join()
        if self._error is not None:
            raise self._error


def _open_to_overwrite(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC)


def _as_bytes(tensor: Tensor) -> memoryview:
    """Return a dense tensor's bytes in the order in which they lie in memory, which is shared."""
    if not _is_dense(tensor):
        raise ValueError(
            f"a tensor with shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps: it has no page"
        )
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _read_all(descriptor: int, into: memoryview, name: str) -> None:
    while into:
        if not (count := os.readv(descriptor, [into])):
            raise OSError(f"page {name} is {len(into)} bytes too short")
        into = into[count:]


def _forget(descriptor: int, *, written: bool) -> None:
    """Let the page cache drop a file, where the system can: it would count as memory of a container."""
    if hasattr(os, "posix_fadvise"):
        if written:
            os.fdatasync(descriptor)  # only what is on the disk can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
