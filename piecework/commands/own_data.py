"""Make the folder of a board that has data of its own: converted on the board, as the run's card says."""

import os
import secrets
import shutil
from pathlib import Path

import numpy as np

from piecework.device_profiles.documents import read_json
from piecework.federated_data.card import DataCard, number_classes, read_card, require_like
from piecework.federated_data.catalogue import OWN
from piecework.federated_data.datasets import ArrayDataset, DatasetError, default_cache, load, prepare, write
from piecework.federated_data.sources import Source


def write_own_data(name: str, out: Path, like: Path | None) -> ArrayDataset:
    """Convert `npz:FILE`, `folder:DIR` and so on into the new folder `out`, the node's `data-dir`, and return what it holds.

    With `like`, the file of a card, classes are numbered, and examples scaled, as in the run. Raises DatasetError, which leaves
    nothing behind.
    """
    kind, _, where = name.partition(":")
    if kind not in OWN or not where:
        raise DatasetError(
            f"{name!r} is no data of one's own: expected {', '.join(f'{own}:<{what}>' for own, what in OWN.items())}"
        )
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DatasetError(f"--out {out} exists and is not empty: choose another folder, or remove it first")
    card = _read_file(like) if like else None
    if card is not None and kind == "text":
        raise DatasetError(
            "text: numbers words by their frequency in this board's own texts: give tokens as npz: instead"
        )
    data = load(prepare(name, data_dir="", cache_dir=default_cache()), verify=True)
    staging = out.with_name(f".{out.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        staging.mkdir(parents=True)
        write(staging, name, _as_in_run(data, card))
        if card is not None:
            require_like(load(staging), card, "these data")
        if out.exists():
            out.rmdir()
        staging.rename(out)
    except OSError as error:
        raise DatasetError(f"cannot write {out}: {error}; choose an --out with room, where you may write") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return load(out)


def _read_file(file: Path) -> DataCard:
    try:
        values = read_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"--like {file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DatasetError(f"--like {file} is no card of a data set: expected what `piecework describe-data` prints")
    return read_card(values, f"--like {file}")


def _as_in_run(data: ArrayDataset, card: DataCard | None) -> Source:
    """Return data with the classes and the scaling of a card; without one, with their own."""
    if card is None:
        return Source(
            np.asarray(data.inputs),
            np.asarray(data.labels),
            np.asarray(data.test_inputs),
            np.asarray(data.test_labels),
            data.num_classes,
            groups=data.groups,
            vocabulary=data.vocabulary,
            class_names=data.class_names,
        )
    return Source(
        np.asarray(data.inputs),
        number_classes(data, data.labels, card),
        np.asarray(data.test_inputs),
        number_classes(data, data.test_labels, card),
        card.num_classes,
        mean=tuple(card.mean),
        std=tuple(card.std),
        groups=data.groups,
        vocabulary=card.vocabulary,
        class_names=tuple(card.class_names),
    )
