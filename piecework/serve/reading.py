"""The runs of a folder as the pages show them, read again only where files have changed."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from piecework.report.read_records import check_round, read_final, read_summary, with_details
from piecework.serve.fold import Fold
from piecework.serve.folders import SMALL, Found, find_runs, open_plain, require_plain, signature
from piecework.server_app.records import CheckpointError, RunDir, parse_round
from piecework.server_app.run_lock import LOCK_FILE, holder
from piecework.training.settings import Scalar

Record = dict[str, Any]
Shown = TypeVar("Shown")
LONGEST_LINE = 256 * 2**20  # bytes of a round's record
SECONDS = 1.0  # for which a list reads records that it has not read yet


class Rounds:
    """The records of a file that grows: `fold` has those read so far, `damage` says which line is damaged, if one is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin()

    def begin(self) -> None:
        """Forget what was read."""
        self.fold, self.damage = Fold(), ""
        self.file: tuple[int, int] | None = None  # device and inode
        self.seen = (0, 0)  # bytes and time of the file when it was read last
        self.offset, self.lines, self.last_round = 0, 0, 0

    def read(self) -> None:
        """Read what was appended, or all if the file is another one. Raises OSError."""
        try:
            descriptor = open_plain(self.path)
        except FileNotFoundError:
            self.begin()
            return
        with os.fdopen(descriptor, "rb") as content:
            found = os.fstat(content.fileno())
            seen, file = (found.st_size, found.st_mtime_ns), (found.st_dev, found.st_ino)
            if seen == self.seen and file == self.file:
                return
            if file != self.file or found.st_size <= self.seen[0]:
                self.begin()
            self.file, self.seen, self.damage = file, seen, ""
            content.seek(self.offset)
            # a last line without its end is being written
            while (line := content.readline(LONGEST_LINE)).endswith(b"\n"):
                try:
                    self._add(line)
                except ValueError as error:
                    self.damage = str(error)
                    return
            if len(line) == LONGEST_LINE:
                self.damage = f"{self.path}, line {self.lines + 1}, is damaged: it has no end"

    def _add(self, line: bytes) -> None:
        where = f"{self.path}, line {self.lines + 1}"
        try:
            record = parse_round(line[:-1], self.last_round)
        except ValueError as error:
            raise CheckpointError(f"{where}, is damaged: {error}") from error
        check_round(record, where)
        self.fold.add(record)
        self.offset, self.lines, self.last_round = self.offset + len(line), self.lines + 1, record["round"]


class ServedRun:
    """A run as it was read last.

    `damage` says what is wrong with its files; what else is known is shown nevertheless. `writer` is the process that is
    writing it, in words, or None.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        self.run_dir = RunDir(found.path)
        self.rounds = Rounds(found.path / "rounds.jsonl")
        self.settings: Mapping[str, Scalar] = {}
        self.summary: Record | None = None
        self.final: Record | None = None
        self.files: object = None  # the signature of the small files that were read
        self.files_damage, self.damage = "", found.damage
        self.writer: str | None = None
        self.released: object = None  # the signature of a lock that nobody holds
        self.begun = 0.0  # when its settings were written, in Unix time: when it was started or resumed
        self.is_read = False

    @property
    def fold(self) -> Fold:
        """The rounds so far."""
        return self.rounds.fold

    @property
    def version(self) -> str:
        """A text that changes with what curves and tables show."""
        return f"{self.rounds.file}:{self.rounds.seen}:{hash(self.files)}:{self.damage}"

    def read(self) -> None:
        """Read what has changed. Damage is kept, and not raised."""
        self.is_read = True
        if self.found.damage:
            return
        try:
            require_plain(self.found.path)
            self.writer = self._writer()
            self._read_small()
            self.rounds.read()
            self.damage = self.files_damage or self.rounds.damage or self._cut_off()
        except OSError as error:
            self.damage = f"{error.filename or self.found.path} cannot be read: {error.strerror or error}"
        except CheckpointError as error:
            self.damage = str(error)

    def _writer(self) -> str | None:
        now = signature(self.found.path, (LOCK_FILE,))
        if now in ((None,), self.released):
            return None
        found = holder(self.found.path)
        self.released = None if found else now
        return found

    def _read_small(self) -> None:
        now = signature(self.found.path, SMALL)
        if now == self.files:
            return
        self.files, self.settings, damages = now, {}, list[str]()
        if now[0] is None:
            damages.append("settings.toml is missing: what this run was started with is not known")
        else:
            self.begun = now[0][2] / 1e9
            self.settings = self._tried(self.run_dir.settings, damages) or {}
        self.summary = self._tried(lambda: read_summary(self.run_dir), damages)
        self.final = self._tried(lambda: read_final(self.run_dir), damages)
        self.files_damage = "; ".join(damages)

    def _tried(self, read: Callable[[], Shown], damages: list[str]) -> Shown | None:
        """Return what `read` returns; None if that is damaged, which is added to `damages`."""
        try:
            with with_details(self.run_dir):
                return read()
        except (OSError, ValueError) as error:
            damages.append(str(error))
            return None

    def _cut_off(self) -> str:
        """Say that rounds are missing which the summary counts."""
        counted = (self.summary or {}).get("rounds", 0)
        if self.writer or self.rounds.lines >= counted:
            return ""
        found = f"{self.rounds.lines} whole records, and summary.json counts {counted} rounds"
        return f"{self.rounds.path} is damaged: it has {found}"

    @property
    def state(self) -> str:
        """One of damaged, reading (before it was read), running, interrupted; else the summary's: completed, failed .."""
        if self.damage:
            return "damaged"
        if not self.is_read:
            return "reading"
        if self.writer:
            return "running"
        # a summary older than the records belongs to an earlier attempt
        if self.summary is None or self.summary["rounds"] != self.rounds.lines:
            return "interrupted"
        return str(self.summary["status"])


class Runs:
    """The runs in a folder. Several threads may ask; what is read for one of them, no other changes meanwhile."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.runs: dict[str, ServedRun] = {}
        self.left_out = ""
        self.lock = threading.Lock()

    def list_all(self, show: Callable[[ServedRun], Shown], seconds: float = SECONDS) -> list[Shown]:
        """Return what `show` makes of all runs, those begun last first.

        Runs that were not read yet are read for at most about so many seconds; a later call goes on. Raises OSError if the
        folder cannot be listed.
        """
        with self.lock:
            self._find()
            deadline = time.monotonic() + seconds
            for run in sorted(self.runs.values(), key=lambda run: run.is_read, reverse=True):
                if not run.is_read and time.monotonic() > deadline:
                    break
                run.read()
            ordered = sorted(self.runs.values(), key=lambda run: (-run.begun, run.found.name))
            return [show(run) for run in ordered]

    def look(self, name: str, show: Callable[[ServedRun], Shown]) -> Shown | None:
        """Return what `show` makes of the run of a name, read now, or None. Raises OSError, and what `show` raises."""
        with self.lock:
            if name not in self.runs:
                self._find()
            if (run := self.runs.get(name)) is None:
                return None
            run.read()
            return show(run)

    def _find(self) -> None:
        found, self.left_out = find_runs(self.root)
        self.runs = {
            name: known if (known := self.runs.get(name)) and known.found == each else ServedRun(each)
            for name, each in found.items()
        }
