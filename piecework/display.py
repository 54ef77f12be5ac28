"""A run in the terminal: a line a round while it goes on, tables when it has ended.

All figures come from round records (`server_app.rounds`); a table by device class is also part of the report.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from device_profiles.profile import format_bytes
from server_app.records import RunDir

Record = dict[str, Any]
MOST_REASONS = 20
RECENT = 5  # rounds whose median is the expected duration of the next: the first one also traces and starts up


def round_line(record: Record, total_rounds: int, seconds: float) -> str:
    """One finished round; `seconds` is what a round takes at present."""
    parts = [f"round {record['round']}/{total_rounds}"]
    parts += [f"{key} {record[key]:.3f}" for key in ("accuracy", "loss") if record[key] is not None]
    parts.append(f"{record['answered']}/{record['asked']} clients ok")
    peak = peak_over_budget([record])
    if peak is not None:
        parts.append(f"peak {percent(peak, 1)} of budget")
    parts.append(f"{seconds:.1f} s/round")
    left = total_rounds - record["round"]
    if left > 0:
        parts.append(f"{format_seconds(seconds * left)} left")
    return "  ".join(parts)


class RoundProgress:
    """A live line on stderr, or one plain line a round where stderr is no terminal."""

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
        """Show a round that has ended."""
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


def summary_table(summary: Record, rounds: Sequence[Record]) -> Table:
    """How a run ended; the summary of one that could not start has little in it."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    evaluated = accuracies(rounds)
    rows = [
        ("status", summary["status"]),
        ("rounds", str(summary["rounds"])),
        ("accuracy", f"{evaluated[-1]:.2%} (best {max(evaluated):.2%})" if evaluated else "-"),
        ("clients", ", ".join(f"{key} {summary.get(f'clients_{key}', 0)}" for key in COUNTS)),
        ("bytes down", format_bytes(summary.get("bytes_down", 0))),
        ("bytes up", format_bytes(summary.get("bytes_up", 0))),
        ("time", format_seconds(summary["seconds"]) if "seconds" in summary else "-"),
        ("simulated time", simulated_time(rounds)),
    ]
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def memory_table(rounds: Sequence[Record]) -> Table:
    """Budgets, peaks and failures by device class."""
    table = Table(title="training memory by device class", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in MEMORY_COLUMNS:
        table.add_column(name, justify="left" if name == "device" else "right")
    for row in memory_rows(rounds):
        table.add_row(*map(Text, row))
    return table


@dataclass
class DeviceClass:
    """What the clients with one kind of device did in a run. Bytes; peaks are the largest."""

    name: str
    clients: set[int] = field(default_factory=set)
    budgets: set[int] = field(default_factory=set)
    predicted_peak: int = 0
    measured_peak: int = 0
    peak_over_budget: float | None = None
    asked: int = 0
    answered: int = 0


def device_classes(rounds: Iterable[Record]) -> list[DeviceClass]:
    """By name. A client whose device changes between rounds is in several."""
    classes: dict[str, DeviceClass] = {}
    for record in rounds:
        for client in record["clients"]:
            row = classes.setdefault(client["device"], DeviceClass(client["device"]))
            row.clients.add(client["client"])
            row.budgets.add(client["budget"])
            row.predicted_peak = max(row.predicted_peak, client["predicted_peak"])
            row.measured_peak = max(row.measured_peak, client["measured_peak"])
            row.asked += 1
            if client["status"] == "ok":
                row.answered += 1
                if client["budget"]:
                    row.peak_over_budget = max(row.peak_over_budget or 0.0, client["measured_peak"] / client["budget"])
    return [classes[name] for name in sorted(classes)]


COUNTS = ("asked", "answered", "failed")
MEMORY_COLUMNS = ("device", "clients", "budget", "predicted", "measured", "of budget", "asked", "ok", "failed")


def memory_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """`MEMORY_COLUMNS` as text, a row a device class."""
    enforced = is_enforced(rounds)
    return [
        (
            row.name,
            str(len(row.clients)),
            " to ".join(dict.fromkeys(format_bytes(budget) for budget in (min(row.budgets), max(row.budgets)))),
            format_bytes(row.predicted_peak) if row.predicted_peak else "-",
            format_bytes(row.measured_peak) if row.measured_peak else "-",
            percent(row.peak_over_budget, 1) if enforced else "not enforced",
            str(row.asked),
            str(row.answered),
            str(row.asked - row.answered),
        )
        for row in device_classes(rounds)
    ]


def closest_to_budget(rounds: Iterable[Record]) -> list[Record]:
    """Each client's record of the round in which it filled its budget most (else needed most), by device and client."""
    closest: dict[int, Record] = {}
    for row in (row for record in rounds for row in record["clients"]):
        old = closest.setdefault(row["client"], row)
        if fullness(row) > fullness(old):
            closest[row["client"]] = row
    return sorted(closest.values(), key=lambda row: (row["device"], row["client"]))


def fullness(row: Record) -> tuple[float, float]:
    """Shares of the budget: measured, and needed where it was refused."""
    budget = row["budget"] or 1
    return row["measured_peak"] / budget, row["needed"] / budget


def reasons(rounds: Iterable[Record]) -> list[tuple[str, str, str]]:
    """Why clients failed, the most frequent first; reasons that differ only in their numbers are one."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in rounds:
        for client in record["clients"]:
            if client["status"] != "ok":
                kind = (client["status"], re.sub(r"\d[\d.,]*", "#", client["reason"]))
                found[kind].append(f"{client['reason']} (client {client['client']}, round {record['round']})")
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    rows = [(status, str(len(texts)), texts[0]) for (status, _), texts in ranked[:MOST_REASONS]]
    rest = sum(len(texts) for _, texts in ranked[MOST_REASONS:])
    return [*rows, ("", str(rest), "other reasons")] if rest else rows


def accuracies(rounds: Iterable[Record]) -> list[float]:
    """Central accuracies of the rounds that were evaluated."""
    return [record["accuracy"] for record in rounds if record["accuracy"] is not None]


def totals(rounds: Iterable[Record]) -> dict[str, int]:
    """Sums over the rounds."""
    records = list(rounds)
    return {key: sum(r[key] for r in records) for key in (*COUNTS, "bytes_down", "bytes_up", "bytes_evaluation")}


def simulated_seconds(rounds: Iterable[Record]) -> float | None:
    """Seconds that the rounds would have taken on the fleet's devices; None where no round has a figure."""
    found = [record["simulated_seconds"] for record in rounds if "simulated_seconds" in record]
    return sum(found) if found else None


def simulated_time(rounds: Iterable[Record]) -> str:
    """The same for people."""
    seconds = simulated_seconds(rounds)
    return "-" if seconds is None else format_seconds(seconds)


def is_enforced(rounds: Iterable[Record]) -> bool:
    """Whether budgets were enforced in every round."""
    return all(record["enforced"] for record in rounds)


def peak_over_budget(rounds: Sequence[Record]) -> float | None:
    """The largest measured peak as a share of its budget; None where nobody trained or nothing was enforced."""
    if not is_enforced(rounds):
        return None
    trained = (c for record in rounds for c in record["clients"] if c["status"] == "ok" and c["budget"])
    return max((c["measured_peak"] / c["budget"] for c in trained), default=None)


def how_it_ended(run_dir: RunDir, rounds: Sequence[Record]) -> tuple[str, str, float]:
    """Status, reason and seconds of a run. A summary older than the records is that of an attempt before a resumption."""
    summary = run_dir.summary()
    seconds = float(sum(record["seconds"] for record in rounds))
    if summary is None or summary["rounds"] != len(rounds):
        return "unfinished", "", seconds
    # The summary also counts the start, but of a resumed run only the last part.
    return summary["status"], summary["reason"], max(summary["seconds"], seconds)


def percent(share: float | None, digits: int = 2) -> str:
    """`-` for None. Only 1 itself is shown as 100 %: a peak just over its budget may not look as if it fitted."""
    if share is None:
        return "-"
    step = 10**-digits
    near = 100 * share if share == 1 or abs(100 * share - 100) >= step else 100 + (step if share > 1 else -step)
    return f"{near:.{digits}f}%"


def format_seconds(seconds: float) -> str:
    """`9.4 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
