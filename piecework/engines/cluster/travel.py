"""What travels between the machines of a cluster: clients' states, and the data set to nodes that do not have it.

A client's folder (client_app/store.py) goes as one tar archive with its sha256. Nothing is assumed about shared folders: a node
keeps its clients' folders in a folder of its own, unless it finds in the run's folder what the head wrote there.
"""

import hashlib
import io
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from piecework.device_profiles.user_cache import default_cache
from piecework.federated_data.datasets import DatasetError, load, prepare
from piecework.training.settings import Settings
from piecework.training.setup import columns_of

KEPT = ("state", "frozen", "features")  # of a client's folder; the rest belongs to tasks
OWN_FOLDER = "PIECEWORK_STATE_DIR"  # of a node, where clients' folders are kept that do not lie in the run's


class Packed(NamedTuple):
    """A client's folder: the archive as an array of bytes, and its sha256. `rounds` are those of its states."""

    archive: np.ndarray
    digest: str
    rounds: tuple[int, ...]


def node_folder() -> Path:
    """Return where this machine keeps the folders of clients whose run's folder it does not see."""
    return Path(os.environ.get(OWN_FOLDER) or default_cache() / "clients").expanduser().absolute()


def shares(mark: Path, secret: str) -> bool:
    """Whether this machine sees the run's folder: the head has written a secret to the file `mark` there."""
    if os.environ.get(OWN_FOLDER):
        return False
    try:
        return mark.read_text(encoding="utf-8") == secret
    except OSError:
        return False


def state_rounds(client: Path) -> tuple[int, ...]:
    """Return the rounds of a client's states, the oldest first."""
    return tuple(sorted(int(path.name) for path in (client / "state").glob("*") if path.name.isdecimal()))


def held_clients(experiment: Path) -> dict[int, tuple[int, ...]]:
    """Return the clients that have something to be kept in an experiment's folder, with the rounds of their states."""
    folders = [path for path in experiment.glob("*") if path.name.isdecimal()]
    return {int(path.name): state_rounds(path) for path in folders if keeps(path)}


def keeps(client: Path) -> bool:
    """Whether a client's folder has anything that is kept between its tasks."""
    return any((client / kept).is_dir() for kept in KEPT)


def pack(client: Path) -> Packed:
    """Pack what a client's folder keeps between its tasks."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for kept in KEPT:
            if (client / kept).is_dir():
                archive.add(client / kept, arcname=kept)
    data = np.frombuffer(stream.getbuffer(), np.uint8)
    return Packed(data, hashlib.sha256(data.data).hexdigest(), state_rounds(client))


def unpack(packed: Packed, client: Path) -> str:
    """Put what was packed in place of a client's folder here. Returns what is wrong with it, empty if nothing is.

    A damaged archive leaves nothing: the client begins without a state, as if its disk was lost.
    """
    for kept in KEPT:
        shutil.rmtree(client / kept, ignore_errors=True)
    if hashlib.sha256(packed.archive.data).hexdigest() != packed.digest:
        return "its state was damaged on its way from another node"
    client.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed.archive.data)) as archive:
        # what Python 3.11.3 and older ignore; it was packed by this program
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(client)  # noqa: S202
    return ""


def drop(folder: Path) -> None:
    """Remove the folder of a client or an experiment, which lies elsewhere now."""
    shutil.rmtree(folder, ignore_errors=True)


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of a prepared data set's files, by which two machines have the same. Raises DatasetError."""
    load(folder)
    found: dict[str, str] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["md5"]
    return found


def find_data(settings: Settings, expected: dict[str, str]) -> Path | None:
    """Return this machine's prepared folder of the run's data set; None if it has none, or one with other files."""
    columns = columns_of(settings)
    for arrived in (True, False):
        try:
            folder = _arrived(expected)
            if not arrived:
                folder = prepare(
                    settings.dataset, data_dir=settings.data_dir, cache_dir=default_cache(), columns=columns
                )
            if checksums(folder) == expected:
                return folder
        except (DatasetError, OSError):
            continue
    return None


def _arrived(expected: dict[str, str]) -> Path:
    return default_cache() / f"sent-{hashlib.sha256(repr(sorted(expected.items())).encode()).hexdigest()[:12]}"


def read_data(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names of a prepared data set's files, and their bytes as arrays."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path.name, np.fromfile(path, np.uint8)


def keep_data(files: Iterable[tuple[str, np.ndarray]], expected: dict[str, str]) -> Path:
    """Write a data set that arrived to this machine's cache; return its prepared folder. Raises DatasetError."""
    target = _arrived(expected)
    staging = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        if not target.is_dir():
            staging.mkdir(parents=True)
            for name, data in files:
                (staging / Path(name).name).write_bytes(data.data)
            load(staging, verify=True)
            if not target.is_dir():  # else another worker of this machine was faster
                staging.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise DatasetError(
                f"cannot keep the data set in {target}: {error}; set PIECEWORK_CACHE to a folder with room"
            ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target
