"""The base of the modes that see every operator that torch runs, and whether a step makes tensors without data."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WITHOUT_DATA = ContextVar("without_data", default=False)


@contextmanager
def without_data() -> Iterator[None]:
    """Make tensors on the device `meta`, which take no memory.

    A trace runs steps on this device too, and tells by this context what a step takes no memory for.
    """
    token = _WITHOUT_DATA.set(True)
    try:
        with torch.device("meta"):
            yield
    finally:
        _WITHOUT_DATA.reset(token)


def makes_no_data() -> bool:
    """Return whether `without_data` is active."""
    return _WITHOUT_DATA.get()


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not import torch's compiler, which takes 75 MB and more than a second on a board."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
