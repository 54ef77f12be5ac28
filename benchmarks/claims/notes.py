"""What the harness notes beside a run's folder, and in which state that shows a run to be.

seed-1-0f3c9a1b/          the folder of the run, as every run's
seed-1-0f3c9a1b.json      the note: which run it is, with which commits on which machines it was started, why it failed
seed-1-0f3c9a1b.toml      the settings that it was started with
seed-1-0f3c9a1b.log       what its processes printed
"""

import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

from benchmarks.claims.definition import ClaimError
from benchmarks.claims.failures import reason_of, result_of
from benchmarks.claims.jobs import Job
from piecework.client_app.disk import write_atomically
from piecework.device_profiles.documents import read_json
from piecework.device_profiles.profile import usable_cpus
from piecework.server_app.records import RunDir
from piecework.server_app.run_folder import has_completed
from piecework.server_app.run_lock import writer

ROOT = Path(__file__).resolve().parents[2]
State = Literal["recorded", "done", "running", "failed", "broken", "damaged", "begun", "missing"]


@dataclass(frozen=True)
class Note:
    """Which run lies beside this note. `failed` is the reason why it failed, empty if it did not.

    `final`: the failure is a result, as the run itself says that nobody can train or that it diverged (failures.py).
    `watched`: seconds for which the harness watched its processes, and `core`: how much of a core's time they had in these.
    """

    claim: str
    case: str
    row: str
    searched: bool
    seed: int
    rate: float | None
    hash: str
    commits: list[str] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)
    failed: str = ""
    final: bool = False
    watched: float = 0.0
    core: float = 0.0

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the note of a job that was never started."""
        return cls(job.claim, job.case, job.row, job.searched, job.seed, job.rate, job.hash)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the note beside a run's folder, or None if there is none. Raises ClaimError."""
        path = beside(folder, "json")
        try:
            values = read_json(path.read_text(encoding="utf-8"))
            note = cls(**values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ClaimError(
                f"{path} is damaged: {error}. Move it and the run's folder away, and `run` starts it again"
            ) from None
        if note.failed and "final" not in values:  # of before failures were told apart
            return replace(note, **told_apart(folder, note.failed))
        return note

    def started(self, commit: str, machine: str) -> Self:
        """Return the note after another start, which may bring a failed run to its end."""
        commits, machines = (
            list(dict.fromkeys([*old, new])) for old, new in ((self.commits, commit), (self.machines, machine))
        )
        return replace(self, commits=commits, machines=machines, failed="", final=False)

    @property
    def share(self) -> float | None:
        """How much of a core the run's processes had, 1 on a quiet machine; None if nothing watched them."""
        return self.core / self.watched if self.watched else None

    def write(self, folder: Path) -> None:
        """Write the note beside a run's folder."""
        write_atomically(beside(folder, "json"), json.dumps(asdict(self), indent=1).encode())


def told_apart(folder: Path, failed: str) -> dict[str, Any]:
    """Return `failed` and `final` of a note that has only a reason: a result if that is the reason of the run's summary."""
    run_dir = RunDir(folder)
    result = result_of(run_dir) if failed == reason_of(run_dir) else ""
    return {"failed": result or failed, "final": bool(result)}


def beside(folder: Path, suffix: str) -> Path:
    """Return the file of this suffix beside a run's folder, whose name may have a point in it."""
    return folder.with_name(f"{folder.name}.{suffix}")


def state_of(folder: Path) -> State:
    """Return the state of a run: `begun` has a round to go on from, `missing` has none.

    That it is `recorded` elsewhere, no folder shows. One that `failed` has a result, one that is `broken` failed for a reason
    that says nothing of the claim. Of one that is `damaged` the note cannot be read.
    """
    run_dir = RunDir(folder)
    try:
        note = Note.read(folder)
    except ClaimError:
        return "damaged"
    if writer(folder) is not None:
        return "running"
    if has_completed(run_dir):
        return "done"
    if note is not None and note.failed:
        return "failed" if note.final else "broken"
    return "begun" if run_dir.last_complete_round() else "missing"


def damage_beside(folder: Path) -> str:
    """Return what is wrong with the note beside a run's folder; empty if it can be read, or there is none."""
    try:
        Note.read(folder)
    except ClaimError as error:
        return str(error)
    return ""


def folders(out: Path, claim: str) -> Iterator[Path]:
    """Yield the folders of all runs of a claim below `out`, also of those that wrote none, by name."""
    for path in sorted(each for each in (out / claim).glob("*/*") if each.is_dir()):
        names = {each.name.removesuffix(".json") for each in path.iterdir() if each.is_dir() or each.suffix == ".json"}
        yield from (path / name for name in sorted(names))


def this_commit() -> str:
    """Return the commit of this checkout, `+changes` if code or presets differ from it, `unknown` outside of one."""
    found = _git("rev-parse", "--short=10", "HEAD")
    if found is None:
        return "unknown"
    return f"{found}+changes" if _git("status", "--porcelain", "--", "*.py", "*.toml") else found


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def this_machine() -> str:
    """Return the processor's model, the cores that this process may use, and the version of torch."""
    return f"{_processor()}, {usable_cpus()} cores, torch {version('torch')}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
