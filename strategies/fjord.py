"""FjORD (Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
NeurIPS 2021), the server's side.

p_max: of `width-shares` the largest whose step fits a client, or that which its fleet gives it (`keep`). The client is sent the
first p_max C channels of every layer, and trains all nets of smaller shares within them (`client_app.trainers.fjord`). Each
entry is averaged over the clients that had it, weighted by examples: the slices of FjORD's nested aggregation.

`fjord-sampling = round` is what SpaFL compares with: one share is drawn for each client and round, and only that is sent and
trained. There is no Scaler. Self-distillation: `fjord-distillation`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from flwr.app import ArrayRecord

from client_app.randomness import generator
from client_app.task import OwnFields, Task, piece_key
from client_app.trainers.fjord import Orders, nested_loss
from client_app.trainers.heterofl import WIDTH
from device_profiles.profile import DeviceState
from models.partition import Piece
from strategies.heterofl import HeteroFL, HeteroFLRule
from strategies.pricing import Part
from strategies.state import Experiment


class FjORDRule(HeteroFLRule):
    """As HeteroFL's; a step may run two nets."""

    masks = False
    scales = False
    suggested = False  # its plan is HeteroFL's

    @property
    def distils(self) -> bool:
        """Whether a client's widest net teaches the others."""
        return self.settings.fjord_distillation and self.settings.fjord_sampling == "batch"

    def nested(self, level: int) -> int:
        """How many narrower nets a client with this share trains."""
        return len(self.shares) - level - 1 if self.settings.fjord_sampling == "batch" else 0

    def part(self, piece: Piece) -> Part:
        """(WIDTH, n): the model with the n-th share, and with self-distillation the widest net within it too."""
        widths = tuple(self.models[piece[1] + 1 :][: self.nested(piece[1])])
        return replace(super().part(piece), make_loss=nested_loss(widths, self.distils))


class FjORD(HeteroFL):
    """Ordered dropout."""

    name = "fjord"
    rule_class = FjORDRule
    rule: FjORDRule
    orders_class = Orders
    by_examples: ClassVar[bool] = True

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        has_norms = any("bn" in name or "norm" in name for name in self.rule.shapes[0])
        if self.settings.batch_norm != "batch" and has_norms:
            raise ValueError(
                f"batch-norm = {self.settings.batch_norm!r}: fjord's nets have different statistics, use batch"
            )

    def orders(self, level: int) -> OwnFields:
        """What is said of a share."""
        shares = self.rule.shares
        nested = shares[level + 1 :][: self.rule.nested(level)]
        return Orders(level, shares[level], nested, self.rule.distils)

    def ask(
        self, clients: Iterable[int], server_round: int, arrays: ArrayRecord
    ) -> dict[int, tuple[Task, DeviceState]]:
        """The tasks; where one share is drawn for a round, any that fits, by (seed, round, client)."""
        asked = super().ask(clients, server_round, arrays)
        if self.settings.fjord_sampling == "batch":
            return asked
        drawn = {}
        for client, (task, state) in asked.items():
            widest = Orders.of(task).level
            rng = generator(self.settings.seed, server_round, client, "width")
            level = int(rng.integers(widest, len(self.rule.shares)))
            own = self.orders(level).to_own() | {"draw": client}
            prices = {piece_key((WIDTH, level)): self.price((WIDTH, level))}
            drawn[client] = replace(task, own=own, prices=prices), state
        return drawn
