"""A client's folder (client_app/store.py) as it travels between the machines of a cluster: a tar archive with its sha256."""

import hashlib
import io
import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

KEPT = ("state", "frozen", "features")  # of a client's folder; the rest belongs to tasks


class Packed(NamedTuple):
    """A client's folder: the archive as an array of bytes, and its sha256."""

    archive: np.ndarray
    digest: str


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
    return Packed(data, hashlib.sha256(data.data).hexdigest())


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
