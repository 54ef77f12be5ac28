"""ExclusiveFL, a baseline of ProFL's Table 1: FedAvg over the clients that can train the whole model.

Other clients are never sampled. If no client can train it, there is no result ("NA" in the table), and the run does not start.
"""

from piecework.strategies.whole.fedavg import FedAvg, FedAvgPolicy


class ExclusiveFLPolicy(FedAvgPolicy):
    """FedAvg's policy; a device too small for the whole model is never sampled."""

    when_excluded = "gets no task"


class ExclusiveFL(FedAvg):
    """FedAvg that excludes clients too poor for the whole model."""

    name = "exclusivefl"
    policy_class = ExclusiveFLPolicy

    def begin(self) -> None:
        """Restrict sampling to the clients that can train the whole model. Raises ValueError if there are none."""
        self.cohort.minimum = self.needed()
        self.resources.require_capable_client(self.cohort.minimum, "Training the whole model")

    def needed(self) -> int:
        """Return the memory cost (bytes) of training the whole model."""
        return self.policy.needed(self.policy.whole)
