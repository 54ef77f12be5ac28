"""FedAvg (H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629).

Algorithm 1: w <- sum_k n_k / n w_k over the clients of a round. Every client trains the whole model, at `architecture.width`;
a client whose budget is too small refuses the task. With `memory.fit` it may compute its batches in micro-batches, or recompute
segments of the model; it refuses if no such step fits.
"""

from dataclasses import replace
from functools import cached_property

from piecework.device_profiles.profile import DeviceState
from piecework.models.work_item import WorkItem
from piecework.planning.fit import cheapest, smallest
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
        return [self.within(self.part(self.fitted(state.allowed_bytes)), state)]

    @cached_property
    def _steps(self) -> dict[int, WorkItem]:
        """The work items that `fitted` found, by the bytes they may take."""
        return {}

    def fitted(self, allowed: int) -> WorkItem:
        """Return the whole model with the step that `memory.fit` gives a device with `allowed` bytes (planning/fit.py).

        If no step fits, it is the one that takes the fewest bytes.
        """
        if allowed not in self._steps:
            ways, part = self.settings.memory.ways, self.part(self.whole)
            found = cheapest(self.cost_model, part, allowed, ways) or smallest(self.cost_model, part, ways)
            self._steps[allowed] = replace(self.whole, micro_batch=found.micro_batch, recompute=found.recompute)
        return self._steps[allowed]


class FedAvg(PieceStrategy):
    """Federated averaging over the clients that have enough memory for the whole model."""

    name = "fedavg"
    policy_class = FedAvgPolicy
    policy: FedAvgPolicy

    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """Return the memory cost of the whole model, the only one that a client looks up."""
        item = self.policy.fitted(allowed)
        return {item: self.policy.bytes(item)}
