"""Export one prepared folder per node with its client's rows of the training and test split, and one for the server.

The server's folder has the whole test split and its public examples. No node's folder contains another's data.
"""

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from piecework.device_profiles.profile import format_bytes
from piecework.federated_data.datasets import ArrayDataset, DatasetError, load, set_name, write
from piecework.federated_data.personal import client_test_rows
from piecework.federated_data.sources import Source
from piecework.training.settings import Settings
from piecework.training.setup import client_rows, partition_settings, prepare_dataset, public_rows

SERVER = "server"


def export_data(settings: Settings, out: Path, force: bool = False) -> list[dict[str, Any]]:
    """Write `out/node-0` to `out/node-N` and `out/server`, all or nothing; N is `clients`. Returns a row per folder.

    Each folder has the format that `load` reads, and normalises as the whole set does, so that training on the folders equals
    training in simulation. `force` replaces an export, but nothing else. Raises DatasetError.
    """
    out = out.expanduser().absolute()
    _check_target(out, force)
    source = prepare_dataset(settings)
    data = load(source, verify=True)
    if data.export is not None:
        raise DatasetError(f"{source} is a part of an export; export the whole data set, which is elsewhere")
    of_clients = client_rows(settings, data.labels, settings.clients, data.groups)
    own_tests = client_test_rows(data.labels, of_clients, data.test_labels, settings.seed)
    parts: list[tuple[str, int | None, np.ndarray, np.ndarray]] = [
        (f"node-{client}", client, *both) for client, both in enumerate(zip(of_clients, own_tests, strict=True))
    ]
    parts.append((SERVER, None, public_rows(settings, len(data.labels)), np.arange(len(data.test_labels))))
    staging = out.with_name(f".{out.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        for name, client, rows, test_rows in parts:
            (staging / name).mkdir(parents=True)
            write(staging / name, set_name(data.name), _part(data, rows, test_rows), _origin(settings, data, client))
        _install(staging, out)
    except OSError as error:
        raise DatasetError(f"cannot write {out}: {error}; choose an --out with room, where you may write") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [_row(out / name, data, rows, test_rows) for name, _, rows, test_rows in parts]


def export_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the folders."""
    table = Table("folder", "training examples", "classes", "test examples", "on disk", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for row in rows:
        numbers = (row["examples"], row["classes"], row["test_examples"])
        table.add_row(row["folder"], *map(str, numbers), format_bytes(row["bytes"]))
    return table


def _part(data: ArrayDataset, rows: np.ndarray, test_rows: np.ndarray) -> Source:
    return Source(
        inputs=data.inputs[rows],
        labels=data.labels[rows],
        test_inputs=data.test_inputs[test_rows],
        test_labels=data.test_labels[test_rows],
        num_classes=data.num_classes,
        mean=data.mean,
        std=data.std,
        vocabulary=data.vocabulary,
        class_names=data.class_names,
    )


def _origin(settings: Settings, data: ArrayDataset, client: int | None) -> dict[str, Any]:
    return {
        "client": client,
        "clients": settings.clients,
        "examples": len(data.labels),
        "seed": settings.seed,
        "settings": partition_settings(settings),
    }


def _row(folder: Path, data: ArrayDataset, rows: np.ndarray, test_rows: np.ndarray) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "examples": len(rows),
        "test_examples": len(test_rows),
        "classes": len(np.unique(data.labels[rows])),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
    }


def _is_export(folder: Path) -> bool:
    """Return whether a folder is an export and nothing else: `force` must never remove a user's files."""
    strange = [
        entry for entry in folder.iterdir() if entry.name != SERVER and not re.fullmatch(r"node-\d+", entry.name)
    ]
    try:
        return not strange and load(folder / SERVER).export is not None
    except DatasetError:
        return False


def _check_target(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not _is_export(out):
        raise DatasetError(
            f"--out {out} exists and is not an export of piecework: choose another folder, or remove it first"
        )
    if not force:
        raise DatasetError(f"--out {out} holds an export already: choose another folder, or replace it by --force")


def _install(staging: Path, out: Path) -> None:
    if out.exists():
        aside = staging.with_name(f"{staging.name}.old")
        out.rename(aside)
        staging.rename(out)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        staging.rename(out)
