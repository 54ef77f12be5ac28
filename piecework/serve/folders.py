"""Find the folders of runs below a folder, and read their files without leaving it.

A request names a run by what was found here, and never a path. Links are not followed, wherever they lead.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from piecework.commands.console import printable
from piecework.server_app.records import CheckpointError

MARKS = {"settings.toml", "rounds.jsonl", "summary.json", "checkpoint"}  # a folder with one of these is a run's
# All files of a run that are read; `lock` is opened by server_app/run_lock.py.
SMALL = ("settings.toml", "summary.json", "final.json", "models.json", "coverage.json", "packages.json")
OTHERS = ("rounds.jsonl", "model.safetensors", "lock", "now.json")
LARGEST = 64 * 2**20  # bytes of a small file
DEEPEST = 6  # folders below each other
MOST = 20_000  # folders that are looked into
LINK = "links are not followed, so that nothing outside of the served folder is shown"


@dataclass(frozen=True)
class Found:
    """The folder of a run. `name` is its name in addresses; `damage` says why it cannot be looked into, if it cannot."""

    name: str
    path: Path
    damage: str = ""


def find_runs(root: Path) -> tuple[dict[str, Found], str]:
    """Return the runs in or below `root` by name, and what was left out, in words. Raises OSError if it cannot be listed.

    `root` is resolved. The folder of a run has no further runs in it.
    """
    runs: dict[str, Found] = {}
    for looked, found in enumerate(_walk(root, root, 0)):
        if looked == MOST:
            return runs, f"Only the first {MOST:,} folders were looked into: serve a folder further below."
        if found is not None:
            runs[found.name] = found
    return runs, ""


def _walk(root: Path, folder: Path, depth: int) -> Iterator[Found | None]:
    """Yield once for each folder: the run that it is, or None."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        if folder == root:
            raise
        yield Found(name_of(root, folder), folder, f"{folder} cannot be read: {error.strerror}")
        return
    if MARKS & {entry.name for entry in entries}:
        yield Found(name_of(root, folder), folder)
        return
    yield None
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink():
            if leads_out(path, root):
                yield Found(name_of(root, path), path, f"{path} is a link that leads out of {root}: {LINK}")
        elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and depth < DEEPEST:
            yield from _walk(root, path, depth + 1)


def leads_out(path: Path, root: Path) -> bool:
    """Return whether a link leads to a folder outside of `root`; what it leads to within is found at its own place."""
    try:
        return path.is_dir() and not path.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # a circle of links
        return False


def name_of(root: Path, folder: Path) -> str:
    """Return a run's name: its path below `root`, with a digest if that has characters which no address can have."""
    exact = folder.relative_to(root).as_posix() if folder != root else folder.name
    shown = printable(exact).replace("\n", "?")
    return shown if shown == exact else f"{shown}~{hashlib.sha256(os.fsencode(exact)).hexdigest()[:7]}"


def require_plain(folder: Path) -> None:
    """Raise CheckpointError unless all files of a run that are read are plain files, and no links."""
    for name in (*SMALL, *OTHERS):
        try:
            found = (folder / name).lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
        if stat.S_ISLNK(found.st_mode):
            raise CheckpointError(f"{folder / name} is a link: {LINK}")
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{folder / name} is not a file")
        if name in SMALL and found.st_size > LARGEST:
            raise CheckpointError(f"{folder / name} has {found.st_size:,} bytes: at most {LARGEST:,} are read")


def open_plain(path: Path) -> int:
    """Open a plain file to read it. Raises OSError, also for a link or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


def signature(folder: Path, names: tuple[str, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    """Return what changes whenever one of a folder's files is replaced or written: inode, bytes and time of each."""
    return tuple(_signature(folder / name) for name in names)


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
