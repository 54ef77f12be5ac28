"""FjORD (Samuel Horvath, Stefanos Laskaridis, Mario Almeida, Ilias Leontiadis, Stylianos I. Venieris, Nicholas D. Lane,
"FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout", NeurIPS 2021,
https://arxiv.org/abs/2102.13451), the server's side.

p_max is the largest of `heterofl.width-ratios` whose step fits the client, or the ratio that its fleet sets (`keep`). The
client receives the first p_max C of the C channels of every layer. Its trainer also trains the nets of all smaller ratios,
which lie within these channels: each batch draws one of them. Batch norms have a scale and a shift for each ratio
(`fjord.norms = shared`: the narrower nets use the first entries of the widest one's). Each entry is averaged over the clients
that had it, weighted by examples, as in FjORD's nested aggregation. `fjord.distillation` switches self-distillation on.

Where it differs from the paper: the paper's fleets have clients of full width. In one without, the widest trained net is
evaluated and saved, with its own norms, as in HeteroFL (`heterofl/serving.py`): the server's other channels have random weights
that nobody trains. There is no Scaler.

With `fjord.sampling = round` one ratio is drawn for each client and round, and only that net is sent and trained. `uniform` is
the version that SpaFL compares with: the ratio is from U(p_min, p_max). A server prices every net, so a draw stands for the
middle of one of 32 equal parts.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

from piecework.federation.aggregation import CheckedUpdate, UpdateRejectedError
from piecework.federation.reports import ClientReport
from piecework.models.cascade import Blueprint
from piecework.models.change import Change
from piecework.models.nested_norms import NestedNorms
from piecework.models.static_norms import has_batch_norms
from piecework.models.variant import Variant, vary
from piecework.models.width import require_parts
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context
from piecework.planning.cut import require_no_statistics
from piecework.planning.part import Part
from piecework.strategies.method import Reading, Round
from piecework.strategies.width.fjord.client import FjORDTaskConfig, nested_loss
from piecework.strategies.width.fjord.settings import FjORDSettings
from piecework.strategies.width.heterofl.server import NO_NORMS_OF_THEIR_OWN, HeteroFL, HeteroFLCut
from piecework.strategies.width.heterofl.serving import NestedServing
from piecework.strategies.width.heterofl.settings import HeteroFLSettings
from piecework.training.messages import TaskConfig
from piecework.training.methods import METHODS
from piecework.training.randomness import generator

PARTS = 32  # of the range of a uniform draw


class FjORDCut(HeteroFLCut):
    """HeteroFL's cut for nested nets: with self-distillation, a step may run two nets."""

    @cached_property
    def ratios(self) -> list[float]:
        """The width ratios of the run, largest first. With `fjord.sampling = uniform`, the middles of PARTS equal parts."""
        listed = self.settings.of(HeteroFLSettings).ratios()
        if self.settings.of(FjORDSettings).sampling != "uniform":
            return listed
        step = (listed[0] - listed[-1]) / PARTS
        return [listed[0] - step * (part + 0.5) for part in range(PARTS)] if step else listed

    def require_model(self) -> None:
        """Raise ValueError also for batch norms with running statistics, which differ between the nets."""
        require_no_statistics(self.blueprint, self.settings, "fjord's nets have different statistics")
        require_parts(self.blueprint, {ratio: self.plain(level) for level, ratio in enumerate(self.ratios)})

    def net_variant(self, level: int) -> Variant:
        """Return the variant of the net of ratio number `level` with plain norms."""
        return super().variant_of(level)

    def plain(self, level: int) -> Blueprint:
        """Return the net of ratio number `level` with plain norms."""
        return vary(self.blueprint, self.net_variant(level))

    @cached_property
    def separate(self) -> bool:
        """Whether the nets have batch norms, with parameters of their own."""
        return self.settings.of(FjORDSettings).norms == "separate" and has_batch_norms(self.blueprint)

    def norms(self, nets: list[float]) -> tuple[Change, ...]:
        """Return the change that gives the nets of these ratios norms of their own, if they have any."""
        return (NestedNorms(tuple(nets)),) if self.separate else ()

    @property
    def variant(self) -> Variant:
        """The run's model, with the norms of all nets."""
        return (
            replace(super().variant_of(0), width=1.0, changes=self.norms(self.ratios)) if self.separate else Variant()
        )

    def variant_of(self, level: int) -> Variant:
        """Return the variant of ratio number `level`, with the norms of the nets that are trained within it."""
        nets = self.ratios[level : level + 1 + self.count_nested(level)]
        return replace(super().variant_of(level), changes=self.norms(nets))

    @property
    def distils(self) -> bool:
        """Whether a client's widest net teaches its narrower ones."""
        return self.settings.of(FjORDSettings).distillation and self.settings.of(FjORDSettings).sampling == "batch"

    def count_nested(self, level: int) -> int:
        """Return how many narrower nets a client trains beside the net of ratio number `level`."""
        return len(self.ratios) - level - 1 if self.settings.of(FjORDSettings).sampling == "batch" else 0

    def plain_part(self, item: WorkItem) -> Part:
        """Return a sub-model for a step that trains all of it, with those of the nets that batches draw."""
        level = self.levels[item.variant]
        own, *nested = (self.step(level, drawn) for drawn in range(1 + self.count_nested(level)))
        return replace(own, nested=tuple(nested))

    def step(self, level: int, drawn: int) -> Part:
        """Return a sub-model for a step that trains its net number `drawn`: 0 is all of it, the others are narrower."""
        widths = tuple(self.models[level + 1 :][: self.count_nested(level)])
        loss = nested_loss(widths, self.distils, drawn)
        return replace(super().plain_part(self.sub_model(level)), make_loss=loss)


