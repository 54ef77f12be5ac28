"""ExclusiveFL, a baseline of ProFL's Table 1: FedAvg over the clients that can train the whole model; others are not asked.

Where no client can, there is no result ("NA" in the table), and the run does not start.
"""

from piecework.strategies.whole.fedavg import FedAvg, FedAvgPolicy


class ExclusiveFLPolicy(FedAvgPolicy):
    """One stage; the whole model or nothing."""

    when_excluded = "not asked"


class ExclusiveFL(FedAvg):
    """FedAvg that leaves poor devices out."""

    name = "exclusivefl"
    policy_class = ExclusiveFLPolicy

    def begin(self) -> None:
        """Raises ValueError where no client can train the whole model."""
        self.cohort.minimum = self.needed()
        self.resources.require_somebody(self.cohort.minimum, "Training the whole model")

    def needed(self) -> int:
        """Bytes of training the whole model."""
        return self.policy.bytes(self.policy.whole)
