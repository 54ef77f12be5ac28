"""Where a client computes: on the processor, or on a GPU whose memory is held to the client's budget.

On the processor every function here hands back what it got: nothing is copied, and nothing of CUDA is touched.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CPU = torch.device("cpu")
# What torch's allocator may hold of a GPU beyond a budget, in bytes and as a share of the budget, because it counts more than
# tensors: cuBLAS's workspaces (at most twice 32 MiB), segments in use only in part (22 MiB); workspaces of cuDNN, fragments.
WORKSPACES, FRAGMENTS = 128 * 2**20, 0.25


class NoAcceleratorError(ValueError):
    """The settings name an accelerator that this machine does not have."""


def find_device(accelerator: str) -> torch.device:
    """The device that the setting `accelerator` stands for here. Raises NoAcceleratorError."""
    if accelerator == "none":
        return CPU
    if not torch.cuda.is_available():
        missing = "finds no GPU" if torch.version.cuda else "was built without CUDA"
        raise NoAcceleratorError(
            f"setting accelerator = {accelerator!r}: torch {torch.__version__} {missing} here. Start this client where "
            "`python -c 'import torch; print(torch.cuda.is_available())'` prints True, or set accelerator = none"
        )
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def without_denormals() -> Iterator[None]:
    """Numbers too small for a normal float count as zero: an LSTM's gradients vanish over 500 steps, and with them a backward
    pass took 20 times as long. Only while a task lasts, as a server may share the thread.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the processor on the device, in its memory format; to a GPU by pinned memory, so that no client waits."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def release_cache() -> None:
    """Give the GPU memory that torch's allocator keeps for later back to the system; nothing where no GPU is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Bytes of budget that the GPU has room for now: what is free of it, less what goes beyond a budget."""
    release_cache()
    return max(0, int((torch.cuda.mem_get_info(device)[0] - WORKSPACES) / (1 + FRAGMENTS)))


@contextmanager
def held_to(device: torch.device, allowed: int | None) -> Iterator[Callable[[], int]]:
    """Hold what torch's allocator takes of a GPU to `allowed` bytes, and what goes beyond a budget, during the body.

    Gives a function that tells the peak (bytes) since then; on the processor, 0. float32 means float32 in the body, not TF32,
    and cuDNN chooses deterministic algorithms: by default it would do neither.
    """
    if device.type == "cpu":
        yield lambda: 0
        return
    release_cache()
    before = torch.cuda.memory_allocated(device)  # cuBLAS keeps its workspaces from one task to the next
    torch.cuda.reset_peak_memory_stats(device)
    if allowed is not None:
        limit = torch.cuda.memory_reserved(device) + WORKSPACES + (1 + FRAGMENTS) * allowed
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield lambda: torch.cuda.max_memory_allocated(device) - before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        release_cache()
