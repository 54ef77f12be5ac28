"""ExclusiveFL, a baseline of ProFL's Table 1: FedAvg over the clients that can train the whole model; others are not asked.

Where nobody can, there is no result ("NA" in the table), and the run does not start.
"""

from piecework.strategies.whole.fedavg import FedAvg, FedAvgRule


class ExclusiveFLRule(FedAvgRule):
    """One stage; the whole model or nothing."""

    excluded = "not asked"


class ExclusiveFL(FedAvg):
    """FedAvg that leaves poor devices out."""

    name = "exclusivefl"
    rule_class = ExclusiveFLRule

    def begin(self) -> None:
        """Raises ValueError where no client can train the whole model."""
        self.require_somebody(self.needed(), "Training the whole model")

    def needed(self) -> int:
        """Bytes of training the whole model."""
        return self.price(tuple(range(len(self.blueprint.atoms))))

    def may_be_asked(self, client: int, server_round: int) -> bool:
        """Who can afford it in this round."""
        return self.affords(client, server_round, self.needed())
