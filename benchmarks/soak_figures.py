"""What `benchmarks.soak` measures of its processes, and by how much it grew."""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

SKIPPED = 0.2  # of the rounds: growth is counted after them


@dataclass(frozen=True)
class Sample:
    """The state after a round. `memory` (bytes) and `open_files` are by process: 0 is the server's, others have their pid."""

    round: int
    memory: dict[int, int]
    open_files: dict[int, int]
    threads: int
    objects: int
    files: int  # of the run
    bytes: int  # of these files, without rounds.jsonl and run.log, which have lines for each round
    temporary: int  # files in the temporary folder


def measure(server_round: int, pids: Iterable[int], folder: Path, temporary: Path) -> Sample:
    """Measure this process, its workers with these pids, and the files of a run. What has just ended counts as gone."""
    gc.collect()
    memory, open_files = dict[int, int](), dict[int, int]()
    for pid in (0, *pids):
        try:
            process = psutil.Process(pid or None)
            memory[pid], open_files[pid] = process.memory_info().rss, process.num_fds()
        except psutil.Error:
            continue
    found = [path for path in folder.rglob("*") if path.is_file()]
    sizes = sum(path.stat().st_size for path in found if path.name not in ("rounds.jsonl", "run.log"))
    return Sample(
        server_round,
        memory,
        open_files,
        psutil.Process().num_threads(),
        len(gc.get_objects()),
        len(found),
        sizes,
        sum(1 for _ in temporary.rglob("*")),
    )


def figures(samples: Sequence[Sample]) -> dict[str, tuple[list[int], list[float]]]:
    """Return each figure by name, with the rounds of its samples. A worker counts if it was there for half of the run."""
    rounds = [sample.round for sample in samples]
    found = {
        "server, MB": (rounds, [sample.memory[0] / 1e6 for sample in samples]),
        "server, open files": (rounds, [float(sample.open_files[0]) for sample in samples]),
        "server, threads": (rounds, [float(sample.threads) for sample in samples]),
        "server, objects / 1,000": (rounds, [sample.objects / 1000 for sample in samples]),
        "files of the run": (rounds, [float(sample.files) for sample in samples]),
        "MB of these": (rounds, [sample.bytes / 1e6 for sample in samples]),
        "temporary files": (rounds, [float(sample.temporary) for sample in samples]),
    }
    pids = [pid for pid in samples[-1].memory if pid]
    lived = [pid for pid in pids if sum(pid in sample.memory for sample in samples) > len(samples) / 2]
    for number, pid in enumerate(lived, start=1):
        there = [sample for sample in samples if pid in sample.memory]
        since = [sample.round for sample in there]
        found[f"worker {number}, MB"] = since, [sample.memory[pid] / 1e6 for sample in there]
        found[f"worker {number}, open files"] = since, [float(sample.open_files[pid]) for sample in there]
    return found


def growth(rounds: Sequence[int], values: Sequence[float]) -> float:
    """Return by how much a figure grows in 1,000 rounds: the slope of a line through it, without the first fifth of the run."""
    counted = [(number, value) for number, value in zip(rounds, values, strict=True) if number > SKIPPED * rounds[-1]]
    if len(counted) < 2:
        return 0.0
    return float(np.polyfit(*zip(*counted, strict=True), 1)[0] * 1000)


def table(samples: Sequence[Sample], shown: Sequence[int] = (100, 1000, 2500)) -> str:
    """Return the figures as a table: after some rounds and at the end, the largest, and the growth in 1,000 rounds."""
    ends = [number for number in shown if number < samples[-1].round] + [samples[-1].round]
    lines = ["| | " + " | ".join(f"round {number}" for number in ends) + " | largest | in 1,000 rounds |"]
    lines.append("|---" * (len(ends) + 3) + "|")
    for name, (rounds, values) in figures(samples).items():
        at = [next((v for r, v in zip(rounds, values, strict=True) if r >= number), values[-1]) for number in ends]
        cells = [f"{value:,.2f}" for value in [*at, max(values)]] + [f"{growth(rounds, values):+.3f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
