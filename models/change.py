"""Changes: what a method makes of a run's model, as a frozen value that messages and model files can hold."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecework.models.cascade import Blueprint


@dataclass(frozen=True)
class Origin:
    """What a changed model was made from: the run's own model with this width ratio, and with any other one."""

    width: float
    at_width: "Callable[[float], Blueprint]"


class Change(ABC):
    """A change to a model. Its kind is a frozen dataclass that `register_change` (models/variant.py) makes known.

    In messages and files its fields lie beside those of the variant, so their names say what they change. Values from there are
    checked against the fields' types, which pydantic reads.
    """

    @abstractmethod
    def apply(self, model: "Blueprint", origin: Origin) -> "Blueprint":
        """Return the changed model. Raises ValueError if it cannot be changed so."""
