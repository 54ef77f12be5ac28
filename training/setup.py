"""What a run's settings stand for: data set, shares, model, local step. Server and clients use the same functions.

A module of its own, because client_app/app.py is what Flower's simulation loads in one thread while the ServerApp
may be importing in another.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np

from piecework.federated_data.datasets import ArrayDataset, DatasetError, default_cache, load, prepare, set_name
from piecework.federated_data.partition import make_shares
from piecework.federated_data.personal import shares_of_test
from piecework.models.cascade import Blueprint, Shape
from piecework.models.zoo import build_blueprint
from piecework.training.attacks import Attack
from piecework.training.loop import TrainingConfig
from piecework.training.randomness import generator
from piecework.training.settings import Scalar, Settings


@lru_cache(maxsize=4)
def open_dataset(name: str, data_dir: str) -> ArrayDataset:
    """The converted data set; the server or the launcher converted it before the first task."""
    return load(prepare(name, data_dir=data_dir, cache_dir=default_cache()))


@lru_cache(maxsize=4)
def all_shares(settings: Settings, clients: int) -> list[np.ndarray]:
    """The rows of every client, drawn once a process. Raises DatasetError where data-dir holds a part of an export."""
    data = open_dataset(settings.dataset, settings.data_dir)
    if data.export is not None:
        raise DatasetError(
            f"data-dir {settings.data_dir} is a part of an export and not the whole data set: give each node its own part by "
            "data-dir in its node-config, or emulate clients with the data set itself"
        )
    return client_shares(settings, data.labels, clients, data.groups)


@lru_cache(maxsize=4)
def all_test_shares(settings: Settings, clients: int) -> list[np.ndarray]:
    """The rows of the test split that are each client's own, drawn once a process. Raises DatasetError as `all_shares` does."""
    data = open_dataset(settings.dataset, settings.data_dir)
    return shares_of_test(data.labels, all_shares(settings, clients), data.test_labels, settings.seed)


def client_shares(
    settings: Settings, labels: np.ndarray, clients: int, groups: np.ndarray | None = None
) -> list[np.ndarray]:
    """The rows of every client: a pure function of labels and groups, the number of clients and the settings."""
    public = public_rows(settings, len(labels))
    if len(public):
        left = np.setdiff1d(np.arange(len(labels)), public)
        own = settings.model_copy(update={"public_share": 0.0})
        shares = client_shares(own, np.asarray(labels)[left], clients, None if groups is None else groups[left])
        return [left[share] for share in shares]
    return make_shares(
        settings.partition,
        np.asarray(labels),
        clients,
        settings.seed,
        alpha=settings.partition_alpha,
        balanced=settings.partition_balanced,
        classes_per_client=settings.partition_classes,
        skew=settings.partition_skew,
        groups=groups,
        groups_per_client=settings.partition_groups,
    )


def public_rows(settings: Settings, examples: int) -> np.ndarray:
    """Of so many training examples those that no client has and the server may use, sorted: `public-share` of them, drawn."""
    order = generator(settings.seed, "public").permutation(examples)
    return np.sort(order[: round(settings.public_share * examples)])


def partition_settings(settings: Settings) -> dict[str, Scalar]:
    """The settings that decide the shares besides the number of clients and the seed, those of the chosen partition."""
    names = {
        "dirichlet": ("partition-alpha", "partition-balanced"),
        "pathological": ("partition-classes",),
        "skewed": ("partition-classes", "partition-skew"),
        "natural": ("partition-groups",),
    }
    values = settings.to_run_config()
    return {key: values[key] for key in ("partition", "public-share", *names.get(settings.partition, ()))}


def check_shares(settings: Settings, data: ArrayDataset) -> None:
    """Refuse settings by which no shares can be drawn, or which an export was not made with. Raises ValueError."""
    if data.export is not None:
        check_export(settings, data, None, settings.clients)
    elif settings.clients:
        all_shares(settings, settings.clients)


def open_own(folder: Path, settings: Settings, client: int, clients: int) -> ArrayDataset:
    """A node's own data. Raises DatasetError where they are those of another client, or were exported for another run."""
    data = load(folder)
    check_export(settings, data, client, clients)
    return data


def check_export(settings: Settings, data: ArrayDataset, client: int | None, clients: int) -> None:
    """Refuse a part of an export that is not this client's (None: the server's), or not for this run; `clients` 0 = unknown.

    Raises DatasetError.
    """
    if data.export is None:
        return
    run = {"dataset": set_name(settings.dataset), "clients": clients, **partition_settings(settings)}
    made = {"dataset": data.name, "clients": data.export["clients"], "public-share": 0.0, **data.export["settings"]}
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
    """The model of a run, not built yet. Raises DatasetError where the data have tokens that it does not know."""
    blueprint = blueprint_of_shape(settings, data.input_shape, data.num_classes)
    if data.vocabulary > blueprint.vocabulary:
        raise DatasetError(
            f"data set {data.name} has tokens up to {data.vocabulary - 1}, {settings.model} knows those up to "
            f"{blueprint.vocabulary - 1}: keep the most frequent ones"
        )
    return blueprint


def blueprint_of_shape(settings: Settings, input_shape: Shape, num_classes: int) -> Blueprint:
    """The model of a run, as it is trained, for examples of this shape."""
    return build_blueprint(
        settings.model,
        num_classes=num_classes,
        input_shape=input_shape,
        width=settings.model_width,
        batch_norm="batch" if settings.norms == "measured" else settings.norms,
        **settings.options(),
    )


def training_config_for(settings: Settings, lr: float) -> TrainingConfig:
    """The local step of a round."""
    return TrainingConfig(
        lr,
        settings.momentum,
        settings.weight_decay,
        settings.batch_size,
        settings.local_epochs,
        settings.local_iterations,
        precision=settings.precision,
        clip_norm=settings.clip_norm,
    )


def check_augmentation(settings: Settings, data: ArrayDataset) -> None:
    """Raises ValueError where there is nothing to flip and crop."""
    if settings.augment and data.vocabulary:
        raise ValueError(
            f"augment = true flips and crops images, and data set {data.name} holds tokens: set it to false"
        )


def image_attack(settings: Settings, data: ArrayDataset, steps: int) -> Attack:
    """PGD on a data set's images within [0, 1]. Raises DatasetError where it holds no 8-bit images, whose range is known."""
    if data.inputs.dtype != np.uint8 or len(data.input_shape) != 3:
        raise DatasetError(
            f"data set {data.name} holds {data.inputs.dtype} of shape {data.input_shape}: an attack moves pixels within "
            "[0, 1], and needs images of 8 bits"
        )
    return Attack(
        "linf", settings.attack_epsilon, settings.attack_step, steps, 0.0, 1.0, tuple(data.mean), tuple(data.std)
    )
