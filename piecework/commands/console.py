"""The console of all commands: it shows text as it stands, whoever wrote it.

Rich takes `[red]` in a string for markup and `:bug:` for a picture, and passes a terminal's control sequences on. Much of what
is printed is not our text: paths, names of runs, fleets and devices, settings, reasons that clients sent. So here a string is
only text, control characters are left out, and what we emphasise is a `Text` or has a `style`.
"""

import re
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # all but the line feed; rich counts them as of no width
SURROGATE = re.compile("[\ud800-\udfff]")  # how Python reads a byte of a file's name that is no UTF-8


def printable(text: str) -> str:
    """Return text without characters that would act on a terminal, and with `?` for what cannot be encoded."""
    return SURROGATE.sub("?", CONTROL.sub("", text))


class PlainConsole(Console):
    """Rich's console without markup and emoji codes in strings, and without control characters in anything it prints."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> None:
        super().__init__(stderr=stderr, file=file, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield a renderable's segments; those that move the cursor are rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Return a line with a spinner; rich reads strings here as markup, whatever the console does."""
        return super().status(as_text(status), **options)


def as_text(shown: RenderableType) -> RenderableType:
    """Return what rich's `Status.update` must be given instead of a string."""
    return Text(shown) if isinstance(shown, str) else shown
