"""The strategies by name."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies.base import PieceStrategy

STRATEGIES = {
    "fedavg": ("strategies.fedavg", "FedAvg"),
    "fedepth": ("strategies.fedepth", "FeDepth"),
    "m-fedepth": ("strategies.fedepth", "MFeDepth"),
}


def find_strategy(name: str) -> "type[PieceStrategy]":
    """The strategy of this name. Raises ValueError, listing the known ones."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: known are {', '.join(STRATEGIES)}")
    module, attribute = STRATEGIES[name]
    found: type[PieceStrategy] = getattr(import_module(module), attribute)
    return found
