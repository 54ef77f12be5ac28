"""HeteroFL (Enmao Diao, Jie Ding, Vahid Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264), the server's side. FedRolex
and FedDrop choose other channels and are built on it.

W_l: the full model's weights of layer l; r: a client's fraction of the channels, the largest of `heterofl.width-ratios` whose
step fits its budget. A client trains the first r C of every layer's C channels (inputs and classes are never cut). Each entry
of the new W_l is the mean over the clients that had it, each counting the same; what no client had stays as it was. Of the last
layer only the rows of classes that a client has enter (masked cross-entropy; `heterofl.masked-loss`).

Its static batch norm is `architecture.batch-norm = measured`, the default here: norms keep no statistics in training, and those
of the full model are measured by clients (server_app/served_model.py; the paper asks all of them once, at the end). Running
statistics averaged over sub-models of different widths are not those of the full model: 9.7 % on the digits, and
measured ones give 94.2 %.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord

from piecework.client_app.trainers.width.heterofl import HeteroFLTaskConfig, input_ratios, width_loss
from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import CheckedUpdate, UpdateRejectedError, updated
from piecework.federation.reports import ClientReport
from piecework.models.cascade import Blueprint, Shape
from piecework.models.channels import Axes, channel_axes
from piecework.models.variant import Variant, vary
from piecework.models.width import (
    CoverageMean,
    Indices,
    Select,
    last_layer,
    ordered,
    require_parts,
    shapes,
    sub_indices,
    take,
)
from piecework.models.work_item import WorkItem
from piecework.planning.counts import entries
from piecework.planning.part import Part
from piecework.planning.partition_policy import PartitionPolicy, Stage
from piecework.strategies.base import PieceStrategy
from piecework.strategies.state import Experiment
from piecework.training.messages import Outcome, Task, TaskConfig


class HeteroFLPolicy(PartitionPolicy):
    """One stage: each device trains the widest model that fits."""

    adversarial = "optional"
    adapts = True
    masks: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    @cached_property
    def ratios(self) -> list[float]:
        """The ratios of channels that there are, largest first."""
        return self.settings.heterofl.ratios()

    def variant_of(self, level: int) -> Variant:
        """The sub-model of a ratio."""
        return Variant(width=self.ratios[level])

    def sub_model(self, level: int) -> WorkItem:
        """The work item of the sub-model of a ratio."""
        return WorkItem(tuple(range(len(self.models[level].atoms))), variant=self.variant_of(level))

    @cached_property
    def levels(self) -> dict[Variant, int]:
        """The number of the ratio of each sub-model."""
        return {self.variant_of(level): level for level in reversed(range(len(self.ratios)))}

    @cached_property
    def models(self) -> list[Blueprint]:
        """The model with each ratio."""
        return [vary(self.blueprint, self.variant_of(level)) for level in range(len(self.ratios))]

    def require_model(self) -> None:
        """Raises ValueError for a model of which a narrower one is not a choice of channels."""
        require_parts(self.blueprint, dict(zip(self.ratios, self.models, strict=True)))

    @cached_property
    def shapes(self) -> list[dict[str, Shape]]:
        """Of the arrays of each."""
        return [shapes(model) for model in self.models]

    @cached_property
    def last_layer(self) -> list[str]:
        """The arrays with a row for every class."""
        last = last_layer(self.models[0])
        return [name for name, shape in last.items() if shape[0] == self.blueprint.num_classes]

    @property
    def masked(self) -> bool:
        """Whether clients leave out the logits of classes that they lack."""
        return self.masks and self.settings.heterofl.masked_loss

    @property
    def scaled(self) -> bool:
        """Whether sub-models have a Scaler."""
        return self.scales and self.settings.heterofl.scaler

    def part(self, item: WorkItem) -> Part:
        """All of a sub-model."""
        level = self.levels[item.variant]
        ratio, model = self.ratios[level], self.models[level]
        present = (True,) * model.num_classes if self.masked else ()
        loss = width_loss(input_ratios(model, self.blueprint) if self.scaled else (), present)
        return Part(model, item.atoms, make_loss=loss, name=f"{ratio:.4g} of the channels")

    def level(self, allowed: int) -> int:
        """Return the number of the largest sub-model that takes at most so many bytes, or else of the smallest."""
        fitting = (level for level in range(len(self.ratios)) if self.bytes(self.sub_model(level)) <= allowed)
        return next(fitting, len(self.ratios) - 1)

    def level_of(self, state: DeviceState) -> int:
        """The number of the ratio that a device trains: that which its fleet gives it (`keep`), else the largest that fits.

        Raises ValueError for one that there is not.
        """
        if state.keep is None:
            return self.level(state.allowed_bytes)
        if state.keep not in self.ratios:
            known = ", ".join(f"{ratio:g}" for ratio in self.ratios)
            raise ValueError(f"keep = {state.keep:g} of device {state.device!r}: the run has the ratios {known}")
        return self.ratios.index(state.keep)

    def min_budget(self) -> int:
        """The narrowest model's cost."""
        return self.bytes(self.sub_model(len(self.ratios) - 1))

    @cached_property
    def stages(self) -> list[Stage]:
        """The model of the poorest device."""
        return [Stage("training", (self.part(self.sub_model(self.level(self.allowed))),))]

    def values(self, parts: list[Part]) -> tuple[float, float]:
        """The fraction of the channels of what the full model has, and not its square: the paper's count."""
        full = sum(entries(self.blueprint, unit) for unit in self.blueprint.units())
        found = sum(part.blueprint.width / self.blueprint.width for part in parts) * full
        return found, found

    def channels(self, part: Part) -> float:
        """Of sub-models that always have the first channels, their ratio; others come to all of them."""
        return 1.0 if self.moving else part.blueprint.width / self.blueprint.width

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The device's sub-model. Raises MemoryBudgetExceededError."""
        return [self.within(self.part(self.sub_model(self.level_of(state))), state)]


