"""The strategies, found by name. Each way of making a model fit a device has a folder.

This package may import federation, planning, client_app and the packages that these import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from piecework.device_profiles.names import did_you_mean

if TYPE_CHECKING:
    from piecework.planning.partition_policy import PartitionPolicy
    from piecework.strategies.base import PieceStrategy

STRATEGIES = {
    "allsmall": ("piecework.strategies.width.allsmall", "AllSmall"),
    "depthfl": ("piecework.strategies.cascade.depthfl", "DepthFL"),
    "exclusivefl": ("piecework.strategies.whole.exclusivefl", "ExclusiveFL"),
    "fedavg": ("piecework.strategies.whole.fedavg", "FedAvg"),
    "feddf": ("piecework.strategies.distillation.feddf", "FedDF"),
    "feddrop": ("piecework.strategies.width.feddrop", "FedDrop"),
    "fedepth": ("piecework.strategies.cascade.fedepth", "FeDepth"),
    "fedet": ("piecework.strategies.distillation.fedet", "FedET"),
    "fedpm": ("piecework.strategies.sparse.fedpm", "FedPM"),
    "fedprophet": ("piecework.strategies.cascade.fedprophet", "FedProphet"),
    "fedrbn": ("piecework.strategies.whole.fedrbn", "FedRBN"),
    "fedrolex": ("piecework.strategies.width.fedrolex", "FedRolex"),
    "fjord": ("piecework.strategies.width.fjord", "FjORD"),
    "heterofl": ("piecework.strategies.width.heterofl", "HeteroFL"),
    "jfat": ("piecework.strategies.whole.jfat", "JFAT"),
    "local": ("piecework.strategies.sparse.spafl", "Local"),
    "m-fedepth": ("piecework.strategies.cascade.fedepth", "MFeDepth"),
    "origdrop": ("piecework.strategies.width.origdrop", "OrigDrop"),
    "orthdrop": ("piecework.strategies.low_rank.orthdrop", "OrthDrop"),
    "prism": ("piecework.strategies.low_rank.prism", "PriSM"),
    "profl": ("piecework.strategies.cascade.profl", "ProFL"),
    "spafl": ("piecework.strategies.sparse.spafl", "SpaFL"),
    "splitmix": ("piecework.strategies.width.splitmix", "SplitMix"),
}


def find_strategy(name: str) -> "type[PieceStrategy]":
    """Return the strategy of this name, importing its module. Raises ValueError, which lists the known names."""
    require_strategy(name)
    found: type[PieceStrategy] = _load(STRATEGIES[name])
    return found


def require_strategy(name: str) -> None:
    """Raise ValueError, which lists the known names, if there is no strategy of this name."""
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ValueError(f"unknown strategy {name!r}: known are {known}{did_you_mean(name, STRATEGIES)}")


def find_policy(name: str) -> "type[PartitionPolicy]":
    """Return the partition policy of the strategy of this name. Raises ValueError, which lists the known names."""
    return find_strategy(name).policy_class


def _load(place: tuple[str, str]) -> Any:
    module, attribute = place
    return getattr(import_module(module), attribute)
