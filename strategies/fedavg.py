"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017).

Algorithm 1: w <- sum_k n_k / n w_k over the clients of a round. Every client trains the whole model, at `model-width`;
a client whose budget does not allow it says so.
"""

from models.partition import Piece
from strategies.base import PieceStrategy


class FedAvg(PieceStrategy):
    """FedAvg over the clients that can afford the whole model."""

    name = "fedavg"

    def prices_for(self, budget: int) -> dict[Piece, int]:
        """One price: the whole model's."""
        whole = tuple(range(len(self.blueprint.atoms)))
        return {whole: self.price(whole)}
