"""What comes next is read while something is computed: two segments of a cascade are in memory then."""

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from piecework.training.pages import Pages, Reading

Key = TypeVar("Key")
T = TypeVar("T")


class Ahead(Generic[Key, T]):
    """Makes things by their keys, from pages, of which one may be read ahead. No reading outlives a `with` block."""

    def __init__(self, pages: Pages, make: Callable[[Key], T]) -> None:
        self._pages, self._make = pages, make
        self._coming: tuple[Key, T, Reading] | None = None

    def begin(self, key: Key) -> None:
        """Begin to read what will be taken next."""
        self._coming = (key, *self._pages.read_ahead(partial(self._make, key)))

    def take(self, key: Key) -> T:
        """Return what was begun, when it is read, or else what is read now. Raises what reading raised."""
        coming, self._coming = self._coming, None
        if coming is None:
            return self._make(key)
        begun, made, reading = coming
        reading.wait()
        if begun != key:
            raise RuntimeError(f"{begun} is read ahead, and {key} is taken")
        return made

    def __enter__(self) -> None:
        """Begin a block in which things are read ahead."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for what is still read, which nothing will take: an error has ended the block."""
        if self._coming is not None:
            self._coming[-1].join()
            self._coming = None
