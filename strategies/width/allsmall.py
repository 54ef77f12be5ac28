"""AllSmall, a baseline of ProFL's Table 1: FedAvg with a model so narrow that the poorest client can train it.

The width ratio is chosen once, when the run begins.

Where it differs from the paper: the width ratio is the largest multiple of 1/64 whose model fits the smallest budget, by the
bytes of its own step. With `heterofl.width-rule = paper` it is the smallest budget's fraction of the full model's memory, as
FedProphet's paper sizes narrow models.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

from piecework.models.variant import Variant, vary
from piecework.models.width import require_narrower
from piecework.models.work_item import WorkItem
from piecework.planning.cut import Cut
from piecework.planning.part import Part, whole_model
from piecework.strategies.method import Round
from piecework.strategies.resources import ClientResources
from piecework.strategies.state import StrategyState
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.strategies.width.heterofl.settings import STEPS, HeteroFLSettings
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS


class AllSmallCut(Cut):
    """One stage, in which all clients train the same narrow model."""

    width: float = 1.0

    def require_model(self) -> None:
        """Raise ValueError if the model does not become narrower."""
        require_narrower(self.blueprint, {1 / STEPS: vary(self.blueprint, Variant(width=1 / STEPS))})

    def fit(self, minimum: int, maximum: int) -> Self:
        """Return the cut of the largest width ratio that fits `minimum` bytes. Raises ValueError if not even 1/64 fits."""
        cut, needed = self.with_smallest(minimum), 0
        if self.settings.of(HeteroFLSettings).width_rule == "paper":
            return cut.by_fraction(minimum)
        low, high = 0, STEPS + 1  # in 64ths: `low` fits (0 is not tried), `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            narrow = whole_model(vary(self.blueprint, Variant(width=middle / STEPS)))
            needed = self.cost_model.bytes(self.cost_model.fit_part(narrow, 0))
            low, high = (middle, high) if needed <= cut.allowed else (low, middle)
        if not low:
            raise ValueError(
                f"allsmall: with 1/{STEPS} of its channels the model needs {needed:,} bytes, and the poorest client has "
                f"{minimum:,}; lower training.batch-size or architecture.width, or give clients more memory"
            )
        return cut.narrow(low / STEPS)

    def by_fraction(self, budget: int) -> Self:
        """Return the cut whose width ratio is the budget's fraction of the full model's memory. Raises ValueError."""
        whole = self.cost_model.bytes(whole_model(self.blueprint))
        cut = self.narrow(max(1, min(STEPS, STEPS * budget // whole)) / STEPS)
        if (needed := cut.needed_bytes(cut.whole)) > cut.allowed:
            raise ValueError(
                f"allsmall: heterofl.width-rule = 'paper' gives {cut.width:.4g} of the channels, which need {needed:,} "
                f"bytes, and the poorest client has {budget:,}; use heterofl.width-rule = budget"
            )
        return cut

    def plain_part(self, item: WorkItem) -> Part:
        """Return all atoms of the narrow model."""
        return replace(super().plain_part(item), name=f"{self.width:.4g} of the channels")

    @property
    def variant(self) -> Variant:
        """The run's model at the chosen width ratio."""
        return Variant(width=self.width)

    def narrow(self, width: float) -> Self:
        """Return this cut for another width ratio."""
        return self.having(width=width)


@dataclass
class AllSmallState(StrategyState):
    """The state of AllSmall. `width` is the width ratio, 0 until it is chosen."""

    width: float = 0.0


class AllSmall(FedAvg):
    """FedAvg with a model narrow enough for the poorest client."""

    name = "allsmall"
    can = METHODS["allsmall"].can
    refuses = (Refusal("training.init-weights", "allsmall narrows the model, so they do not fit"),)
    cut_class = AllSmallCut
    cut: AllSmallCut
    state_class = AllSmallState
    state: AllSmallState

    def begin(self, fleet: ClientResources) -> None:
        """Choose the width ratio, once a run. Raises ValueError if no width fits."""
        if not self.state.width:
            budgets = fleet.budgets()
            self.state.width = self.cut.fit(int(min(budgets)), int(max(budgets))).width
        self.cut = self.cut.narrow(self.state.width)

    def details(self, current: Round) -> dict[str, Any]:
        """Return the width ratio for the round record."""
        return {"width": self.state.width}
