"""Flower's partitioners (flwr-datasets) as partitions of any data set: they divide a column of labels and one of groups.

They are run once, by whoever asks first, which is the server or a plan. The result is kept in the cache, because importing the
library takes seconds and a hundred megabytes, which clients' processes need not spend.
"""

import hashlib
import importlib
import inspect
import os
import secrets
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecework.device_profiles.user_cache import default_cache
from piecework.federated_data.partition import Ints

PREFIX = "flwr:"
NATURAL = ("NaturalIdPartitioner", "GroupedNaturalIdPartitioner")  # they divide groups, all others labels
OURS = ("num_partitions", "seed")  # what the run gives


def draw_by_flower(
    kind: str, labels: NDArray[Any], clients: int, seed: int, options: str, groups: NDArray[Any] | None = None
) -> list[Ints]:
    """Return the sorted rows of each client as `flwr:<Partitioner>` divides them: a pure function of its arguments.

    As in Flower's FederatedDataset, the examples are shuffled before. `options` are the partitioner's own arguments, as in
    `alpha=0.3,self_balancing=true`. Raises ValueError.
    """
    digest = hashlib.sha256(np.ascontiguousarray(labels, dtype=np.int64).tobytes())
    digest.update(b"" if groups is None else np.ascontiguousarray(groups, dtype=np.int64).tobytes())
    digest.update(repr((kind, clients, seed, options, _version())).encode())
    path = default_cache() / "partitions" / f"{digest.hexdigest()[:24]}.npy"
    kept = _read(path)
    if kept is None or kept.shape != labels.shape:
        kept = _divide(kind, labels, clients, seed, parse_options(options), groups)
        _keep(path, kept)
    rows = [np.flatnonzero(kept == client).astype(np.int64) for client in range(clients)]
    if empty := [client for client, own in enumerate(rows) if not len(own)]:
        raise ValueError(
            f"data.partition = {kind}: client {empty[0]} of {clients} gets no example of {len(labels)}; use fewer clients or "
            "other data.partition-options"
        )
    return rows


def parse_options(text: str) -> dict[str, Any]:
    """Return `data.partition-options`, which are the inside of an inline table of TOML. Raises ValueError."""
    try:
        found: dict[str, Any] = tomllib.loads(f"options = {{{text}}}")["options"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(
            f"data.partition-options = {text[:200]!r}: {error}; write NAME=VALUE with commas, as in "
            "alpha=0.3,self_balancing=true or partition_sizes=[100,200]"
        ) from None
    return found


def _version() -> str:
    """Return the version of the library, or nothing where it is missing."""
    try:
        return version("flwr-datasets")
    except PackageNotFoundError:
        return ""


def _divide(
    kind: str, labels: NDArray[Any], clients: int, seed: int, options: dict[str, Any], groups: NDArray[Any] | None
) -> NDArray[np.int32]:
    """Return the client of each row, or -1."""
    partitioner = _build(kind, clients, seed, options, groups)
    datasets = importlib.import_module("datasets")
    columns = {"label": labels, "row": np.arange(len(labels))} | ({} if groups is None else {"group": groups})
    bars = importlib.import_module("datasets.utils.logging")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        partitioner.dataset = datasets.Dataset.from_dict(columns).shuffle(seed=seed)
        if (made := partitioner.num_partitions) < clients:
            raise ValueError(f"it makes {made} partitions for {clients} clients")
        parts = [np.asarray(partitioner.load_partition(client)["row"], dtype=np.int64) for client in range(clients)]
    except Exception as error:  # whatever the library raises for these data
        raise ValueError(f"data.partition = {kind}, data.partition-options = {options}: {error}") from error
    finally:
        if shown:
            bars.enable_progress_bar()
    holder = np.full(len(labels), -1, dtype=np.int32)
    for client, rows in enumerate(parts):
        if (holder[rows] >= 0).any() or len(np.unique(rows)) < len(rows):
            raise ValueError(f"data.partition = {kind} gives an example twice: every example has one client")
        holder[rows] = client
    return holder


def _build(kind: str, clients: int, seed: int, options: dict[str, Any], groups: NDArray[Any] | None) -> Any:
    """Return the partitioner with its arguments. Raises ValueError."""
    name = kind.removeprefix(PREFIX)
    try:
        made = getattr(importlib.import_module("flwr_datasets.partitioner"), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"data.partition = {kind}: {error}; it needs `pip install 'piecework[hub]'`") from None
    known = inspect.signature(made.__init__).parameters.keys() - {"self"}
    if strange := sorted(options.keys() - known | options.keys() & {*OURS}):
        takes = ", ".join(sorted(known - {*OURS})) or "no options"
        raise ValueError(
            f"data.partition-options has {strange[0]!r}; {name} takes {takes}, and its seed and partitions are the run's"
        )
    column = str(options.get("partition_by", "group" if name in NATURAL else "label"))
    if column not in ("label", "group") or (column == "group" and groups is None and "partition_by" in known):
        raise ValueError(
            f"data.partition = {kind} divides by {column!r}: these data have "
            f"{'label; groups are group_train of npz data, or data.group-column' if groups is None else 'label and group'}"
        )
    given = {"num_partitions": clients, "seed": seed, "partition_by": column} | options
    if "distribution_array" in given:
        given["distribution_array"] = np.array(given["distribution_array"])
    try:
        return made(**{key: value for key, value in given.items() if key in known})
    except Exception as error:  # of arguments that it misses or refuses
        raise ValueError(f"data.partition = {kind}, data.partition-options = {options}: {error}") from error


def _read(path: Path) -> NDArray[np.int32] | None:
    try:
        return np.asarray(np.load(path, allow_pickle=False), dtype=np.int32)
    except (OSError, ValueError, EOFError):
        return None


def _keep(path: Path, holder: NDArray[np.int32]) -> None:
    """Write the client of each row. A cache that cannot be written only costs time."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as stream:
            np.save(stream, holder, allow_pickle=False)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
