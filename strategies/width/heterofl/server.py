"""HeteroFL (Enmao Diao, Jie Ding, Vahid Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264), the server's side. FedRolex
and FedDrop are built on it and choose other channels.

W_l are the full model's weights of layer l. r is a client's width ratio, one of `heterofl.width-ratios`. A client trains the
first ceil(r C) of the C channels of every layer; inputs and classes are never cut. Each entry of the new W_l is the unweighted
mean over the clients that had it, and an entry that no client had keeps its value. A client contributes only the rows of the
last layer whose classes it has examples of (masked cross-entropy; `heterofl.masked-loss`).

HeteroFL's static batch norm is `architecture.batch-norm = static`, its default: norms keep no statistics in training, and all
clients measure those of the served model after the last round (server_app/served_model.py).

Where it differs from the paper: in the paper a client's ratio is given. Here it is the largest of `heterofl.width-ratios` whose
step fits its budget. With `heterofl.width-rule = paper` it is R_k / R_max in multiples of 1/64, for a client's memory R_k and
that of a step of the full model R_max, as FedProphet's paper sizes its rivals (appendix B.2), however much more would fit; a
client then trains the first int(r C) channels, as in the code of FedProphet's authors. `heterofl.client-weights = examples`
weighs clients by their numbers of examples.

The model that is evaluated, measured and saved is the widest trained net (`heterofl/serving.py`): the full model only if some
client can train it. Likewise the global model in the authors' code is as wide as the widest client (`process_control`:
`global_model_rate`). FedRolex and FedDrop reach all channels in time, and serve the full model.

Before the last round, the clients of a round measure static norms whenever its model is evaluated, which is `measured`, the
default of FedRolex and FedDrop. Running statistics averaged over sub-models of different widths fit none of them. With `local`,
each client keeps the norms of its channels, and the server's average of them is only evaluated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import CheckedUpdate, UpdateRejectedError
from piecework.federation.reports import ClientReport
from piecework.models.cascade import Blueprint, Shape
from piecework.models.channel_axes import Axes
from piecework.models.channels import channel_axes
from piecework.models.variant import Variant, vary
from piecework.models.width import (
    Indices,
    Select,
    last_layer,
    require_parts,
    shapes,
    sub_indices,
    take_first,
)
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context, OfEntries
from piecework.planning.counts import entries
from piecework.planning.cut import Cut, Stage, Traffic
from piecework.planning.part import Part
from piecework.strategies.method import Method, Reading, Received, Round
from piecework.strategies.resources import ClientResources
from piecework.strategies.serving import Serving
from piecework.strategies.state import StrategyState
from piecework.strategies.width.heterofl.client import (
    Channels,
    HeteroFLTaskConfig,
    input_ratios,
    width_loss,
)
from piecework.strategies.width.heterofl.serving import WidestServing
from piecework.strategies.width.heterofl.settings import HeteroFLSettings
from piecework.training.capabilities import Refusal
from piecework.training.messages import TaskConfig
from piecework.training.methods import METHODS


class HeteroFLCut(Cut):
    """One stage: each device trains the widest sub-model that fits.

    A `level` is the index of a width ratio in `ratios`.
    """

    method: "type[HeteroFL]"

    @cached_property
    def ratios(self) -> list[float]:
        """The width ratios of the run, largest first."""
        return self.settings.of(HeteroFLSettings).ratios()

    def variant_of(self, level: int) -> Variant:
        """Return the variant of ratio number `level`."""
        return Variant(width=self.ratios[level], rounding="down" if self.by_fraction else self.method.rounding)

    def net_variant(self, level: int) -> Variant:
        """Return the variant of the net of ratio number `level` alone, as it is deployed."""
        return self.variant_of(level)

    def sub_model(self, level: int) -> WorkItem:
        """Return the work item that trains all of the sub-model of ratio number `level`."""
        return WorkItem(tuple(range(len(self.models[level].atoms))), variant=self.variant_of(level))

    @cached_property
    def levels(self) -> dict[Variant, int]:
        """The number of its ratio for each variant."""
        return {self.variant_of(level): level for level in reversed(range(len(self.ratios)))}

    @cached_property
    def models(self) -> list[Blueprint]:
        """The sub-models, one for each ratio."""
        return [vary(self.blueprint, self.variant_of(level)) for level in range(len(self.ratios))]

    def require_model(self) -> None:
        """Raise ValueError, which names the layer, if a narrower model is not a choice of the full model's channels."""
        require_parts(self.blueprint, dict(zip(self.ratios, self.models, strict=True)))

    @cached_property
    def shapes(self) -> list[Mapping[str, Shape]]:
        """The shapes of each sub-model's arrays, by name."""
        return [shapes(model) for model in self.models]

    @cached_property
    def last_layer(self) -> list[str]:
        """The names of the last layer's arrays that have a row for every class."""
        last = last_layer(self.models[0])
        return [name for name, shape in last.items() if shape[0] == self.blueprint.num_classes]

    @property
    def masked(self) -> bool:
        """Whether clients set the logits of classes without local examples to 0."""
        return self.method.masks and self.settings.of(HeteroFLSettings).masked_loss

    @property
    def scaled(self) -> bool:
        """Whether sub-models divide the outputs of layers by their width (HeteroFL's Scaler)."""
        return self.method.scales and self.settings.of(HeteroFLSettings).scaler

    def plain_part(self, item: WorkItem) -> Part:
        """Return all of a sub-model, with the Scaler and the class mask in its loss."""
        level = self.levels[item.variant]
        ratio, model = self.ratios[level], self.models[level]
        present = (True,) * model.num_classes if self.masked else ()
        loss = width_loss(input_ratios(model, self.blueprint) if self.scaled else (), present)
        return Part(
            model,
            item.atoms,
            make_loss=loss,
            name=f"{ratio:.4g} of the channels",
            # if the channels change from round to round, all are trained in time
            channels=1.0 if self.can.rotates else model.width / self.blueprint.width,
        )

    def level(self, allowed: int) -> int:
        """Return the number of the largest ratio whose step takes at most `allowed` bytes, or of the smallest if none does."""
        fitting = (level for level in range(len(self.ratios)) if self.needed_bytes(self.sub_model(level)) <= allowed)
        return next(fitting, len(self.ratios) - 1)

    @property
    def by_fraction(self) -> bool:
        """Whether a width ratio is the budget's fraction of the full model's memory (`heterofl.width-rule = paper`)."""
        return self.settings.of(HeteroFLSettings).width_rule == "paper"

    def level_by_fraction(self, budget: int) -> int:
        """Return the number of the largest ratio up to R_k / R_max, or of the smallest if that is larger."""
        whole = self.bytes(self.sub_model(0))
        return next((n for n, ratio in enumerate(self.ratios) if ratio * whole <= budget), len(self.ratios) - 1)

    def level_of(self, state: DeviceState) -> int:
        """Return the number of the ratio that a device trains: the one its fleet sets (`keep`), else that of the width rule.

        Raises ValueError if the run has no such ratio.
        """
        if state.keep is None:
            return self.level_by_fraction(state.budget_bytes) if self.by_fraction else self.level(state.allowed_bytes)
        if state.keep not in self.ratios:
            known = ", ".join(f"{ratio:g}" for ratio in self.ratios)
            raise ValueError(
                f"keep = {state.keep:g} of device {state.device!r} is not one of the run's width ratios: {known}"
            )
        return self.ratios.index(state.keep)

    def min_budget(self) -> int:
        """Return the memory cost (bytes) of the narrowest sub-model."""
        return self.needed_bytes(self.sub_model(len(self.ratios) - 1))

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the sub-model of a device with the smallest budget."""
        level = self.level_by_fraction(self.smallest) if self.by_fraction else self.level(self.allowed)
        return [Stage("training", (self._fit_part(self.sub_model(level), self.allowed),))]

    def traffic(self, parts: list[Part]) -> Traffic:
        """Return the sub-model's bytes, and the full model's values times the width ratio, as SpaFL's paper counts."""
        full = sum(entries(self.blueprint, unit) for unit in self.blueprint.units())
        found = sum(part.blueprint.width / self.blueprint.width for part in parts) * full
        return replace(super().traffic(parts), values=(found, found))


