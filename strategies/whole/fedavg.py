"""FedAvg (H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629).

Algorithm 1: w <- sum_k n_k / n w_k over the clients of a round. Every client trains the whole model, at `architecture.width`;
a client whose budget is too small refuses the task. With `memory.fit` it may compute its batches in micro-batches, or recompute
segments of the model; it refuses if no such step fits.
"""

from functools import cached_property

from piecework.device_profiles.profile import DeviceState
from piecework.models.work_item import WorkItem
from piecework.planning.part import Part
from piecework.planning.partition_policy import PartitionPolicy, Stage
from piecework.strategies.base import PieceStrategy


class FedAvgPolicy(PartitionPolicy):
    """One stage, in which a device trains the whole model or nothing."""

    adversarial = "optional"

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the whole model."""
        return [Stage("training", (self.part(self.whole),))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """Return the whole model, with a step that fits. Raises MemoryBudgetExceededError if none does."""
        return [self.within(self.whole, state)]


class FedAvg(PieceStrategy):
    """Federated averaging over the clients that have enough memory for the whole model."""

    name = "fedavg"
    accepts_late = True
    policy_class = FedAvgPolicy
    policy: FedAvgPolicy

    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """Return the memory cost of the whole model, the only one that a client looks up."""
        return {self.policy.whole: self.policy.needed(self.policy.whole)}
