"""The runs that are disturbed: every system on a few digits, in seconds; and what of two runs must be the same."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.golden import NEEDED
from benchmarks.hostile import OWN, small_digits
from piecework.server_app.records import RunDir

SHORT = {
    "clients": 4,
    "clients-per-round": 3,
    "num-rounds": 5,
    "training.local-epochs": 1,
    "training.batch-size": 8,
    "evaluation.on-clients-every": 2,
    "faults.allow-untrained": True,
    "workers": 1,
}
REAL = {"clients": 2, "clients-per-round": 0, "num-rounds": 4}  # on real processes, which take minutes
STEPS = {"slt": {"num-rounds": 6}}  # a round at least for each step
UNLIKE = ("seconds", "rss", "bytes")  # words in names of figures that no two runs share
# What a client says of files that a killed task left, and where a state was, depends on when it was killed.
NOTES = ("note",)


def settings_of(system: str, engine: str, dataset: Path) -> dict[str, Any]:
    """Return the settings of a system's run on an engine."""
    own = {key: value for key, value in OWN.get(system, {}).items() if key != "num-rounds"}
    values = SHORT | {"strategy": system} | NEEDED.get(system, {}) | own
    real = engine in ("deployment", "superlink")
    values |= REAL if real else {}
    values |= STEPS.get(system, {})
    return values | {"engine": "deployment" if real else engine, "dataset": f"npz:{dataset}"}


def words_for(values: Mapping[str, Any], output: Path, name: str) -> list[str]:
    """Return the words of the command line that start a run."""
    given = {**values, "output-dir": output, "run-name": name}
    return ["run", *(f"--set={key}={_text(value)}" for key, value in given.items())]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def words_to_resume(run: Path) -> list[str]:
    """Return the words of the command line that go on with a run."""
    return ["run", f"--set=resume-from={run}"]


def dataset_in(folder: Path) -> Path:
    """Return the file of a few digits in a folder, which is written if it is missing."""
    path = folder / "small-digits.npz"
    return path if path.is_file() else small_digits(folder)


def results(folder: Path, ignore: tuple[str, ...] = NOTES) -> dict[str, Any]:
    """Return what a run has come to: digests of its model's file and of its clients' states, and its records.

    Of the records, that is all but times, resident memory, bytes, which depend on the length of paths, and notes.
    """
    run = RunDir(folder)
    stores = sorted(path for path in run.path.glob("clients/*/*/state/*/**/*") if path.is_file())
    return {
        "model": digest(run.path / "model.safetensors"),
        "states": {"/".join(path.relative_to(run.path).parts[2:]): sha(path) for path in stores},
        "records": [_plain(record, UNLIKE + ignore) for record in run.rounds()],
    }


def sha(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest(model: Path) -> str:
    """Return the digest of a model's file without its metadata, which names the run and how it was resumed."""
    content = model.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    return hashlib.sha256(json.dumps(header).encode() + content[8 + length :]).hexdigest()


def _plain(value: Any, unlike: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each, unlike) for key, each in value.items() if not any(word in key for word in unlike)}
    return [_plain(each, unlike) for each in value] if isinstance(value, list) else value


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return in what two runs differ: `model`, `states` and `records`."""
    return [name for name in one if one[name] != other[name]]
