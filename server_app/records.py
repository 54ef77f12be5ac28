"""The folder of a run: settings, one JSON object per round, checkpoints, and the model.

`rounds.jsonl` is the source of truth for everything that is reported; each of its lines ends with a checksum. A checkpoint is
written under a temporary name, synced and renamed, so a process that is killed at any moment leaves the previous checkpoint
intact. Checkpoints have a schema version and a manifest with the checksum of each of their files. No file is a pickle.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import tomli_w
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from piecework.client_app.disk import StorageError, sync, write_atomically, writing
from piecework.client_app.seal import MANIFEST, damage, seal
from piecework.device_profiles.documents import read_json, read_toml
from piecework.models.model_file import metadata_of
from piecework.server_app.packages import FILE, describe_plugins
from piecework.training.settings import Scalar, Settings
from piecework.training.settings.table import flat, nest

CHECKSUM = "crc32"  # key of a record, and in the first line of the settings
SCHEMA = 3  # version of the checkpoint format; 2 has norms of updates by unit, 3 a manifest
STATES = "callbacks.json"  # the states of callbacks when the run began
PRIVATE = 0o600  # of a file that holds the secret of a private run: who has it can take the noise away
KEPT = 2  # number of newest checkpoints that are kept, in addition to the first


class CheckpointError(ValueError):
    """A checkpoint or record cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to continue: the model's arrays, and values such as round, settings and strategy state.

    `kept` are arrays that the strategy and the served model keep in addition to the model. `values` are JSON values.
    """

    arrays: ArrayRecord
    values: dict[str, Any]
    kept: ArrayRecord = field(default_factory=ArrayRecord)


class RunDir:
    """The folder `<output-dir>/<run>/` and its files. What writes them raises StorageError, which says how to go on."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.rounds_file = self.path / "rounds.jsonl"
        self.checkpoints = self.path / "checkpoint"
        resumed = shlex.quote(f"resume-from={self.path}")
        self._then = f"The run can then be resumed: piecework run --set {resumed}"

    def create(self, settings: Settings) -> None:
        """Create the folder, and write the settings and which packages' plugins they name."""
        self.path.mkdir(parents=True, exist_ok=True)
        content = tomli_w.dumps(nest(settings.to_run_config())).encode()
        write_atomically(self.path / "settings.toml", _first_line(content) + content)
        if plugins := describe_plugins(settings):
            self._write(FILE, json.dumps(plugins, indent=2))
        else:
            (self.path / FILE).unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text.encode(), self._then)

    def has_begun(self) -> bool:
        """Return whether a run was started here: its settings are the first file that is written."""
        return (self.path / "settings.toml").is_file()

    def settings(self) -> dict[str, Scalar]:
        """Return the settings that the run was started with, by key. Raises CheckpointError.

        A file of an earlier version has no checksum.
        """
        try:
            content = (self.path / "settings.toml").read_bytes()
            first, _, rest = content.partition(b"\n")
            if first.startswith(b"#") and first + b"\n" != _first_line(rest):
                raise ValueError(
                    "settings.toml is damaged: it does not match the checksum in its first line. (Who changes it on purpose "
                    "removes that line.)"
                )
            if not content.strip():
                raise ValueError("settings.toml is damaged: it is empty")
            return flat(read_toml(content.decode()))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is not the folder of a run: {error}") from error

    def append_round(self, record: Mapping[str, object]) -> None:
        """Append a round's record and sync it, so that it is on disk before the round's checkpoint."""
        with writing(self.rounds_file, self._then), self.rounds_file.open("ab") as file:
            file.write(line_of(record))
            file.flush()
            os.fsync(file.fileno())

    def rounds(self) -> list[dict[str, Any]]:
        """Return all round records, without a half-written last line. Raises CheckpointError, which names file and line."""
        records, damage = self.readable_rounds()
        if damage:
            raise CheckpointError(f"{damage}. Resuming the run recovers the rounds before that line")
        return records

    def readable_rounds(self) -> tuple[list[dict[str, Any]], str]:
        """Return the round records before the first damaged line, and a description of the damage, empty if there is none."""
        records: list[dict[str, Any]] = []
        content = self.rounds_file.read_bytes() if self.rounds_file.is_file() else b""
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            try:
                records.append(parse_round(line, records[-1]["round"] if records else 0))
            except ValueError as error:
                return records, f"{self.rounds_file}, line {number}, is damaged: {error}"
        return records, ""

    def forget(self) -> None:
        """Delete the records, checkpoints and stores of a run that left no checkpoint to go on from."""
        for file in (self.rounds_file, self.path / STATES):
            file.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.path / "clients"):
            shutil.rmtree(folder, ignore_errors=True)

    def forget_after(self, server_round: int) -> None:
        """Delete the records of rounds that a resumed run will repeat, and all records from the first damaged line on."""
        kept = [r for r in self.readable_rounds()[0] if r["round"] <= server_round]
        self._write(self.rounds_file.name, b"".join(map(line_of, kept)).decode())

    def save_checkpoint(self, arrays: ArrayRecord, values: Mapping[str, Any], kept: ArrayRecord | None = None) -> None:
        """Write `checkpoint/round-NNNNN/`, and delete all checkpoints but the first and the newest two.

        If it cannot be written, what was begun is deleted, and the others stay.
        """
        final = self.checkpoints / f"round-{values['round']:05d}"
        temporary = final.with_suffix(".tmp")
        files = {"arrays": arrays} | ({"kept": kept} if kept else {})
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with writing(final, self._then):
                temporary.mkdir(parents=True)
                for name, record in files.items():
                    save_file(dict(numpy_arrays(record)), temporary / f"{name}.safetensors")
                state = temporary / "state.json"
                state.touch(PRIVATE if "privacy" in values else 0o666)
                state.write_text(json.dumps({"schema": SCHEMA, **values}), encoding="utf-8")
                seal(temporary)
                for path in temporary.iterdir():
                    sync(path)
        except StorageError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        sync(self.checkpoints)
        for path in self.checkpoint_paths()[1:-KEPT]:
            shutil.rmtree(path)

    def checkpoint_paths(self) -> list[Path]:
        """Return the folders of all checkpoints, damaged ones included, oldest first."""
        found = self.checkpoints.glob("round-*")
        return sorted((path for path in found if path.name.removeprefix("round-").isdecimal()), key=round_of)

    def load_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint, or None if there is none. Raises CheckpointError if it is damaged."""
        paths = self.checkpoint_paths()
        return read_checkpoint(paths[-1]) if paths else None

    def last_complete_round(self) -> int:
        """Return the round of the newest checkpoint, damaged or not; 0 if there is none."""
        return max(map(round_of, self.checkpoint_paths()), default=0)

    def save_model(self, arrays: ArrayRecord, description: Mapping[str, object]) -> None:
        """Write `model.safetensors`. Its metadata are `description`, from which the model is built again, and a checksum."""
        temporary, final = self.path / "model.tmp", self.path / "model.safetensors"
        with writing(final, self._then):
            held = dict(numpy_arrays(arrays))
            save_file(held, temporary, metadata=metadata_of(json.dumps(description), held))
            sync(temporary)
            temporary.replace(final)

    def write_coverage(self, coverage: Mapping[str, object]) -> None:
        """Write `coverage.json`: which clients can train which part of the model, as known at the start."""
        self._write("coverage.json", json.dumps(coverage, indent=2))

    def coverage(self) -> dict[str, Any] | None:
        """Return the content of `coverage.json`, or None if it is not written yet. Raises CheckpointError."""
        return read_object(self.path / "coverage.json")

    def withdraw_results(self) -> None:
        """Delete the result files that the run, new or resumed, will write later."""
        for name in (
            "summary.json",
            "final.json",
            "models.json",
            "model.safetensors",
            "report.html",
            "coverage.json",
        ):
            (self.path / name).unlink(missing_ok=True)

    def write_final(self, evaluation: Mapping[str, object]) -> None:
        """Write `final.json`: the evaluation of the trained model."""
        self._write("final.json", json.dumps(evaluation, indent=2))

    def final(self) -> dict[str, Any] | None:
        """Return the evaluation of the trained model, or None if there is none. Raises CheckpointError."""
        return read_object(self.path / "final.json")

    def write_models(self, models: Mapping[str, object]) -> None:
        """Write `models.json`: the evaluation of the models that devices deploy."""
        self._write("models.json", json.dumps(models, indent=2))

    def models(self) -> dict[str, Any]:
        """Return the evaluation of the models that devices deploy, by name; empty without any. Raises CheckpointError."""
        return read_object(self.path / "models.json") or {}

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write `summary.json`: how the run ended."""
        self._write("summary.json", json.dumps(summary, indent=2))

    def summary(self) -> dict[str, Any] | None:
        """Return how the run ended, or None if it has not ended. Raises CheckpointError."""
        return read_object(self.path / "summary.json")

    def seconds(self) -> float:
        """Return the seconds that all processes of the run have taken: of one that was killed, those to its last checkpoint."""
        noted = [self.path / "summary.json", *(path / "state.json" for path in self.checkpoint_paths()[-1:])]
        in_rounds = float(sum(record.get("seconds", 0.0) for record in self.readable_rounds()[0]))
        return max(in_rounds, *map(_seconds_in, noted))

    def summary_version(self) -> tuple[int, int] | None:
        """Return a value that changes whenever a summary is written (inode, time), or None if there is no summary."""
        try:
            found = (self.path / "summary.json").stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


