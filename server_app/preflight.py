"""Checks before a run begins: everything that its settings name exists, and the settings are compatible."""

from pathlib import Path

from piecework.device_profiles.fleet import Fleet, load_fleet
from piecework.federated_data.datasets import ArrayDataset, load
from piecework.federation.autoattack import require_autoattack
from piecework.models.cascade import Blueprint
from piecework.models.init_weights import read_pretrained
from piecework.models.zoo import require_model
from piecework.planning.cut import trains_adversarially
from piecework.server_app.callbacks import find_callbacks
from piecework.strategies import find_method
from piecework.training.settings import Settings
from piecework.training.setup import (
    blueprint_for,
    check_augmentation,
    check_partition,
    dataset_of,
    image_attack,
    prepare_dataset,
)


def preflight(settings: Settings) -> tuple[Fleet, ArrayDataset, Blueprint]:
    """Return the fleet, data set and model that settings name. Raises ValueError, which names the bad setting."""
    fleet, can = load_fleet(settings.fleet), find_method(settings.strategy).can
    find_callbacks(settings)
    require_model(settings.model)  # before data are looked for, which may have to be downloaded
    load(prepare_dataset(settings), verify=True)  # only here: clients trust the verified files
    data = dataset_of(settings)
    check_partition(settings, data)
    check_augmentation(settings, data)
    if trains_adversarially(can, settings):
        image_attack(settings, data, settings.attack.steps)
    require_autoattack(settings, data)
    blueprint = blueprint_for(settings, data)
    if settings.training.init_weights:
        read_pretrained(Path(settings.training.init_weights), blueprint)
    return fleet, data, blueprint
