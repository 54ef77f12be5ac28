"""Where a client computes: on the CPU, or on a GPU whose memory is limited to the client's budget.

On the CPU the functions here copy nothing and do not touch CUDA.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CPU = torch.device("cpu")
# The allowance beyond a budget that torch's allocator has on a GPU, in bytes and as a fraction of the budget. It covers memory
# other than tensors: cuBLAS's workspaces (up to twice 32 MiB), partly used segments (22 MiB), workspaces of cuDNN, fragments.
WORKSPACES, FRAGMENTS = 128 * 2**20, 0.25


class NoAcceleratorError(ValueError):
    """The settings name an accelerator that this machine does not have."""


def find_device(accelerator: str) -> torch.device:
    """Return the device for the setting `training.accelerator`. Raises NoAcceleratorError."""
    if accelerator == "none":
        return CPU
    if not torch.cuda.is_available():
        missing = "finds no GPU" if torch.version.cuda else "was built without CUDA"
        raise NoAcceleratorError(
            f"setting training.accelerator = {accelerator!r}: torch {torch.__version__} {missing} here. Start this client "
            "where `python -c 'import torch; print(torch.cuda.is_available())'` prints True, or set training.accelerator "
            "= none"
        )
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def without_denormals() -> Iterator[None]:
    """Flush denormal numbers to zero in the body.

    An LSTM's gradients vanish over 500 steps, and a backward pass with denormals took 20 times as long. The flag is reset after
    a task, because a server may use the same thread.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device in its memory format; to a GPU through pinned memory, without waiting."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def release_cache() -> None:
    """Return the GPU memory that torch's allocator caches to the system; nothing if no GPU is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def budget_within(free: int) -> int:
    """Return the largest budget that `free` bytes of a GPU have room for, with the allowance beyond it."""
    return max(0, int((free - WORKSPACES) / (1 + FRAGMENTS)))


def allocator_limit(allowed: int, reserved: int) -> int:
    """Return the bytes that torch's allocator may hold for `allowed` ones, beside those that it has reserved before."""
    return int(reserved + WORKSPACES + (1 + FRAGMENTS) * allowed)


def free_memory(device: torch.device) -> int:
    """Return the largest budget in bytes that the GPU has room for now."""
    release_cache()
    return budget_within(torch.cuda.mem_get_info(device)[0])


@contextmanager
def limit_allocator(device: torch.device, allowed: int | None) -> Iterator[Callable[[], int]]:
    """Limit torch's allocator on a GPU, in the body, to `allowed` bytes plus the allowance beyond a budget; None = no limit.

    Yields a function that returns the peak (bytes) since then, or 0 on the CPU. In the body float32 means float32, not TF32,
    and cuDNN uses deterministic algorithms; neither is torch's default.
    """
    if device.type == "cpu":
        yield lambda: 0
        return
    release_cache()
    before = torch.cuda.memory_allocated(device)  # cuBLAS keeps its workspaces from one task to the next
    torch.cuda.reset_peak_memory_stats(device)
    if allowed is not None:
        limit = allocator_limit(allowed, torch.cuda.memory_reserved(device))
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield lambda: torch.cuda.max_memory_allocated(device) - before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        release_cache()