def round_of(checkpoint: Path) -> int:
    """Return the round of a checkpoint, from the name of its folder."""
    return int(checkpoint.name.removeprefix("round-"))


def _first_line(settings: bytes) -> bytes:
    """Return the comment with the checksum of settings as TOML, which stands before them."""
    return f"# {CHECKSUM} of all other lines: {crc32(settings):08x}\n".encode()


def line_of(record: Mapping[str, object]) -> bytes:
    """Return the line of a record in rounds.jsonl. Its last key is a checksum of what stands before."""
    content = json.dumps(record, separators=(",", ":")).encode()[:-1]
    return content + f',"{CHECKSUM}":"{crc32(content):08x}"}}\n'.encode()


def parse_round(line: bytes, before: int) -> dict[str, Any]:
    """Return the record in a line of rounds.jsonl that follows that of round `before`, without its checksum.

    A line of an earlier version has none. Raises ValueError.
    """
    content, found, _ = line.rpartition(f',"{CHECKSUM}":"'.encode())
    if found and line != content + f',"{CHECKSUM}":"{crc32(content):08x}"}}'.encode():
        raise ValueError("it does not match its checksum")
    record = read_json(line)
    if isinstance(record, dict):
        record.pop(CHECKSUM, None)
    if not isinstance(record, dict) or not isinstance(record.get("round"), int):
        raise ValueError(f"not the record of a round: {line[:60]!r}")
    if record["round"] <= before:
        raise ValueError(f"round {record['round']} follows round {before}")
    return record


