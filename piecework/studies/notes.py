"""What is noted beside a run's folder, and in which state that shows a run to be.

seed-1-0f3c9a1b/          the folder of the run, as every run's
seed-1-0f3c9a1b.json      the note: which run it is, with which commits on which machines it was started, why it failed
seed-1-0f3c9a1b.toml      the settings that it was started with
seed-1-0f3c9a1b.log       what its processes printed
"""

import json
import platform
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

from piecework.client_app.disk import write_atomically
from piecework.device_profiles.documents import read_json
from piecework.device_profiles.profile import usable_cpus
from piecework.server_app.records import RunDir
from piecework.server_app.run_folder import has_completed
from piecework.server_app.run_lock import writer
from piecework.studies.failures import reason_of, result_of
from piecework.studies.jobs import Job

State = Literal["recorded", "done", "running", "failed", "broken", "damaged", "begun", "missing"]


class NoteError(ValueError):
    """A note cannot be read. The message names its file."""


@dataclass(frozen=True)
class Note:
    """Which run lies beside this note: `job` is its identity. `failed` is the reason why it failed, empty if it did not.

    `final`: the failure is a result, as the run itself says that nobody can train or that it diverged (failures.py).
    `watched`: seconds for which its processes were watched, and `core`: how much of a core's time they had in these.
    """

    job: dict[str, Any]
    commits: list[str] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)
    failed: str = ""
    final: bool = False
    watched: float = 0.0
    core: float = 0.0

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the note of a job that was never started."""
        return cls(job.identity)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the note beside a run's folder, or None if there is none. Raises NoteError."""
        path = beside(folder, "json")
        try:
            values = read_json(path.read_text(encoding="utf-8"))
            own = {each.name: values.pop(each.name) for each in fields(cls)[1:] if each.name in values}
            if "hash" not in values:
                raise ValueError("it does not say which run it is")
            note = cls(values, **own)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise NoteError(
                f"{path} is damaged: {error}. Move it and the run's folder away, and `run` starts it again"
            ) from None
        if note.failed and "final" not in own:  # of before failures were told apart
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
        """Write the note beside a run's folder, in one table."""
        values = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        write_atomically(beside(folder, "json"), json.dumps({**self.job, **values}, indent=1).encode())


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
    except NoteError:
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
    except NoteError as error:
        return str(error)
    return ""


def this_machine() -> str:
    """Return the processor's model and vectors, the cores that this process may use, and the version of torch.

    With other vectors a sum has another order, and so a run another result.
    """
    cpuinfo = Path("/proc/cpuinfo")
    named = processor(cpuinfo.read_text("utf-8") if cpuinfo.is_file() else "")
    return f"{named}, {usable_cpus()} cores, torch {version('torch')}"


def processor(cpuinfo: str) -> str:
    """Return the model of a processor, and whether it has AVX-512 or AVX2, from the text of /proc/cpuinfo."""
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    flags = known.get("flags", "").split()
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    model = known.get("model name") or platform.processor() or platform.machine()
    return f"{model} with {vectors}" if vectors else model
