"""What a run's settings stand for: data set, shares, model, local step. Server and clients use the same functions.

Apart from `client_app.app`, which Flower's simulation loads in one thread while the ServerApp may be importing in another.
"""

from functools import lru_cache

import numpy as np

from client_app.training import Recipe
from federated_data.datasets import ArrayDataset, default_cache, load, prepare
from federated_data.partition import make_shares
from models.cascade import Blueprint, Shape
from models.zoo import build_blueprint
from server_app.settings import Settings


@lru_cache(maxsize=4)
def open_dataset(name: str, data_dir: str) -> ArrayDataset:
    """The converted data set; the server or the launcher converted it before the first task."""
    return load(prepare(name, data_dir=data_dir, cache_dir=default_cache()))


@lru_cache(maxsize=4)
def all_shares(settings: Settings, clients: int) -> list[np.ndarray]:
    """The rows of every client, drawn once a process."""
    return client_shares(settings, open_dataset(settings.dataset, settings.data_dir).labels, clients)


def client_shares(settings: Settings, labels: np.ndarray, clients: int) -> list[np.ndarray]:
    """The rows of every client: a pure function of the labels, the number of clients and the settings."""
    return make_shares(
        settings.partition,
        np.asarray(labels),
        clients,
        settings.seed,
        alpha=settings.partition_alpha,
        balanced=settings.partition_balanced,
        classes_per_client=settings.partition_classes,
    )


def blueprint_for(settings: Settings, data: ArrayDataset) -> Blueprint:
    """The model of a run, not built yet."""
    return blueprint_of_shape(settings, data.input_shape, data.num_classes)


def blueprint_of_shape(settings: Settings, input_shape: Shape, num_classes: int) -> Blueprint:
    """The model of a run for examples of this shape."""
    return build_blueprint(
        settings.model,
        num_classes=num_classes,
        input_shape=input_shape,
        width=settings.model_width,
        batch_norm=settings.batch_norm,
        **settings.options(),
    )


def recipe_for(settings: Settings, lr: float) -> Recipe:
    """The local step of a round."""
    return Recipe(lr, settings.momentum, settings.weight_decay, settings.batch_size, settings.local_epochs)
