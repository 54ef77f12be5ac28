"""What a run leaves behind: the model that is evaluated and saved."""

from typing import TYPE_CHECKING

from flwr.app import ArrayRecord

from piecework.models.variant import Variant

if TYPE_CHECKING:
    from piecework.strategies.base import PieceStrategy


class Serving:
    """Makes the served model of a strategy's trained one, by default the trained model itself."""

    def __init__(self, strategy: "PieceStrategy") -> None:
        self.strategy = strategy

    @property
    def variant(self) -> Variant:
        """The variant of the run's model that is evaluated and saved."""
        return self.strategy.policy.variant

    def arrays(self, trained: ArrayRecord) -> ArrayRecord:
        """Return the served arrays of a trained model."""
        return trained
