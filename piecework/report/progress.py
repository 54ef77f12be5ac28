"""Show a run in the terminal while it runs, with a line per round."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import TracebackType
from typing import Protocol, Self

from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from piecework.commands.console import PlainConsole
from piecework.device_profiles.units import format_seconds
from piecework.planning.now import NOW
from piecework.report.display import Record
from piecework.server_app.round_line import round_line

BAR = 16  # columns
BEFORE_TEXT = 1 + 1 + BAR + 1 + len("0:00:00") + 1  # columns: spinner, bar and time, each with a blank
Details = Callable[[], str]  # what they are at the time of the call
RECENT = 5  # rounds whose median is the expected duration of the next; the first round also traces and starts up


def times_now(record: Record, total_rounds: int, seconds: float) -> str:
    """Return the present duration of a round, `seconds`, and how long the rounds to come will take."""
    left = total_rounds - record["round"]
    return f"{seconds:.1f} s/round" + (f"  {format_seconds(seconds * left)} left" if left > 0 else "")


class ShowsRounds(Protocol):
    """What shows a run while it runs."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, record: Record) -> None:
        """Show a finished round."""


class NoProgress:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, record: Record) -> None:
        """Do nothing."""


class RoundProgress:
    """A line for each finished round on stderr. On a terminal the last line is a bar, with what the run is doing now."""

    def __init__(self, total_rounds: int, console: PlainConsole | None = None) -> None:
        self.total_rounds = total_rounds
        self.console = console or PlainConsole(stderr=True)
        self.recent: list[float] = []
        self.progress: Progress | None = None
        self.task = TaskID(0)
        self.done, self.left = 0, ""
        self.text = "starting: clients connect, parts are traced"
        self.details: Details = str
        self.now = Now(self.console, self.show)

    def __enter__(self) -> Self:
        if self.now.live:
            self.progress = Progress(
                SpinnerColumn(finished_text=" "),
                BarColumn(BAR),
                TimeElapsedColumn(),
                LineColumn(self.line),
                console=self.console,
            )
            self.task = self.progress.add_task("", total=self.total_rounds)
            self.progress.start()
        NOW.addHandler(self.now)
        return self

    def show(self, text: str, details: Details = str) -> None:
        """Show on the bar's line what the run is doing, and its details where there is room."""
        self.text, self.details = text, details

    def line(self) -> str:
        """Return the text on the bar's line, as it is now."""
        line, room = "  ".join(filter(None, [self.text, self.left, self.details()])), self.console.width - BEFORE_TEXT
        # rich would take the bar's place for a longer text
        return line if len(line) <= room else f"{line[: room - 1]}…"

    def update(self, record: Record) -> None:
        """Show a finished round."""
        self.recent = [*self.recent, float(record["seconds"])][-RECENT:]
        line, times = round_line(record, self.total_rounds), times_now(record, self.total_rounds, median(self.recent))
        if self.progress is None:
            self.console.print(f"{line}  {times}", highlight=False, soft_wrap=True)
            return
        self.done, self.left = record["round"], times
        self.progress.update(self.task, completed=record["round"])
        self.show(f"round {record['round']} of {self.total_rounds}")
        self.progress.console.print(line, highlight=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        NOW.removeHandler(self.now)
        if self.progress is not None:
            self.left = ""
            self.show(f"{self.done} of {self.total_rounds} rounds")
            self.progress.stop()


class LineColumn(ProgressColumn):
    """A text that is asked for whenever the bar is drawn, some ten times a second."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True))
        self.text = text

    def render(self, task: Task) -> Text:
        """Return the text."""
        return Text(self.text())


class Now(logging.Handler):
    """Hears what the process is doing (planning/now.py), and shows it.

    Where it is `live`, as a terminal is, `show` gets each text, with a count if it is repeated, and its details. Elsewhere only
    tracing is said, once.
    """

    def __init__(self, console: PlainConsole, show: Callable[[str, Details], None], *, live: bool = False) -> None:
        self.live = live or (console.is_terminal and not console.is_dumb_terminal)
        super().__init__(logging.DEBUG if self.live else logging.INFO)
        self.console, self.show_text = console, show
        self.last, self.times = "", 0

    def emit(self, record: logging.LogRecord) -> None:
        """Show a text."""
        text = record.getMessage()
        if not self.live:
            if not self.last:
                self.console.print(text, highlight=False, soft_wrap=True)
            self.last = text
            return
        self.times = self.times + 1 if text == self.last else 1
        self.last = text
        self.show_text(f"{text} ({self.times})" if self.times > 1 else text, getattr(record, "details", str))


@contextmanager
def show_waiting(console: PlainConsole, text: str) -> Iterator[None]:
    """Show on a terminal that the body works, and what it is doing; elsewhere nothing."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with console.status(text) as status:
        now = Now(console, lambda text, _: status.update(Text(text)))
        NOW.addHandler(now)
        try:
            yield
        finally:
            NOW.removeHandler(now)
