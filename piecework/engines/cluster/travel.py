"""Where a node keeps clients' folders, and how the data set comes to nodes that do not have it.

Nothing is assumed about shared folders: a node keeps its clients' folders in a folder of its own, unless it finds in the run's
folder what the head wrote there.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from piecework.device_profiles.user_cache import default_cache
from piecework.federated_data.datasets import DatasetError, load, prepare
from piecework.training.settings import Settings
from piecework.training.setup import columns_of

OWN_FOLDER = "PIECEWORK_STATE_DIR"  # of a node, where clients' folders are kept that do not lie in the run's


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
