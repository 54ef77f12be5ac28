"""What frozen modules make of a client's training data, for the module behind them: computed once, streamed, and kept.

`<store>/features/<prefix hash>.npy` holds one row an example, in the data's order. The hash is of the frozen units' content:
a client that missed a stage, or lost its file, finds that out and computes it again. Nothing in it depends on the round.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np

from piecework.client_app.client import STAGES, Client
from piecework.client_app.frozen import file_hash
from piecework.client_app.store import FeatureWriter
from piecework.models.cascade import isolated_rng
from piecework.models.partition import Piece, runs
from piecework.models.static_norms import forget_statistics, measure_norms
from piecework.training.examples import Examples, feature_examples
from piecework.training.loop import PieceModel, in_precision
from piecework.training.memory_cap import return_free_memory
from piecework.training.randomness import generator, integer


def prefix_features(client: Client, modules: Sequence[Piece], *, training: bool = False) -> Examples:
    """The training data behind frozen `modules`; the data themselves where there are none.

    One module is in memory at a time. It goes on from the longest prefix whose features are there. With `training` they run in
    training mode: batch norms take the statistics of mixed batches, and keep none of them.
    """
    if not modules:
        return client.local_data(STAGES)
    paths = _paths(client, modules)
    found = len(modules) - 1 if client.settings.memory.feature_cache else -1
    features = None
    while found >= 0 and (features := _opened(client, paths[found], modules[found])) is None:
        found -= 1
    labels = client.local_data(STAGES).labels
    for n in range(found + 1, len(modules)):
        source = client.local_data(STAGES) if features is None else feature_examples(features, labels).on(client.device)
        features = _stream(client, modules[n], source, paths[n], training=training)
    for path in paths[0].parent.glob("*.npy"):
        if path != paths[-1]:
            path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # another client's task may have made room
        os.utime(paths[-1])  # in use: others are older
    assert features is not None
    return feature_examples(features, labels).on(client.device)


def _paths(client: Client, modules: Sequence[Piece]) -> list[Path]:
    """Where the features behind each module belong."""
    folder = client.store.features if client.settings.memory.feature_cache else client.store.task / "features"
    folder.mkdir(exist_ok=True)
    digest, paths = hashlib.sha256(), []
    for module in modules:
        for atom in module:
            digest.update(file_hash(client.store.model / f"atoms.{atom}.safetensors").encode())
        paths.append(folder / f"{digest.hexdigest()[:32]}.npy")
    return paths


def _shape_behind(client: Client, module: Piece) -> tuple[int, ...]:
    """Of one example as it is stored: channels last."""
    shape = client.blueprint.atoms[module[-1]].shape
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape


def _opened(client: Client, path: Path, module: Piece) -> np.ndarray | None:
    try:
        features: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        client.store.notes.append(f"features behind atom {module[-1]} were damaged and are computed again: {error}")
        return None
    expected = (len(client.local_data(STAGES)), *_shape_behind(client, module))
    return features if features.shape == expected and features.dtype == np.float32 else None


def measure_statistics(client: Client, atoms: Piece, head: str | None = None) -> None:
    """Give the batch norms of atoms, in the store, the mean statistics of mixed batches of the training data.

    One atom is in memory at a time; its features are gone when the next one has read them. A `head` is measured with the
    last atom.
    """
    examples = client.local_data(STAGES)
    for atom in atoms:
        path = client.store.feature_path(f"statistics-{atom}")
        behind = head if atom == atoms[-1] else None
        features = _stream(client, (atom,), examples, path, behind, training=True, measured=True)
        path.unlink()  # it stays readable
        examples = feature_examples(features, examples.labels).on(client.device)


def teacher_logits(client: Client, atoms: Piece, examples: Examples) -> np.ndarray:
    """What atoms and the model's head make of examples, row by row; one atom is in memory at a time."""
    for atom in atoms[:-1]:
        features = _stream(client, (atom,), examples, client.store.feature_path(f"teacher-{atom}"))
        examples = feature_examples(features, examples.labels).on(client.device)
    return _stream(client, atoms[-1:], examples, client.store.feature_path("teacher"), "head")


def _stream(
    client: Client,
    module: Piece,
    examples: Examples,
    path: Path,
    head: str | None = None,
    *,
    training: bool = False,
    measured: bool = False,
) -> np.ndarray:
    """Run a module over all examples, in mixed batches, and write each row to its place.

    Where it is `measured`, its batch norms get the mean statistics of these batches.
    """
    limit = client.settings.memory.feature_cache_bytes
    piece = PieceModel(client.blueprint, module, head, client.load())
    piece.train(training)
    if measured:
        measure_norms(piece.units().values())
        forget_statistics(piece.units().values())
    forward = in_precision(piece.logits if head is not None else piece.features, client.training_config)
    draft = client.store.task / path.name

    def open_file(shape: tuple[int, ...]) -> FeatureWriter:
        make_room(client.store.root.parent, path, 4 * len(examples) * math.prod(shape), limit)
        return FeatureWriter(draft, len(examples), shape, limit)

    around = partial(_dropout, client, module, training=training)
    reads = _mixed(client, len(examples))
    features = client.write_features(runs(module), forward, examples, reads, open_file, around)
    draft.replace(path)  # it stays readable, whoever removes the file
    if measured:
        client.save(piece)
    del piece, forward
    return_free_memory()
    return features


def _dropout(client: Client, module: Piece, positions: np.ndarray, *, training: bool) -> AbstractContextManager[None]:
    """In training mode, dropout that is the same whenever these features are computed."""
    if not training:
        return nullcontext()
    return isolated_rng(integer(client.settings.seed, client.number, "dropout", runs(module), int(positions[0])))


def _mixed(client: Client, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches in an order of the client's own, the same in every round, and the rows that each of them fills.

    Batch statistics come from mixed batches; a last batch of one, which has none, is filled up with another example.
    """
    order = generator(client.settings.seed, client.number, "features").permutation(count)
    size = client.training_config.batch_size
    for start in range(0, count, size):
        positions = order[start : start + size]
        yield (positions if len(positions) > 1 else np.array([positions[0], order[0]])), positions


def make_room(experiment: Path, path: Path, size: int, limit: int) -> None:
    """Let a features file of `size` bytes into an experiment's stores, which may take `limit` all together: the oldest go.

    Raises OSError where it is larger alone.
    """
    if size > limit:
        raise OSError(
            f"features of {size:,} bytes ({path.name}), memory.feature-cache-bytes allows {limit:,}: raise it, or give the "
            "client fewer examples"
        )
    held = []
    for other in experiment.glob("*/features/*.npy"):
        with suppress(FileNotFoundError):  # another client's task may have removed it
            held.append((other.stat().st_mtime, other.stat().st_size, other))
    for _, _, oldest in sorted(held):
        if sum(taken for _, taken, _ in held) + size <= limit:
            return
        oldest.unlink(missing_ok=True)
        held = [entry for entry in held if entry[2] != oldest]
