"""Turn a run's settings into its data set, client data, model and training config. Server and clients use the same functions.

These functions are not in client_app/app.py, because Flower's simulation loads that file in one thread while the ServerApp may
be importing in another.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from piecework.federated_data.columns import NO_COLUMNS, Columns
from piecework.federated_data.datasets import (
    ArrayDataset,
    DatasetError,
    default_cache,
    load,
    prepare,
    resized_shape,
    set_name,
)
from piecework.federated_data.flower_partition import PREFIX, draw_by_flower
from piecework.federated_data.own_data import Expected, adopt
from piecework.federated_data.partition import partition_rows
from piecework.federated_data.personal import client_test_rows
from piecework.models.cascade import Blueprint, Shape
from piecework.models.zoo import build_blueprint, stored_as
from piecework.training.attacks import Attack
from piecework.training.randomness import generator
from piecework.training.settings import Scalar, Settings
from piecework.training.sgd import TrainingConfig

PixelScale = Literal["normalised", "unit", "raw"]


@lru_cache(maxsize=4)
def open_dataset(
    name: str,
    data_dir: str,
    pixel_scale: PixelScale = "normalised",
    image_size: int = 0,
    columns: Columns = NO_COLUMNS,
) -> ArrayDataset:
    """Load the converted data set, which the server or the launcher converted before the first task.

    Raises DatasetError for a pixel scale other than normalised if the data are not 8-bit images, and for an image size if
    they are not images.
    """
    data = load(prepare(name, data_dir=data_dir, cache_dir=default_cache(), columns=columns))
    return scale_pixels(resize_images(data, image_size), pixel_scale)


def dataset_of(settings: Settings) -> ArrayDataset:
    """Load the data set of a run, whose images have the size and the scale of its settings. Raises DatasetError."""
    data = settings.data
    return open_dataset(settings.dataset, settings.data_dir, data.pixel_scale, data.image_size, columns_of(settings))


def columns_of(settings: Settings) -> Columns:
    """Return the columns that settings name."""
    data = settings.data
    inputs = tuple(name for text in data.input_columns.split(",") if (name := text.strip()))
    return Columns(inputs, data.label_column, data.group_column)


def prepare_dataset(settings: Settings) -> Path:
    """Convert the data set of a run if that is not done; returns its folder, for `load`. Raises DatasetError."""
    return prepare(
        settings.dataset,
        data_dir=settings.data_dir,
        cache_dir=default_cache(),
        download=settings.data.download,
        columns=columns_of(settings),
    )


def resize_images(data: ArrayDataset, image_size: int) -> ArrayDataset:
    """Return a data set whose images are read at another size; 0 = their own. Raises DatasetError if it has no images."""
    resized_shape(data.stored_shape, image_size)
    return replace(data, image_size=image_size)


def scale_pixels(data: ArrayDataset, pixel_scale: PixelScale) -> ArrayDataset:
    """Return a data set whose pixels, (pixel / 255 - mean) / std, are normalised, from 0 to 1 (unit), or from 0 to 255 (raw).

    Raises DatasetError for a scale other than normalised if the data are not 8-bit images.
    """
    if pixel_scale == "normalised":
        return data
    if data.inputs.dtype != np.uint8 or len(data.input_shape) != 3:
        raise DatasetError(
            f"data.pixel-scale = {pixel_scale!r}: data set {data.name} holds {data.inputs.dtype} of shape {data.input_shape}, "
            "whose scale is known for 8-bit images only: use normalised"
        )
    std = 1.0 if pixel_scale == "unit" else 1 / 255
    return replace(data, mean=(0.0,) * len(data.mean), std=(std,) * len(data.std))


@lru_cache(maxsize=4)
def all_client_rows(settings: Settings, clients: int) -> list[np.ndarray]:
    """Return the rows of every client, drawn once per process. Raises DatasetError if data-dir holds a part of an export."""
    data = dataset_of(settings)
    if data.export is not None:
        raise DatasetError(
            f"data-dir {settings.data_dir} is a part of an export, not the whole data set: give each node its own part by "
            "data-dir in its node-config, or emulate clients with the data set itself"
        )
    return client_rows(settings, data.labels, clients, data.groups)


@lru_cache(maxsize=4)
def all_client_test_rows(settings: Settings, clients: int) -> list[np.ndarray]:
    """Return each client's own rows of the test split, drawn once per process.

    Raises DatasetError if data-dir holds a part of an export.
    """
    data = dataset_of(settings)
    return client_test_rows(data.labels, all_client_rows(settings, clients), data.test_labels, settings.seed)


def client_rows(
    settings: Settings, labels: np.ndarray, clients: int, groups: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return the rows of every client: a pure function of labels, groups, the number of clients and the settings."""
    public = public_rows(settings, len(labels))
    if len(public):
        left = np.setdiff1d(np.arange(len(labels)), public)
        own = settings.with_values({"data.public-fraction": 0.0})
        rows = client_rows(own, np.asarray(labels)[left], clients, None if groups is None else groups[left])
        return [left[each] for each in rows]
    if settings.data.partition.startswith(PREFIX):
        options = settings.data.partition_options
        return draw_by_flower(settings.data.partition, np.asarray(labels), clients, settings.seed, options, groups)
    return partition_rows(
        settings.data.partition,
        np.asarray(labels),
        clients,
        settings.seed,
        alpha=settings.data.partition_alpha,
        balanced=settings.data.partition_balanced,
        capped=settings.data.partition_cap,
        classes_per_client=settings.data.partition_classes,
        skew=settings.data.partition_skew,
        groups=groups,
        groups_per_client=settings.data.partition_groups,
    )


