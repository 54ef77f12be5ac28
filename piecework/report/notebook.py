"""Show a run in a notebook while it runs: a bar, what the run is doing, and a line for each finished round."""

from html import escape
from statistics import median
from types import TracebackType
from typing import Any, Self

from piecework.commands.console import PlainConsole
from piecework.planning.now import NOW
from piecework.report.display import Record
from piecework.report.progress import RECENT, Details, NoProgress, Now, RoundProgress, ShowsRounds, times_now
from piecework.server_app.round_line import round_line


def choose_progress(total_rounds: int, wanted: bool = True) -> ShowsRounds:
    """Return what shows a run here: in a notebook, on stderr, or nothing if that is not `wanted`."""
    console = PlainConsole(stderr=True)
    if not wanted:
        return NoProgress()
    return NotebookProgress(total_rounds) if console.is_jupyter else RoundProgress(total_rounds, console)


class NotebookProgress:
    """One output of a cell, which is replaced as the run goes on. It needs nothing but IPython, which a notebook has."""

    def __init__(self, total_rounds: int) -> None:
        self.total_rounds = total_rounds
        self.lines: list[str] = []
        self.recent: list[float] = []
        self.text, self.details, self.left, self.done = "starting: clients connect, parts are traced", "", "", 0
        self.shown: Any = None
        self.now = Now(PlainConsole(), self.tell, live=True)

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self.shown = display(HTML(self.page()), display_id=True)  # type: ignore[no-untyped-call]
        NOW.addHandler(self.now)
        return self

    def page(self) -> str:
        """Return the HTML of the output."""
        bar = f'<progress max="{self.total_rounds}" value="{self.done}"></progress>'
        status = "  ".join(filter(None, [self.text, self.left, self.details]))
        return f"{bar} {escape(status)}<pre>{escape(chr(10).join(self.lines))}</pre>"

    def tell(self, text: str, details: Details = str) -> None:
        """Show what the run is doing, and its details."""
        from IPython.display import HTML

        self.text, self.details = text, details()
        self.shown.update(HTML(self.page()))  # type: ignore[no-untyped-call]

    def update(self, record: Record) -> None:
        """Show a finished round."""
        self.recent = [*self.recent, float(record["seconds"])][-RECENT:]
        self.lines.append(round_line(record, self.total_rounds))
        self.done, self.left = record["round"], times_now(record, self.total_rounds, median(self.recent))
        self.tell(f"round {record['round']} of {self.total_rounds}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        NOW.removeHandler(self.now)
        self.left = ""
        self.tell(f"{self.done} of {self.total_rounds} rounds")
