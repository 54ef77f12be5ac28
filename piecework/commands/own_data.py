"""Make the data folder of a node from data of its own, which no other machine sees."""

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from piecework.device_profiles.profile import format_bytes
from piecework.federated_data.datasets import ArrayDataset, DatasetError, load, prepare
from piecework.training.settings import Settings
from piecework.training.setup import columns_of


def make_own_data(settings: Settings, out: Path, force: bool = False) -> dict[str, Any]:
    """Write the folder `out` with the data set of the settings, all or nothing. Returns what it holds.

    `force` replaces another such folder, but nothing else. Raises DatasetError, also for texts: the words of a node would have
    other numbers than those of other nodes.
    """
    out = out.expanduser().absolute()
    _require_free(out, force)
    staging = out.with_name(f".{out.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        made = prepare(
            settings.dataset,
            data_dir=settings.data_dir,
            cache_dir=staging,
            download=settings.data.download,
            columns=columns_of(settings),
        )
        data = load(made, verify=True)
        _require_usable(data)
        if made.parent != staging.resolve():
            raise DatasetError(f"data-dir {made} is a prepared folder already: copy it, or name its source")
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    except OSError as error:
        raise DatasetError(f"cannot write {out}: {error}; choose an --out with room, where you may write") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {
        "folder": str(out),
        "dataset": data.name,
        "kind": data.kind,
        "shape": list(data.stored_shape),
        "examples": len(data.labels),
        "test_examples": len(data.test_labels),
        "classes": list(data.class_names) or data.num_classes,
        "bytes": sum(file.stat().st_size for file in out.iterdir()),
    }


def describe_own(made: dict[str, Any]) -> str:
    """Return a sentence on what was made."""
    classes = made["classes"] if isinstance(made["classes"], int) else len(made["classes"])
    shape = "x".join(map(str, made["shape"]))
    return (
        f"{made['folder']}: {made['examples']} training and {made['test_examples']} test examples, {made['kind']} of shape "
        f"{shape}, {classes} classes, {format_bytes(made['bytes'])}"
    )


def _require_usable(data: ArrayDataset) -> None:
    if data.name.startswith(("text:", "imdb")) or (data.name.startswith("hub:") and data.vocabulary):
        raise DatasetError(
            f"{data.name} holds texts, whose words are numbered by how frequent they are here, other than on other nodes: "
            "number words by one vocabulary for all nodes, and give the tokens as npz:FILE"
        )


def _require_free(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        ours = load(out).export is None and all(file.suffix in (".npy", ".json") for file in out.iterdir())
    except (DatasetError, OSError):
        ours = False
    if not ours:
        raise DatasetError(f"--out {out} exists and is no node's own data: choose another folder, or remove it first")
    if not force:
        raise DatasetError(f"--out {out} holds data already: choose another folder, or replace them by --force")