def public_rows(settings: Settings, examples: int) -> np.ndarray:
    """Draw the fraction `data.public-fraction` of the training examples, which no client gets. Returns sorted rows."""
    order = generator(settings.seed, "public").permutation(examples)
    return np.sort(order[: round(settings.data.public_fraction * examples)])


def partition_settings(settings: Settings) -> dict[str, Scalar]:
    """Return the settings of the chosen partition. With the number of clients and the seed they determine the client data."""
    cap = () if settings.data.partition_balanced else ("data.partition-cap",)
    names = {
        "dirichlet": ("data.partition-alpha", "data.partition-balanced", *cap),
        "pathological": ("data.partition-classes",),
        "skewed": ("data.partition-classes", "data.partition-skew"),
        "natural": ("data.partition-groups",),
    }
    kind, values = settings.data.partition, settings.to_run_config()
    own = ("data.partition-options",) if kind.startswith(PREFIX) else names.get(kind, ())
    return {key: values[key] for key in ("data.partition", "data.public-fraction", *own)}


def check_partition(settings: Settings, data: ArrayDataset) -> None:
    """Reject settings that allow no partition, or that differ from those of an export. Raises ValueError."""
    if data.export is not None:
        check_export(settings, data, None, settings.clients)
    elif settings.clients:
        all_client_rows(settings, settings.clients)


def expected_of(settings: Settings) -> Expected:
    """Return what a run expects of nodes' own data: its data set as it lies on disk. Raises DatasetError."""
    return Expected.of(load(prepare_dataset(settings)))


def open_own(
    folder: Path, settings: Settings, client: int, clients: int, expected: Expected | None = None
) -> ArrayDataset:
    """Open the data in a node's folder, which are a part of an export, or its own: these must be as `expected`.

    Raises DatasetError if they are another client's, were exported for another run, or are of another kind than the run's.
    """
    data = load(folder)
    if data.export is None:
        if expected is None:
            raise DatasetError(
                "this node's data were a part of an export when it connected, and are not now: restart it"
            )
        data = adopt(data, expected)
    data = scale_pixels(resize_images(data, settings.data.image_size), settings.data.pixel_scale)
    check_export(settings, data, client, clients)
    return data


