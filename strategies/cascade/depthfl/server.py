"""DepthFL: each client trains as many of the model's first blocks as fit, the server's side.

Minjae Kim, Sangyoon Yu, Suhyun Kim, Soo-Mook Moon, "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR
2023, https://openreview.net/forum?id=pf8RIZTMU58

The depth d_k of client k is the largest number of blocks whose training step, with a classifier (exit) after each block, fits
its budget. Clients that cannot train the first block get no task. Every array is averaged over the clients that trained it,
with equal weights. The model predicts by the mean of its classifiers' logits.

With `depthfl.feddyn-alpha` a > 0, the server uses FedDyn: h <- h - a / m sum_k (theta_k - theta_t), where k are the round's
clients that trained the array and m is the number of all clients; then theta <- mean of theta_k - h / a.

Where it differs from the paper: FedDyn is off by default, because ProFL's comparison uses plain averaging. The blocks are those
of ProFL (runs of equal channels), so that both are compared on the same cuts. A client's depth follows from its memory, with
the classifiers counted. Classifiers that no client has trained yet are not part of the prediction.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.federation.aggregation import CheckedUpdate
from piecework.models.basic_layers import blocks_of
from piecework.models.cascade import parameter_names, unit_of
from piecework.models.depth_exits import Exits
from piecework.models.partition import Piece
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context, OfUnits
from piecework.planning.cut import Cut, Stage
from piecework.planning.part import Part
from piecework.strategies.cascade.depthfl.client import (
    DepthFLTaskConfig,
    ExitsModel,
    costed_loss,
    distillation_weight,
    item_of_depth,
)
from piecework.strategies.cascade.depthfl.settings import DepthFLSettings
from piecework.strategies.method import Method, Round
from piecework.strategies.resources import ClientResources
from piecework.strategies.serving import DeviceModel, Serving
from piecework.strategies.state import Progress, StrategyState
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS

H = "h/"  # prefix in `kept` of FedDyn's h of each parameter, float32


class DepthFLCut(Cut):
    """One stage: each device trains as many of the first blocks as fit. A `depth` is a number of blocks, from 1."""

    @cached_property
    def blocks(self) -> list[Piece]:
        """The blocks of the model, as atoms."""
        return blocks_of(self.blueprint)

    @property
    def variant(self) -> Variant:
        """The run's model with an exit after each block."""
        return Variant(changes=(Exits(tuple(self.blocks)),))

    def depth(self, depth: int) -> WorkItem:
        """Return the work item that trains the first `depth` blocks with their exits."""
        return item_of_depth(self.model, self.variant, depth)

    def plain_part(self, item: WorkItem) -> Part:
        """Return the blocks and exits that a work item trains, with DepthFL's loss."""
        depth = next(d for d in range(1, len(self.blocks) + 1) if self.depth(d) == item)
        name = "the whole model" if depth == len(self.blocks) else "block 1" if depth == 1 else f"blocks 1 to {depth}"
        # The memory cost does not depend on the weight of self-distillation.
        loss = costed_loss(1.0, self.settings.of(DepthFLSettings).feddyn_alpha)
        return Part(self.model, item.atoms, item.head, make_loss=loss, name=f"{name} and exits", piece_class=ExitsModel)

    def deepest(self, allowed: int) -> int:
        """Return the largest depth whose memory cost is at most `allowed` bytes, or 0 if the first block does not fit."""
        depths = range(len(self.blocks), 0, -1)
        return next((d for d in depths if self.needed_bytes(self.depth(d)) <= allowed), 0)

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of the first block with its exit."""
        return self.needed_bytes(self.depth(1))

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the blocks that the smallest budget allows, at least the first."""
        return [Stage("training", (self._fit_part(self.depth(max(1, self.deepest(self.allowed))), self.allowed),))]


@dataclass
class DepthFLState(StrategyState):
    """`deepest` is the largest number of blocks that any client has trained so far."""

    deepest: int = 0


