"""A disk that is full from the N-th write of a run on, for every N: what is said, and whether the run is then the unbroken one.

A write is a file that is written, synced, renamed or a folder that is made, below the folder of the run: of a checkpoint, of a
client's store, of a record, and of all else. Half of what was to be written is on the disk when it is full. With `--real` the
folder is a tmpfs of a few bytes more each time, which only root can mount, and the resumed run has a larger one.
"""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from benchmarks.chaos.broken import said_by
from benchmarks.chaos.children import HANGS, Ended, run
from benchmarks.chaos.notebook import note, noted
from benchmarks.chaos.systems import dataset_in, differing, results, settings_of, words_for, words_to_resume
from piecework.client_app import frozen, store
from piecework.server_app import records
from piecework.server_app.records import RunDir

SHORT = {"num-rounds": 2, "clients": 2, "clients-per-round": 0, "training.lr-schedule": "constant"}
SYSTEM = "spafl"  # its clients keep states


class Disk:
    """Counts the writes below a folder, and fails from the `number`-th on (0 = never). Each is noted in `log`."""

    def __init__(self, folder: Path, number: int, log: Path) -> None:
        self.folder, self.number, self.count = folder, number, 0
        self.log = log.open("a", encoding="utf-8")

    def use(self, path: Any, what: str, half: Callable[[], object] = lambda: None) -> None:
        """Count a write. Raises OSError if the disk is full, after `half` of it was done."""
        path = Path(os.fspath(path))
        if not path.is_relative_to(self.folder):
            return
        self.count += 1
        self.log.write(f"{what} {path.relative_to(self.folder)}\n")
        self.log.flush()
        if self.number and self.count >= self.number:
            with suppress(OSError):
                half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class Writer:
    """An open file on such a disk."""

    def __init__(self, file: Any, path: Path, disk: Disk) -> None:
        self.__dict__.update(file=file, path=path, disk=disk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, content: Any) -> Any:
        """Write, or half of it."""
        part = (
            bytes(content)[: len(bytes(content)) // 2] if not isinstance(content, str) else content[: len(content) // 2]
        )
        self.disk.use(self.path, "write", lambda: (self.file.write(part), self.file.flush()))
        return self.file.write(content)


def fill(disk: Disk) -> None:
    """Let this process write on such a disk."""
    opened, fdopen, text = Path.open, os.fdopen, Path.write_text

    def open_path(self: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        file = opened(self, mode, *arguments, **named)
        below = self.is_relative_to(disk.folder) and set(mode) & set("wax")
        return Writer(file, self, disk) if below and self.name != "lock" else file

    def open_descriptor(descriptor: int, *arguments: Any, **named: Any) -> Any:
        file, path = fdopen(descriptor, *arguments, **named), Path(f"/proc/self/fd/{descriptor}").readlink()
        return Writer(file, path, disk) if path.is_relative_to(disk.folder) and "w" in str(arguments) else file

    def write_text(self: Path, content: str, *arguments: Any, **named: Any) -> int:
        disk.use(self, "write", lambda: text(self, content[: len(content) // 2]))
        return text(self, content, *arguments, **named)

    def save(write: Callable[..., None], arrays: Any, path: Any, **named: Any) -> None:
        try:
            disk.use(path, "write", lambda: Path(path).write_bytes(b"half"))
        except OSError:  # as safetensors says it
            full = f"I/O error: {os.strerror(errno.ENOSPC)} (os error {errno.ENOSPC})"
            raise SafetensorError(f"Error while serializing: {full}") from None
        write(arrays, path, **named)

    changes: dict[tuple[Any, str], Any] = {
        (Path, "open"): open_path,
        (Path, "write_text"): write_text,
        (os, "fdopen"): open_descriptor,
        (os, "fsync"): _counted(os.fsync, lambda fd: disk.use(Path(f"/proc/self/fd/{fd}").readlink(), "sync")),
        (os, "replace"): _counted(os.replace, lambda old, new: disk.use(new, "rename")),
        (os, "mkdir"): _counted(os.mkdir, lambda path, *_: disk.use(path, "folder")),
        **{(module, "save_file"): partial(save, module.save_file) for module in (records, store, frozen)},
    }
    for (owner, name), change in changes.items():
        setattr(owner, name, change)


def _counted(original: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        before(*arguments)
        return original(*arguments, **named)

    return counted


def full_disks(folder: Path, stride: int, only: list[str]) -> None:
    """Try each `stride`-th write of a run, or those whose path has one of some words, and note what came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    run_dir, writes = folder / "full", folder / "writes.txt"
    begin = words_for(settings_of(SYSTEM, "local", dataset_in(folder)) | SHORT, folder, run_dir.name)
    shutil.rmtree(run_dir, ignore_errors=True)
    writes.unlink(missing_ok=True)
    require(run(begin, folder / "full.txt", lambda: fill(Disk(run_dir, 0, writes))))
    expected, lines = results(run_dir), writes.read_text("utf-8").splitlines()
    chosen = [n for n, line in enumerate(lines, 1) if not only or any(word in line for word in only)]
    for number in chosen[::stride]:
        if noted(folder, kind="disk", number=number):
            continue
        shutil.rmtree(run_dir, ignore_errors=True)
        ended = run(begin, folder / "full.txt", lambda n=number: fill(Disk(run_dir, n, writes)))  # type: ignore[misc]
        came = after_space(folder, run_dir, ended, begin, expected)
        note(folder, kind="disk", number=number, write=lines[number - 1], came=came, said=what_was_said(ended))


def require(ended: Ended) -> None:
    """Raise SystemExit unless a process succeeded."""
    if ended.code:
        raise SystemExit(f"exit code {ended.code}:\n{ended.said}")


def after_space(folder: Path, run_dir: Path, ended: Ended, begin: list[str], expected: dict[str, Any]) -> str:
    """Go on with a run where there is room again. Returns what came of both, in a few words; FAULT is what may not be."""
    said = said_by(ended)
    if ended.seconds >= HANGS or ended.code not in (0, 1, 2):
        return f"FAULT: exit code {ended.code}"
    if "Traceback" in said:
        return "FAULT: traceback"
    if ended.code and "No space left" not in said:
        return "FAULT: no reason"
    if ended.code and str(run_dir) not in said:
        return "FAULT: no file named"
    found = RunDir(run_dir)
    if ended.code:
        again = words_to_resume(run_dir) if found.has_begun() else begin
        if (resumed := run(again, folder / "again.txt")).code:
            return f"FAULT: not resumed: {said_by(resumed)[-300:]}"
    if (differs := differing(expected, results(run_dir))) and (told := without_room(run_dir)):
        return f"went on without {told} whose disk was full, as the records say"
    if differs:
        return f"FAULT: {', '.join(differs)} differ"
    return "ended, named, resumed to the same" if ended.code else "went on to the same"


def without_room(run_dir: Path) -> str:
    """Return which clients' tasks failed for want of room, as the records of a run have it; empty if none did."""
    clients = [client for record in RunDir(run_dir).rounds() for client in record["clients"]]
    return "clients" if any("No space left" in client["reason"] for client in clients) else ""


def what_was_said(ended: Ended) -> str:
    """Return what a process said of the disk."""
    said = said_by(ended)
    place = max(0, said.find("No space left") - 200)
    return said[place : place + 300]


@contextmanager
def mounted(place: Path, size: int) -> Iterator[None]:
    """Mount a tmpfs of so many bytes in the body; only root can."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def real_disks(folder: Path, step: int) -> None:
    """Run on file systems of `step`, twice `step`, ... bytes until one is large enough; resume on a larger one."""
    folder.mkdir(parents=True, exist_ok=True)
    place, size, settings = folder / "mounted", step, settings_of(SYSTEM, "local", dataset_in(folder)) | SHORT
    begin = words_for(settings, place, "full")
    with mounted(place, 2**28):
        require(run(begin, folder / "full.txt"))
        expected = results(place / "full")
    while not noted(folder, kind="real disk", came="large enough", step=step):
        if not noted(folder, kind="real disk", size=size, step=step):
            with mounted(place, size):
                ended = run(begin, folder / "full.txt")
                if ended.code:
                    subprocess.run(["mount", "-o", f"remount,size={2**28}", str(place)], check=True)
                came = after_space(folder, place / "full", ended, begin, expected)
                came = "large enough" if came == "went on to the same" and "No space" not in ended.said else came
            note(folder, kind="real disk", size=size, step=step, came=came, said=what_was_said(ended))
        size += step