def check_export(settings: Settings, data: ArrayDataset, client: int | None, clients: int) -> None:
    """Reject a part of an export that is not this client's (None: the server's) or this run's; `clients` 0 = unknown.

    Raises DatasetError.
    """
    if data.export is None:
        return
    run = {"dataset": set_name(settings.dataset), "clients": clients, **partition_settings(settings)}
    made = {
        "dataset": data.name,
        "clients": data.export["clients"],
        "data.public-fraction": 0.0,
        "data.partition-cap": True,  # as in exports that do not name it
        **data.export["settings"],
    }
    if not clients:
        del run["clients"]
    for key, value in run.items():
        if made.get(key) != value:
            raise DatasetError(
                f"the data were exported with {key} = {made.get(key)!r}, the run has {key} = {value!r}: export them again "
                "(piecework export-data) with the settings of the run, or change the run's"
            )
    if data.export["client"] != client:
        names = ["the server" if number is None else f"client {number}" for number in (data.export["client"], client)]
        raise DatasetError(f"these exported data are those of {names[0]}, not of {names[1]}: check data-dir")


def blueprint_for(settings: Settings, data: ArrayDataset) -> Blueprint:
    """Return the model of a run, not built yet. Raises DatasetError if the data have tokens unknown to it."""
    blueprint = blueprint_of_shape(settings, data.stored_shape, data.num_classes)
    if bool(data.vocabulary) != bool(blueprint.vocabulary):
        read, held = ("tokens", "numbers") if blueprint.vocabulary else ("numbers", "tokens")
        raise DatasetError(
            f"{settings.model} reads {read}, and data set {data.name} holds {held}: choose another of the two"
        )
    if data.vocabulary > blueprint.vocabulary:
        raise DatasetError(
            f"data set {data.name} has tokens up to {data.vocabulary - 1}, but {settings.model} knows them only up to "
            f"{blueprint.vocabulary - 1}: keep the most frequent ones"
        )
    return blueprint


def blueprint_of_shape(settings: Settings, stored_shape: Shape, num_classes: int) -> Blueprint:
    """Return the model of a run, as it is trained, for examples of this shape on disk. Raises DatasetError."""
    input_shape = resized_shape(stored_shape, settings.data.image_size)
    blueprint = build_blueprint(
        settings.model,
        num_classes=num_classes,
        input_shape=input_shape,
        width=settings.architecture.width,
        batch_norm=settings.norms_in_training,
        initialisation=settings.training.initialisation,
        **settings.architecture.parse_options(),
    )
    return blueprint if input_shape == stored_shape else stored_as(blueprint, stored_shape)


def training_config_for(settings: Settings, lr: float) -> TrainingConfig:
    """Return the training config of a round."""
    return TrainingConfig(
        lr,
        settings.training.momentum,
        settings.training.weight_decay,
        settings.training.batch_size,
        settings.training.local_epochs,
        settings.training.local_iterations,
        precision=settings.training.precision,
        clip_norm=settings.training.clip_norm,
        optimiser_state=settings.training.optimiser_state,
        optimiser=settings.training.optimiser,
    )


def check_augmentation(settings: Settings, data: ArrayDataset) -> None:
    """Raise ValueError if there is nothing to flip and crop."""
    if settings.data.augment and len(data.stored_shape) != 3:
        held = "tokens" if data.vocabulary else "feature vectors"
        raise ValueError(
            f"data.augment = true flips and crops images, and data set {data.name} holds {held}: set it to false"
        )


def image_attack(settings: Settings, data: ArrayDataset, steps: int) -> Attack:
    """Return PGD on a data set's images within [0, 1]. Raises DatasetError unless they have 8 bits, whose range is known."""
    if data.inputs.dtype != np.uint8 or len(data.input_shape) != 3:
        raise DatasetError(
            f"data set {data.name} holds {data.inputs.dtype} of shape {data.input_shape}: an attack changes pixels within "
            "[0, 1] and needs 8-bit images"
        )
    return Attack(
        "linf", settings.attack.epsilon, settings.attack.step_size, steps, 0.0, 1.0, tuple(data.mean), tuple(data.std)
    )
