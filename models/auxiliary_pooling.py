"""The pooling before auxiliary heads as a change of the model."""

from dataclasses import dataclass, replace
from typing import Literal

from piecework.models.cascade import Blueprint
from piecework.models.change import Change, Origin


@dataclass(frozen=True)
class AuxiliaryPooling(Change):
    """Another pooling before auxiliary heads (FedProphet)."""

    pooling: Literal["auto", "authors", "none"]

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the model with this pooling."""
        return replace(model, auxiliary_pool=self.pooling)