class DepthFLServing(Serving):
    """Serves the blocks that any client has trained, with their exits. A device deploys those that it trains itself."""

    method: "DepthFL"

    def device_models(self, server_round: int) -> list[DeviceModel]:
        """Return the blocks of each depth that a device trains, which predict by the mean of their exits' logits."""
        cut, deepest = self.method.cut, self.method.state.deepest
        counts = Counter(min(cut.deepest(state.allowed_bytes), deepest) for state in self.device_states())
        models = []
        for depth in sorted(counts.keys() - {0}, reverse=True):
            item = cut.depth(depth)
            part, name = (item.atoms, item.head), cut.part(item).name
            models.append(DeviceModel(name, counts[depth], self.variant, self.arrays, part))
        return models


class DepthFL(Method):
    """Clients train models of different depths, each with a classifier after every block."""

    name = "depthfl"
    can = METHODS["depthfl"].can
    refuses = (
        Refusal(
            "architecture.batch-norm",
            "the server would have no model to predict with, use running or batch",
            ("local",),
        ),
    )
    cut_class = DepthFLCut
    cut: DepthFLCut
    state_class = DepthFLState
    state: DepthFLState
    serving_class = DepthFLServing
    piece_class = ExitsModel

    clients: int

    def begin(self, fleet: ClientResources) -> None:
        """Raise ValueError if no client can train the first block."""
        fleet.require_capable_client(self.cut.min_budget(), "Training the first block with its exit")
        self.clients = len(fleet.registry.members)

    def assign(self, ctx: Context) -> Assignment:
        """Return the largest depth that fits, at least 1, with the weight of self-distillation; less are all smaller depths."""
        depth = max(1, self.cut.deepest(ctx.device.allowed_bytes))
        items = [self.cut.depth(d) for d in range(1, depth + 1)]
        units = frozenset({*(f"atoms.{atom}" for atom in items[-1].atoms), items[-1].head})
        weight = distillation_weight(ctx.round, self.settings.of(DepthFLSettings).distillation_rounds)
        needed = self.cut.needs(*items)
        return Assignment((items[-1],), needed, sends=OfUnits(units), config=DepthFLTaskConfig(depth, weight))

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add an update to the mean of its arrays, with the same weight for every client."""
        current.mean.add(update.arrays, 1)

    @property
    def progress(self) -> Progress:
        """The progress of the run, with the blocks that any client has trained; untrained exits would predict at random."""
        item = self.cut.depth(self.state.deepest or len(self.cut.blocks))
        return Progress(model=(item.atoms, item.head))

    def finish(self, current: Round) -> ArrayRecord:
        """Return the new model: the mean of the updates, with FedDyn minus h / a."""
        alpha, before = self.settings.of(DepthFLSettings).feddyn_alpha, current.arrays
        trained = {unit_of(name) for name in before if name in current.mean}
        exits = [self.cut.depth(d).head for d in range(1, len(self.cut.blocks) + 1)]
        self.state.deepest = max(
            self.state.deepest, *(d for d, unit in enumerate(exits, start=1) if unit in trained), 0
        )
        after = super().finish(current)
        if not alpha:
            return after
        dynamic = self._parameters()
        for name in [name for name in after if name in current.mean and name in dynamic]:
            theta, mean = before[name].numpy(), after[name].numpy()
            h = self.kept[H + name].numpy() if H + name in self.kept else np.zeros_like(theta)
            h = h - alpha * current.mean.weight(name) / self.clients * (mean - theta)
            self.kept[H + name] = Array(h.astype(theta.dtype))
            after[name] = Array((mean - h / alpha).astype(theta.dtype))
        return after

    def _parameters(self) -> set[str]:
        """Return the names of the parameters; FedDyn does not apply to batch-norm statistics, which are only averaged."""
        model = self.cut.model
        return {name for unit in model.units() for name in parameter_names(model, unit)}

    def details(self, current: Round) -> dict[str, Any]:
        """Return each client's depth and the weight of self-distillation, for the round record."""
        configs = {client: each.assignment.config for client, each in current.assigned.items()}
        return {
            "depths": {str(client): config.depth for client, config in configs.items()},
            "distillation_weight": next((config.weight for config in configs.values()), None),
        }
