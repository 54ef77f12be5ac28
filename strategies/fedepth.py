"""FeDepth ("Memory-adaptive Depth-wise Heterogeneous Federated Learning"), the server's side: Algorithm 1.

W^{t+1} = sum_k p_k / sum_k' p_k' W_k^{t+1}, with p_k the number of training examples (line 7). Each client cuts the
model by its own budget; the server prices what that cut will ask for, as one training step on fake tensors.

Ours, where the paper is silent: blocks that a client had to leave out are neither uploaded nor averaged
(`partial-training = dilute` restores the authors' way). m-FeDepth's heads are part of the global model and are averaged
with it.
"""

from contextlib import suppress

from client_app.setup import recipe_for
from client_app.trainers.fedepth import MUTUAL, choose_pieces, mutual_loss
from client_app.training import piece_price, single_loss
from device_profiles.memory import StepPrice
from models.partition import AtomTooLargeError, Piece, atom_names
from strategies.base import PieceStrategy


class FeDepth(PieceStrategy):
    """FeDepth with one head, shared by all sub-problems."""

    name = "fedepth"

    def cut(self, budget: int) -> list[Piece]:
        """What the client will come to. Raises AtomTooLargeError where not even the last atom fits."""
        return choose_pieces(
            atom_names(self.blueprint), self.price, self.settings.allowance(budget), self.settings.mutual_models
        )

    def prices_for(self, budget: int) -> dict[Piece, int]:
        """All prices the client's decomposition looks up; the whole list for a device that measures itself."""
        asked: dict[Piece, int] = {}

        def look_up(piece: Piece) -> int:
            asked[piece] = self.price(piece)
            return asked[piece]

        with suppress(AtomTooLargeError):  # the client will refuse, with the price of the atom that does not fit
            choose_pieces(
                atom_names(self.blueprint), look_up, self.settings.allowance(budget), self.settings.mutual_models
            )
        if any(member.device == "auto" for member in self.roster.members.values()):
            self._price_all(look_up, budget)
        return asked

    def _price_all(self, look_up: object, budget: int) -> None:
        """Every run of atoms that fits: a device may find less memory free than the server assumed."""
        assert callable(look_up)
        for start in range(len(self.blueprint.atoms)):
            for stop in range(start + 1, len(self.blueprint.atoms) + 1):
                if look_up(tuple(range(start, stop))) > budget:
                    break

    def trace_piece(self, piece: Piece) -> StepPrice:
        """One step of a piece with its head, or of M whole models that learn together."""
        recipe = recipe_for(self.settings, 1.0)
        if piece[0] != MUTUAL:
            return piece_price(self.blueprint, piece, self.head_of(piece), recipe, 1, single_loss)
        whole = tuple(range(len(self.blueprint.atoms)))
        loss = mutual_loss(self.settings.mutual_loss)
        return piece_price(self.blueprint, whole, "head", recipe, piece[1], loss)

    def paper_bytes(self, piece: Piece) -> float:
        """M models cost M times one."""
        whole = tuple(range(len(self.blueprint.atoms)))
        return piece[1] * super().paper_bytes(whole) if piece[0] == MUTUAL else super().paper_bytes(piece)

    def describe(self, piece: Piece) -> str:
        """A piece for people."""
        return f"{piece[1]} whole models, mutually" if piece[0] == MUTUAL else super().describe(piece)

    def head_of(self, piece: Piece) -> str:
        """The head a piece is trained with."""
        last = len(self.blueprint.atoms) - 1
        return f"exits.{piece[-1]}" if self.exits and piece[-1] != last else "head"


class MFeDepth(FeDepth):
    """m-FeDepth: every sub-problem has a head of its own (section 4.1)."""

    name = "m-fedepth"
    exits = True
