"""What systems have in common that train one part of the model after another."""

from abc import abstractmethod
from collections.abc import Iterable

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from piecework.models.partition import Piece
from piecework.strategies.base import PieceStrategy
from piecework.strategies.state import Progress


class StagedStrategy(PieceStrategy):
    """A system whose run has stages: each ends when the system says so, and the next one goes on from what it left."""

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
        """How far the stages are."""
        return Progress(self.stage, self.finished, self.measurable)

    @abstractmethod
    def conclude(self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> ArrayRecord:
        """End the stage where it is time; the model that the rounds to come go on from."""

    def configure_query(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> Iterable[Message] | None:
        """Questions to clients that have to be answered before the round; None = there are none."""
        return None

    def aggregate_query(self, server_round: int, replies: Iterable[Message]) -> bool:
        """Take in the answers; whether the round can begin."""
        return True

    @abstractmethod
    def final(self, arrays: ArrayRecord) -> ArrayRecord:
        """The model of the run, which may be an earlier one than that of the last round."""

    @abstractmethod
    def final_model(self) -> tuple[Piece, str]:
        """The atoms and the head that make the model of the run, where it ends now."""
