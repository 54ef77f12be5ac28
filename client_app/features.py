"""The features of a client's training data behind frozen modules: computed once, batch by batch, and kept on disk.

`<store>/features/<prefix hash>.npy` has one row per example, in the data's order. The hash covers the content of the frozen
units. A client that missed a stage, or lost the file, therefore finds no file of this name and computes the features again.
They do not depend on the round. A file ends with the checksum of its content, which is checked each time before it is used.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np

from piecework.client_app.client import FIXED_FILL, Client, feature_kind
from piecework.client_app.frozen import file_hash
from piecework.client_app.seal import is_sealed, seal_file
from piecework.client_app.store import FeatureWriter
from piecework.models.cascade import isolate_rng
from piecework.models.partition import Piece, format_ranges
from piecework.models.static_norms import forget_statistics, measure_norms
from piecework.training.examples import Examples, feature_examples
from piecework.training.loop import PieceModel, in_precision
from piecework.training.memory_cap import return_free_memory
from piecework.training.randomness import generator, integer


def prefix_features(
    client: Client, modules: Sequence[Piece], sizes: Sequence[int] = (), *, training: bool = False
) -> Examples:
    """Return the features of the training data behind frozen `modules`, or the data themselves without modules.

    One module is in memory at a time. The computation continues from the longest prefix with stored features. `sizes` are
    examples that each module computes at once, by default a batch. With `training`, modules run in training mode: batch norms
    use the statistics of mixed batches and do not keep them.
    """
    if not modules:
        return client.local_data(FIXED_FILL)
    paths = _paths(client, modules)
    stored = client.settings.memory.feature_cache
    found = len(modules) - 1 if stored else -1
    features = None
    while found >= 0 and (features := _open(client, paths[found], modules[found])) is None:
        found -= 1
    labels = client.local_data(FIXED_FILL).labels
    for n in range(found + 1, len(modules)):
        source = (
            client.local_data(FIXED_FILL) if features is None else feature_examples(features, labels).on(client.device)
        )
        features = _stream(
            client, modules[n], source, paths[n], sizes[n] if sizes else 0, training=training, stored=stored
        )
    for path in paths[0].parent.glob("*.npy"):
        if path != paths[-1]:
            path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # a task of another client may have removed it to make room
        os.utime(paths[-1])  # `make_room` removes the oldest files first, and this one is in use
    assert features is not None
    return feature_examples(features, labels).on(client.device)


def _paths(client: Client, modules: Sequence[Piece]) -> list[Path]:
    """Return the files for the features behind each module."""
    folder = client.store.features if client.settings.memory.feature_cache else client.store.task / "features"
    folder.mkdir(exist_ok=True)
    digest, paths = hashlib.sha256(), []
    for module in modules:
        for path in client.store.files(f"atoms.{atom}" for atom in module):
            digest.update(file_hash(path).encode())
        paths.append(folder / f"{digest.hexdigest()[:32]}.npy")
    return paths


def _shape_behind(client: Client, module: Piece) -> tuple[int, ...]:
    """Return the shape of one example behind a module as it is stored, channels last."""
    shape = client.blueprint.atoms[module[-1]].shape
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape


def _open(client: Client, path: Path, module: Piece) -> np.ndarray | None:
    try:
        if not is_sealed(path):
            raise ValueError("they do not match their checksum")
        features: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        client.store.notes.append(
            f"the stored features behind atom {module[-1]} are damaged and are computed again: {error}"
        )
        return None
    expected = (len(client.local_data(FIXED_FILL)), *_shape_behind(client, module))
    return features if features.shape == expected and features.dtype == feature_kind(client.settings) else None


def measure_statistics(client: Client, atoms: Piece, head: str | None = None) -> None:
    """Set the batch norms of atoms in the store to the mean statistics of mixed batches of the training data.

    One atom is in memory at a time, and its features exist only until the next one has read them. A `head` is measured with
    the last atom.
    """
    examples = client.local_data(FIXED_FILL)
    for atom in atoms:
        path = client.store.feature_path(f"statistics-{atom}")
        behind = head if atom == atoms[-1] else None
        features = _stream(client, (atom,), examples, path, head=behind, training=True, measured=True)
        path.unlink()  # its memory map stays readable
        examples = feature_examples(features, examples.labels).on(client.device)


def teacher_logits(client: Client, modules: Sequence[Piece], examples: Examples, micro_batch: int = 0) -> np.ndarray:
    """Return the logits[N, C] of examples from modules and the model's head, with one module in memory at a time.

    The last module computes `micro_batch` examples at once, by default a batch.
    """
    for module in modules[:-1]:
        features = _stream(client, module, examples, client.store.feature_path(f"teacher-{format_ranges(module)}"))
        examples = feature_examples(features, examples.labels).on(client.device)
    return _stream(client, modules[-1], examples, client.store.feature_path("teacher"), micro_batch, head="head")


def _stream(
    client: Client,
    module: Piece,
    examples: Examples,
    path: Path,
    micro_batch: int = 0,
    *,
    head: str | None = None,
    training: bool = False,
    measured: bool = False,
    stored: bool = False,
) -> np.ndarray:
    """Run a module over all examples in mixed batches, and return its output in the examples' order, memory-mapped.

    With `measured`, its batch norms get the mean statistics of these batches, and the module is saved. With `stored`, later
    tasks read the file, which gets a checksum.
    """
    limit, rounded = client.settings.memory.feature_cache_bytes, head is None and not measured
    kind = feature_kind(client.settings) if rounded else np.float32
    piece = PieceModel(client.blueprint, module, head, client.load())
    piece.train(training)
    if measured:
        measure_norms(piece.units().values())
        forget_statistics(piece.units().values())
    forward = in_precision(piece.logits if head is not None else piece.features, client.training_config)
    draft = client.store.task / path.name

    def open_file(shape: tuple[int, ...]) -> FeatureWriter:
        make_room(client.store.root.parent, path, np.dtype(kind).itemsize * len(examples) * math.prod(shape), limit)
        return FeatureWriter(draft, len(examples), shape, limit, kind)

    around = partial(_dropout, client, module, training=training)
    reads = _mix_batches(client, len(examples), micro_batch or client.training_config.batch_size)
    features = client.write_features(
        format_ranges(module), forward, examples, reads, open_file, around, rounded=kind is np.uint16
    )
    if stored:
        seal_file(draft)
    draft.replace(path)  # its memory map stays readable even if another task removes the file
    if measured:
        client.save(piece)
    del piece, forward
    return_free_memory()
    return features


def _dropout(client: Client, module: Piece, positions: np.ndarray, *, training: bool) -> AbstractContextManager[None]:
    """Return a context that, in training mode, seeds dropout by client, module and batch, but not by round."""
    if not training:
        return nullcontext()
    return isolate_rng(
        integer(client.settings.seed, client.number, "dropout", format_ranges(module), int(positions[0]))
    )


def _mix_batches(client: Client, count: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of `size` positions, and the rows that each of them fills, in a random order that is fixed for the client.

    The order is random so that batch statistics come from mixed batches. A last batch of one example would have no
    statistics, so another example is added to it, unless all batches have one.
    """
    order = generator(client.settings.seed, client.number, "features").permutation(count)
    for start in range(0, count, size):
        positions = order[start : start + size]
        yield (positions if len(positions) > 1 or size == 1 else np.array([positions[0], order[0]])), positions


def make_room(experiment: Path, path: Path, size: int, limit: int) -> None:
    """Make room for a features file of `size` bytes: remove the oldest until all of an experiment take at most `limit` bytes.

    Raises OSError if the file alone is larger than the limit.
    """
    if size > limit:
        raise OSError(
            f"features of {size:,} bytes ({path.name}) exceed memory.feature-cache-bytes = {limit:,}: raise it, or give the "
            "client fewer examples"
        )
    held = []
    for other in experiment.glob("*/features/*.npy"):
        with suppress(FileNotFoundError):  # a task of another client may have removed it
            held.append((other.stat().st_mtime, other.stat().st_size, other))
    for _, _, oldest in sorted(held):
        if sum(taken for _, taken, _ in held) + size <= limit:
            return
        oldest.unlink(missing_ok=True)
        held = [entry for entry in held if entry[2] != oldest]
