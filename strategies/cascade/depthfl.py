"""DepthFL: each client trains as many of the model's first blocks as fit, the server's side.

Minjae Kim, Sangyoon Yu, Suhyun Kim, Soo-Mook Moon, "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR
2023, https://openreview.net/forum?id=pf8RIZTMU58

The depth d_k of client k is the largest number of blocks whose training step, with a classifier (exit) after each block, fits
its budget. Clients that cannot train the first block get no task. Every array is averaged over the clients that trained it,
with equal weights. The model predicts by the mean of its classifiers' logits.

With `depthfl.feddyn-alpha` a > 0, the server uses FedDyn, as in the paper: h <- h - a / m sum_k (theta_k - theta_t), where k
are the round's clients that trained the array and m is the number of all clients; then theta <- mean of theta_k - h / a. This
is off by default, because ProFL's comparison uses plain averaging.

Ours: the blocks are those of ProFL (runs of equal channels), so that both are compared on the same cuts. Classifiers that no
client has trained yet are not part of the prediction.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.client_app.trainers.cascade.depthfl import (
    DepthFLTaskConfig,
    ExitsModel,
    costed_loss,
    distillation_weight,
    item_of_depth,
)
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import CheckedUpdate
from piecework.models.basic_layers import blocks_of
from piecework.models.cascade import Blueprint, parameter_names, unit_of
from piecework.models.partition import Piece
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel
from piecework.planning.part import Part
from piecework.planning.partition_policy import PartitionPolicy, Stage
from piecework.strategies.base import PieceStrategy
from piecework.strategies.client_evaluation import EvaluationAsTrained
from piecework.strategies.serving import DeviceModel, Serving
from piecework.strategies.state import Experiment, StrategyState
from piecework.training.messages import Task
from piecework.training.settings import Settings

H = "h/"  # prefix in `kept` of FedDyn's h of each parameter, float32


class DepthFLPolicy(PartitionPolicy):
    """One stage: each device trains as many of the first blocks as fit. A `depth` is a number of blocks, from 1."""

    adversarial = "optional"
    adapts = True
    when_excluded = "gets no task"
    untrained = "cut off"

    def __init__(self, blueprint: Blueprint, cost_model: CostModel, settings: Settings, smallest: int = 0) -> None:
        super().__init__(blueprint, cost_model, settings, smallest)
        self.blocks = blocks_of(blueprint)

    @property
    def variant(self) -> Variant:
        """The run's model with an exit after each block."""
        return Variant(exits=tuple(self.blocks))

    def depth(self, depth: int) -> WorkItem:
        """Return the work item that trains the first `depth` blocks with their exits."""
        return item_of_depth(self.model, self.variant, depth)

    def plain_part(self, item: WorkItem) -> Part:
        """Return the blocks and exits that a work item trains, with DepthFL's loss."""
        depth = next(d for d in range(1, len(self.blocks) + 1) if self.depth(d) == item)
        name = "the whole model" if depth == len(self.blocks) else "block 1" if depth == 1 else f"blocks 1 to {depth}"
        # The memory cost does not depend on the weight of self-distillation.
        loss = costed_loss(1.0, self.settings.depthfl.feddyn_alpha)
        return Part(self.model, item.atoms, item.head, make_loss=loss, name=f"{name} and exits", piece_class=ExitsModel)

    def deepest(self, allowed: int) -> int:
        """Return the largest depth whose memory cost is at most `allowed` bytes, or 0 if the first block does not fit."""
        depths = range(len(self.blocks), 0, -1)
        return next((d for d in depths if self.needed(self.depth(d)) <= allowed), 0)

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of the first block with its exit."""
        return self.needed(self.depth(1))

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the blocks that the smallest budget allows, at least the first."""
        return [Stage("training", (self._fitted_part(self.depth(max(1, self.deepest(self.allowed))), self.allowed),))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """Return the blocks that fit the device. Raises MemoryBudgetExceededError if the first block does not."""
        depth = self.deepest(state.allowed_bytes)
        if not depth:
            raise MemoryBudgetExceededError(self.min_budget(), state.budget_bytes, "training block 1 and its exit")
        return [self._fitted_part(self.depth(depth), state.allowed_bytes)]


@dataclass
class DepthFLState(StrategyState):
    """`deepest` is the largest number of blocks that any client has trained so far."""

    deepest: int = 0


class DepthFLServing(Serving):
    """Serves the blocks that any client has trained, with their exits. A device deploys those that it trains itself."""

    strategy: "DepthFL"

    def device_models(self, server_round: int) -> list[DeviceModel]:
        """Return the blocks of each depth that a device trains, which predict by the mean of their exits' logits."""
        policy, deepest = self.strategy.policy, self.strategy.state.deepest
        counts = Counter(min(policy.deepest(state.allowed_bytes), deepest) for state in self.device_states())
        models = []
        for depth in sorted(counts.keys() - {0}, reverse=True):
            item = policy.depth(depth)
            part, name = (item.atoms, item.head), policy.part(item).name
            models.append(DeviceModel(name, counts[depth], self.variant, self.arrays, part))
        return models


class DepthFL(PieceStrategy):
    """Clients train models of different depths, each with a classifier after every block."""

    name = "depthfl"
    policy_class = DepthFLPolicy
    evaluation_class = EvaluationAsTrained
    policy: DepthFLPolicy
    serving_class = DepthFLServing
    measures = False
    state_class = DepthFLState
    state: DepthFLState
    piece_class = ExitsModel

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        if self.settings.norms == "local":
            raise ValueError(
                "architecture.batch-norm = 'local': the server would have no model to predict with, use running or batch"
            )

    def begin(self) -> None:
        """Exclude clients that cannot train the first block, as in ProFL's comparison. Raises ValueError if no client can."""
        self.cohort.minimum = self.policy.min_budget()
        self.resources.require_capable_client(self.cohort.minimum, "Training the first block with its exit")

    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """Return the bytes of the assigned depth, which is at least 1, and of all smaller depths."""
        items = [self.policy.depth(d) for d in range(1, max(1, self.policy.deepest(allowed)) + 1)]
        return {item: self.policy.needed(item) for item in items}

    def task(self, server_round: int, state: DeviceState) -> Task:
        """Return the task with the client's depth and the weight of self-distillation."""
        depth = max(1, self.policy.deepest(state.allowed_bytes))
        weight = distillation_weight(server_round, self.settings.depthfl.distillation_rounds)
        return replace(super().task(server_round, state), own=DepthFLTaskConfig(depth, weight).to_values())

    def sent_units(self, task: Task) -> set[str]:
        """Return the units of the client's blocks and exits."""
        item = self.policy.depth(DepthFLTaskConfig.of(task).depth)
        return {*(f"atoms.{atom}" for atom in item.atoms), item.head}

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add an update to the mean of its arrays, with the same weight for every client."""
        self.mean.add(update.arrays, 1)
        trained = {unit_of(name) for name in update.arrays}
        exits = [self.policy.depth(d).head for d in range(1, len(self.policy.blocks) + 1)]
        self.state.deepest = max(
            self.state.deepest, *(d for d, unit in enumerate(exits, start=1) if unit in trained), 0
        )

    def trained_model(self) -> tuple[Piece, str]:
        """Return the blocks that any client has trained, with their exits; untrained exits would predict at random."""
        item = self.policy.depth(self.state.deepest or len(self.policy.blocks))
        return item.atoms, item.head

    def finish(self) -> ArrayRecord:
        """Return the new model: the mean of the updates, with FedDyn minus h / a."""
        alpha, before = self.settings.depthfl.feddyn_alpha, self.dispatcher.arrays
        after = super().finish()
        if not alpha:
            return after
        dynamic = self._parameters()
        for name in [name for name in after if name in self.mean and name in dynamic]:
            theta, mean = before[name].numpy(), after[name].numpy()
            h = self.kept[H + name].numpy() if H + name in self.kept else np.zeros_like(theta)
            h = h - alpha * self.mean.weight(name) / len(self.registry.members) * (mean - theta)
            self.kept[H + name] = Array(h.astype(theta.dtype))
            after[name] = Array((mean - h / alpha).astype(theta.dtype))
        return after

    def _parameters(self) -> set[str]:
        """Return the names of the parameters; FedDyn does not apply to batch-norm statistics, which are only averaged."""
        return {name for unit in self.blueprint.units() for name in parameter_names(self.blueprint, unit)}

    def details(self) -> dict[str, Any]:
        """Return each client's depth and the weight of self-distillation, for the round record."""
        task_config = {client: DepthFLTaskConfig.of(task) for client, (task, _) in self._asked.items()}
        return {
            "depths": {str(client): each.depth for client, each in task_config.items()},
            "distillation_weight": next((each.weight for each in task_config.values()), None),
        }