@dataclass
class HeteroFLState(StrategyState):
    """`widest` is the largest ratio that any client could train when the run began, or has trained since; 0 before that."""

    widest: float = 0.0


NO_NORMS_OF_THEIR_OWN = Refusal(
    "architecture.batch-norm",
    "clients of {name} have no norms of their own; use measured, running or batch",
    ("local",),
)


class HeteroFL(Method):
    """Sub-models of the first channels of every layer, as many as a client's budget allows.

    `masks` and `scales` say whether a method can use the class mask and the Scaler; the settings can switch both off.
    `rounding` is how a width ratio rounds channels. `channels` names the choice of channels, which clients can repeat.
    """

    name = "heterofl"
    can = METHODS["heterofl"].can
    cut_class: ClassVar[type[Cut]] = HeteroFLCut
    cut: HeteroFLCut
    state_class = HeteroFLState
    state: HeteroFLState
    serving_class: ClassVar[type[Serving]] = WidestServing
    masks: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    rounding: ClassVar[Literal["down", "up"]] = "up"
    channels: ClassVar[Channels] = "first"

    @cached_property
    def axes(self) -> Mapping[str, Axes]:
        """The channel axes of the full model's arrays, by name."""
        return channel_axes(self.cut.model)

    @cached_property
    def full(self) -> Mapping[str, Shape]:
        """The shapes of the full model's arrays, by name."""
        return shapes(self.cut.model)

    def assign(self, ctx: Context) -> Assignment:
        """Return the sub-model of the client's level."""
        return self.assign_level(ctx, self.cut.level_of(ctx.device))

    def assign_level(self, ctx: Context, level: int) -> Assignment:
        """Return the sub-model of ratio number `level`, with its choice of channels."""
        item = self.cut.sub_model(level)
        where = replace(ctx, arrays=None)  # the selection must not keep the round's model in memory
        kept = OfEntries(lambda: self.indices(where, level))
        config = self.task_config(ctx, level)
        return self.work(item, variant=item.variant, sends=kept, config=config, least=self.least(ctx))

    def least(self, ctx: Context) -> Callable[[], int] | None:
        """Return what computes the bytes of the narrowest sub-model, if the device may train any."""
        return self.cut.min_budget if ctx.device.keep is None and not self.cut.by_fraction else None

    def task_config(self, ctx: Context, level: int) -> TaskConfig:
        """Return the method's own fields of a task for ratio number `level`."""
        return HeteroFLTaskConfig(level, self.cut.scaled, self.cut.masked, self.channels, ctx.client)

    def select(self, ctx: Context) -> Select:
        """Return how a client's channels are chosen in a round: the first ones."""
        return take_first

    def indices(self, ctx: Context, level: int) -> Mapping[str, Indices]:
        """Return the indices of a sub-model's arrays in the full ones, by name."""
        return sub_indices(self.axes, self.full, self.cut.shapes[level], self.select(ctx))

    def begin(self, fleet: ClientResources) -> None:
        """Find the widest ratio, once a run. Raises ValueError if the fleet gives a device a ratio that there is not."""
        for state in fleet.states():
            self.cut.level_of(state)
        self.fitting = self.fitting_levels(fleet)
        if not self.state.widest:
            averaged = [level for level in self.fitting if level not in self.left_out]
            self.state.widest = self.cut.ratios[min(averaged or self.fitting)]

    def fitting_levels(self, fleet: ClientResources) -> list[int]:
        """Return the number of each client's ratio in each of the first rounds, without those that have no budget or no data.

        If no client fits, it is the smallest ratio's.
        """
        states = [state for client in fleet.able for state in fleet.states_of(client)]
        levels = [(self.cut.level_of(state), state.allowed_bytes) for state in states]
        fitting = [level for level, allowed in levels if self.cut.needed_bytes(self.cut.sub_model(level)) <= allowed]
        return fitting or [len(self.cut.ratios) - 1]

    @property
    def told_classes(self) -> bool:
        """Whether clients tell of which classes they have examples: if they mask the others, and the run is not private."""
        return self.cut.masked and not self.settings.privacy.on

    def read(self, current: Round, report: ClientReport, metrics: dict[str, Any]) -> Reading:
        """Note the classes of which the client says that it has examples, if it masks the others."""
        if self.told_classes:
            current.memo[report.client] = metrics.get("classes")
        return Reading()

    def check(self, received: Received) -> CheckedUpdate:
        """Check the classes too, if the client masks the others. Raises UpdateRejectedError."""
        if self.told_classes:
            classes(received.metrics.get("classes"), self.cut.blueprint.num_classes)
        return super().check(received)

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's sub-model to the means of its entries.

        With the class mask, only those rows of the last layer are added whose classes the client has. Sub-models of a ratio in
        `heterofl.left-out` are not added.
        """
        assignment = current.assigned[client].assignment
        if assignment.config.level in self.left_out:
            return
        assert isinstance(assignment.sends, OfEntries)
        arrays, indices = dict(update.arrays), dict(assignment.sends.indices())
        if self.told_classes:
            rows = classes(current.memo[client], self.cut.blueprint.num_classes)
            for name in filter(arrays.__contains__, self.cut.last_layer):
                arrays[name], indices[name] = arrays[name][rows], (np.array(rows), *indices[name][1:])
        current.mean.add(arrays, self.weight(update), indices, self.full)
        if not self.settings.privacy.on:  # who answered must not show in the width of the served model
            self.state.widest = max(self.state.widest, self.cut.ratios[assignment.config.level])

    @cached_property
    def left_out(self) -> set[int]:
        """The numbers of the ratios whose sub-models are left out of the mean."""
        left_out = self.settings.of(HeteroFLSettings).left_out_ratios()
        return {level for level, ratio in enumerate(self.cut.ratios) if ratio in left_out}

    def weight(self, update: CheckedUpdate) -> int:
        """Return the weight of an update in the means of its entries."""
        return update.examples if self.settings.of(HeteroFLSettings).client_weights == "examples" else 1

    def details(self, current: Round) -> dict[str, Any]:
        """Return the width ratio of each client for the round record."""
        return {"width_ratios": {str(client): each.task.variant.width for client, each in current.assigned.items()}}


def classes(given: Any, count: int) -> list[int]:
    """Return the classes that a client reports, sorted. Raises UpdateRejectedError unless they are integers in [0, count)."""
    if not isinstance(given, list) or not given or any(type(n) is not int or not 0 <= n < count for n in given):
        raise UpdateRejectedError(f"classes is {given!r:.100}: it must list classes from 0 to {count - 1}")
    return sorted(set(given))
