"""Show a run in the terminal while it runs, with a line per round."""

from statistics import median
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from piecework.display import Record, accuracy_name, format_seconds, peak_over_budget, percent

RECENT = 5  # rounds whose median is the expected duration of the next; the first round also traces and starts up


def round_line(record: Record, total_rounds: int, seconds: float) -> str:
    """Return the line of a finished round; `seconds` is the present duration of a round."""
    parts = [f"round {record['round']}/{total_rounds}"]
    if (stages := record.get("modules") or record.get("blocks") or 1) > 1:
        parts.append(f"{record['stage']} of {stages}")
    parts += filter(None, [accuracy_now(record)])
    if record["loss"] is not None:
        parts.append(f"loss {record['loss']:.3f}")
    parts.append(f"{record['answered']}/{record['asked']} clients ok")
    peak = peak_over_budget([record])
    if peak is not None:
        parts.append(f"peak {percent(peak, 1)} of budget")
    parts.append(f"{seconds:.1f} s/round")
    left = total_rounds - record["round"]
    if left > 0:
        parts.append(f"{format_seconds(seconds * left)} left")
    return "  ".join(parts)


def accuracy_now(record: Record) -> str:
    """Return the accuracy on the test data, else on the clients'; empty if neither was evaluated."""
    for name, clean, attacked in (
        (accuracy_name([record]), "accuracy", "adversarial_accuracy"),
        ("accuracy on the clients", "client_accuracy", "client_adversarial_accuracy"),
    ):
        if record[clean] is not None:
            under = f", under attack {percent(record[attacked], 1)}" if record.get(attacked) is not None else ""
            return f"{name} {percent(record[clean], 1)}{under}"
    return ""


class RoundProgress:
    """A live line on stderr, or one plain line per round if stderr is no terminal."""

    def __init__(self, total_rounds: int, console: Console | None = None) -> None:
        self.total_rounds = total_rounds
        self.console = console or Console(stderr=True)
        self.recent: list[float] = []
        self.progress: Progress | None = None
        self.task = TaskID(0)

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            one_line = Column(no_wrap=True, overflow="ellipsis")
            text = TextColumn("{task.description}", markup=False, table_column=one_line)
            self.progress = Progress(
                SpinnerColumn(finished_text=" "), BarColumn(16), TimeElapsedColumn(), text, console=self.console
            )
            first = "waiting for the clients, then round 1"
            self.task = self.progress.add_task(first, total=self.total_rounds)
            self.progress.start()
        return self

    def update(self, record: Record) -> None:
        """Show a finished round."""
        self.recent = [*self.recent, float(record["seconds"])][-RECENT:]
        line = round_line(record, self.total_rounds, median(self.recent))
        if self.progress is None:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self.progress.update(self.task, completed=record["round"], description=line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()
