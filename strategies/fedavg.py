"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017).

Algorithm 1: w <- sum_k n_k / n w_k over the clients of a round. Every client trains the whole model, at `model-width`;
a client whose budget does not allow it says so.
"""

from device_profiles.memory import MemoryBudgetExceededError
from models.partition import Piece
from strategies.base import PieceStrategy


class FedAvg(PieceStrategy):
    """FedAvg over the clients that can afford the whole model."""

    name = "fedavg"

    def cut(self, budget: int) -> list[Piece]:
        """The whole model, or nothing."""
        ((whole, needed),) = self.prices_for(budget).items()
        if needed > self.settings.allowance(budget):
            raise MemoryBudgetExceededError(needed, budget, "training the whole model")
        return [whole]

    def prices_for(self, budget: int) -> dict[Piece, int]:
        """One price: the whole model's."""
        whole = tuple(range(len(self.blueprint.atoms)))
        return {whole: self.price(whole)}
