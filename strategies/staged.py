"""The base of strategies that train one part of the model after another."""

from abc import abstractmethod
from collections.abc import Iterable

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from piecework.models.partition import Piece
from piecework.strategies.base import PieceStrategy
from piecework.strategies.state import Progress


class StagedStrategy(PieceStrategy):
    """A strategy whose run has stages. The strategy decides when a stage ends, and the next one starts from its result."""

    @property
    @abstractmethod
    def stage(self) -> str:
        """The name of the stage."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether there is nothing left to train."""

    @property
    def measurable(self) -> bool:
        """Whether the model of the round can be evaluated."""
        return True

    @property
    def progress(self) -> Progress:
        """The progress of the run through its stages."""
        return Progress(self.stage, self.finished, self.measurable)

    @abstractmethod
    def conclude(self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> ArrayRecord:
        """End the stage if it is due, and return the model for the next round."""

    def configure_query(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> Iterable[Message] | None:
        """Return the messages of a pre-round query, which clients answer before the round's tasks; None if there is none."""
        return None

    def aggregate_query(self, server_round: int, replies: Iterable[Message]) -> bool:
        """Process the answers to the pre-round query, and return whether the round can begin."""
        return True

    @abstractmethod
    def final(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model of the run, which may be from an earlier round than the last."""

    @abstractmethod
    def final_model(self) -> tuple[Piece, str]:
        """Return the atoms and the head of the run's model if the run ends now."""
