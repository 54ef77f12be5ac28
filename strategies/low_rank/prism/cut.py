"""PriSM's cut: its sub-models, one for each keep ratio."""

from functools import cached_property
from typing import TYPE_CHECKING, Literal

from piecework.models.low_rank import LowRank
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.planning.cut import Cut, Traffic
from piecework.planning.less_memory import FIT
from piecework.planning.part import Part
from piecework.strategies.low_rank.prism.client import LowRankModel, low_rank_loss
from piecework.strategies.low_rank.prism.settings import PriSMSettings
from piecework.strategies.width.heterofl.server import HeteroFLCut
from piecework.training.methods import SIMPLEST, in_width

if TYPE_CHECKING:
    from piecework.strategies.low_rank.prism.server import PriSM


class PriSMCut(HeteroFLCut):
    """One stage: each device trains the largest sub-model that fits. A `level` is the index of a keep ratio in `ratios`."""

    method: "type[PriSM]"

    @cached_property
    def ratios(self) -> list[float]:
        """The keep ratios of the run, largest first."""
        return self.settings.of(PriSMSettings).ratios()

    def require_model(self) -> None:
        """Raise ValueError for a model without a layer that can be factorised, or with a chain that cannot be."""
        try:
            vary(self.blueprint, self.factorise(1.0))
        except ValueError as error:
            raise ValueError(
                f"{error}. Otherwise choose a strategy that narrows a model's channels ({', '.join(in_width())}), or "
                f"train the whole model in less memory (strategy = {SIMPLEST}, memory.fit = {FIT})"
            ) from None

    def variant_of(self, level: int) -> Variant:
        """Return the variant of keep ratio number `level`."""
        return self.factorise(self.ratios[level])

    def factorise(self, keep: float) -> Variant:
        """Return the variant that keeps this fraction of the kernels (1 = all)."""
        return Variant(changes=(LowRank(keep, self.channels_computed),))

    @property
    def channels_computed(self) -> Literal["first", "random", "all"]:
        """The output channels that a sub-model computes."""
        found: Literal["first", "random", "all"] = (
            self.method.computes or self.settings.of(PriSMSettings).output_channels
        )
        return found

    def traffic(self, parts: list[Part]) -> Traffic:
        """Return the bytes and the values of the sub-model's arrays, not a ratio of widths as HeteroFL's."""
        return Cut.traffic(self, parts)

    def plain_part(self, item: WorkItem) -> Part:
        """Return all of a sub-model, with the regulariser of Eq. 6 in its loss."""
        keep = item.variant.find(LowRank).keep
        return Part(
            self.models[self.levels[item.variant]],
            item.atoms,
            make_loss=low_rank_loss(self.settings.training.weight_decay),
            name=f"sub-model {keep:.4g}",
            piece_class=LowRankModel,
            # sub-models compute the first channels, the same in all rounds, or others, which reach all in time
            channels=keep if self.channels_computed == "first" else 1.0,
        )