def _seconds_in(path: Path) -> float:
    """Return the `seconds` of a JSON file; 0 if it has none, is damaged, or does not exist."""
    try:
        return float(read_json(path.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0.0


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if there is no file. Raises CheckpointError."""
    try:
        found = read_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object")
    return found


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint folder. Raises CheckpointError, which names the file."""
    fault, schema = damage(path), _schema_of(path)
    if schema not in (None, SCHEMA) and not (fault and (path / MANIFEST).exists()):
        raise CheckpointError(
            f"{path} was written by another version of Piecework (schema {schema}, this is {SCHEMA}): resume the run with that "
            "version, or start a new one"
        )
    if fault:
        raise CheckpointError(f"{path} is damaged: {fault}")
    file, kept = path / "state.json", path / "kept.safetensors"
    try:
        values = read_json(file.read_text(encoding="utf-8"))
        del values["schema"]
        file = path / "arrays.safetensors"
        arrays = read_arrays(file)
        return Checkpoint(arrays, values, read_arrays(kept) if kept.exists() else ArrayRecord())
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from error


def _schema_of(path: Path) -> object:
    """Return the schema that a checkpoint states; None if it states none that can be read."""
    try:
        return read_json((path / "state.json").read_text(encoding="utf-8"))["schema"]
    except (OSError, KeyError, TypeError, ValueError):
        return None


def read_arrays(path: Path) -> ArrayRecord:
    """Read a safetensors file as a Flower record."""
    with safe_open(path, framework="np") as file:
        return ArrayRecord({name: Array(file.get_tensor(name)) for name in file.keys()})  # noqa: SIM118


def numpy_arrays(arrays: ArrayRecord) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a record with their names."""
    return ((name, array.numpy()) for name, array in arrays.items())