class FjORD(HeteroFL):
    """Ordered dropout: each client trains nested nets of several widths."""

    name = "fjord"
    can = METHODS["fjord"].can
    refuses = (NO_NORMS_OF_THEIR_OWN,)
    cut_class = FjORDCut
    cut: FjORDCut
    serving_class = NestedServing
    masks = False
    scales = False

    def assign(self, ctx: Context) -> Assignment:
        """Return the client's sub-model. Unless batches draw theirs, a fitting ratio is drawn by (seed, round, client)."""
        widest = self.cut.level_of(ctx.device)
        if self.settings.of(FjORDSettings).sampling == "batch" or ctx.arrays is None:
            return self.assign_level(ctx, widest)
        rng = generator(self.settings.seed, ctx.round, ctx.client, "width")
        return self.assign_level(ctx, int(rng.integers(widest, len(self.cut.ratios))))

    def task_config(self, ctx: Context, level: int) -> TaskConfig:
        """Return the method's own fields of a task for ratio number `level`."""
        nested = self.cut.ratios[level + 1 :][: self.cut.count_nested(level)]
        return FjORDTaskConfig(level, nested, self.cut.distils, ctx.client)

    def weight(self, update: CheckedUpdate) -> int:
        """Return the weight of an update in the means of its entries: its examples."""
        return update.examples

    def read(self, current: Round, report: ClientReport, metrics: dict[str, Any]) -> Reading:
        """Return the fraction of the FLOPs of p_max's net that the drawn nets took.

        The client reports in `widths` on how many examples each net was trained. Raises UpdateRejectedError for bad counts.
        """
        config, seen = current.assigned[report.client].assignment.config, sum(metrics["seen"])
        counted, nets = metrics.get("widths"), 1 + len(config.nested)
        if not isinstance(counted, list) or len(counted) != nets or sum(counted) != seen or min(counted) < 0:
            raise UpdateRejectedError(
                f"widths is {counted!r:.100}: it must list {nets} counts that add up to {seen} examples"
            )
        flops = [self.cut.cost_model.trace(self.cut.step(config.level, n)).flops for n in range(len(counted))]
        return Reading(float(sum(a * b for a, b in zip(flops, counted, strict=True)) / (flops[0] * seen)))
