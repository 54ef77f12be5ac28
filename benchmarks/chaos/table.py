"""What was tried and what came of it, as a Markdown table."""

from collections import Counter
from pathlib import Path

from benchmarks.chaos.notebook import noted

Row = tuple[str, int, str]  # what was tried, how often, and what came of it


def table(folder: Path) -> str:
    """Return the table of all that is noted in a folder."""
    rows = [
        *kill_rows(folder),
        *disk_rows(folder),
        *came_rows(folder, "clock", "a clock that jumps"),
        *damage_rows(folder),
    ]
    lines = [f"| {tried} | {count:,} | {came} |" for tried, count, came in rows]
    return "\n".join(["| what was tried | how often | what came of it |", "|---|---|---|", *lines])


def kill_rows(folder: Path) -> list[Row]:
    """Return a row for each engine whose runs were killed."""
    rows = []
    for engine in dict.fromkeys(each["engine"] for each in noted(folder, kind="kill")):
        runs = noted(folder, kind="kill", engine=engine)
        kills = sum(len(run["kills"]) for run in runs)
        completed, same = sum(run["completed"] for run in runs), sum(not run["differs"] for run in runs)
        left = sum(bool(run["left"]) for run in runs)
        came = f"{completed} completed, {same} bit-identical to the unbroken run; {left} left processes or files behind"
        systems = len({run["system"] for run in runs})
        rows.append((f"`{engine}`: runs of {systems} systems killed ({kills} kills) and resumed", len(runs), came))
    return rows


def disk_rows(folder: Path) -> list[Row]:
    """Return the rows of full disks."""
    whole = came_rows(folder, "disk", "a disk that is full from one of a run's writes on")
    return whole + came_rows(folder, "real disk", "a file system that is too small (tmpfs)")


def damage_rows(folder: Path) -> list[Row]:
    """Return a row for each kind of file that was damaged."""
    kinds = dict.fromkeys(each["file"] for each in noted(folder, kind="damage"))
    return [row for kind in kinds for row in came_rows(folder, "damage", f"damaged: {kind}", file=kind)]


def came_rows(folder: Path, kind: str, tried: str, **like: str) -> list[Row]:
    """Return one row with what came of trials of a kind, unless there are none."""
    found = Counter(each["came"] for each in noted(folder, kind=kind, **like))
    return (
        [(tried, found.total(), ", ".join(f"{count} {came}" for came, count in found.most_common()))] if found else []
    )