class HeteroFL(PieceStrategy):
    """Sub-models of the first channels."""

    name = "heterofl"
    policy_class = HeteroFLPolicy
    policy: HeteroFLPolicy
    orders_class: ClassVar[Any] = HeteroFLTaskConfig
    by_examples: ClassVar[bool] = False

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        if self.settings.architecture.batch_norm == "local":
            raise ValueError(
                f"architecture.batch-norm = 'local': channels of {self.name}'s sub-models change, use measured, running or "
                f"batch"
            )
        self.coverage = CoverageMean()
        self._classes: dict[int, list[int]] = {}

    @cached_property
    def axes(self) -> dict[str, Axes]:
        """Which channels the arrays have."""
        return channel_axes(self.blueprint)

    @cached_property
    def full(self) -> dict[str, Shape]:
        """The shapes of what is averaged."""
        return shapes(self.blueprint)

    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """None yet: what a client looks up depends on its device."""
        return {}

    def begin(self) -> None:
        """Raises ValueError for a fleet that gives a device a ratio which there is not."""
        for state in self.resources.states():
            self.policy.level_of(state)

    def min_budget(self, state: DeviceState | None = None) -> int:
        """The cost of the ratio that its fleet gives the device, if it does; else of the narrowest model."""
        if state is None or state.keep is None:
            return self.policy.min_budget()
        return self.policy.bytes(self.policy.sub_model(self.policy.level_of(state)))

    def task(self, server_round: int, state: DeviceState) -> Task:
        """The sub-model of the client's device, and its cost."""
        level = self.policy.level_of(state)
        item, own = self.policy.sub_model(level), self.task_config(level).to_values()
        return replace(
            super().task(server_round, state), own=own, variant=item.variant, costs={item: self.policy.bytes(item)}
        )

    def task_config(self, level: int) -> TaskConfig:
        """What is said of a sub-model."""
        return HeteroFLTaskConfig(level, self.policy.scaled, self.policy.masked)

    def ask(
        self, clients: Iterable[int], server_round: int, arrays: ArrayRecord
    ) -> dict[int, tuple[Task, DeviceState]]:
        """The tasks, each with a choice of channels."""
        asked = super().ask(clients, server_round, arrays)
        return {c: (replace(task, own=task.own | {"draw": c}), state) for c, (task, state) in asked.items()}

    def select(self, task: Task) -> Select:
        """Which channels a task is about."""
        return ordered

    def indices(self, task: Task) -> dict[str, Indices]:
        """Where the arrays of a task's sub-model lie in the full ones."""
        return sub_indices(
            self.axes, self.full, self.policy.shapes[self.orders_class.of(task).level], self.select(task)
        )

    def travelling(self, task: Task, arrays: ArrayRecord) -> ArrayRecord:
        """The sub-model."""
        indices = self.indices(task).items()
        return ArrayRecord({name: Array(take(arrays[name].numpy(), where)) for name, where in indices})

    def untrained(self, task: Task) -> ArrayRecord:
        """The sub-model, as it was sent."""
        return self.travelling(task, self.dispatcher.arrays)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As usual; entries are averaged over the clients that had them."""
        self.coverage, self._classes = CoverageMean(), {}
        return super().aggregate_train(server_round, replies)

    def _note(self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any]) -> None:
        super()._note(report, outcome, metrics)
        if outcome.status == "ok" and self.policy.masked:
            self._classes[report.client] = classes(metrics.get("classes"), self.blueprint.num_classes)

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add a sub-model; of the last layer the rows of classes that the client has."""
        arrays, indices = dict(update.arrays), self.indices(self._asked[client][0])
        if (rows := self._classes.get(client)) is not None:
            for name in filter(arrays.__contains__, self.policy.last_layer):
                arrays[name], indices[name] = arrays[name][rows], (np.array(rows), *indices[name][1:])
        self.coverage.add(arrays, indices, self.full, update.examples if self.by_examples else 1)

    def finish(self) -> ArrayRecord:
        """The new full model."""
        return updated(self.dispatcher.arrays, self.coverage)

    def details(self) -> dict[str, Any]:
        """The fraction of the channels that each client has."""
        return {"width_ratios": {str(client): task.variant.width for client, (task, _) in self._asked.items()}}


def classes(given: Any, count: int) -> list[int]:
    """The classes that a client says it has. Raises UpdateRejectedError."""
    if not isinstance(given, list) or not given or any(type(n) is not int or not 0 <= n < count for n in given):
        raise UpdateRejectedError(f"classes is {given!r:.100}: it must list classes from 0 to {count - 1}")
    return sorted(set(given))
