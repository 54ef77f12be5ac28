"""FedProphet's Adaptive Perturbation Adjustment (section 6.2): the state of its stages, and Eqs. 11 and 12.

z_{m-1} are the input features of module m. C_m and A_m are the clean and adversarial validation accuracy of modules 1 to m. C*
and A* are their values when a module was fixed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from piecework.federation.aggregation import UpdateRejectedError
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.strategies.state import StrategyState
from piecework.training.settings import Settings


@dataclass(frozen=True)
class FixedModule:
    """A fixed module, as the next stage needs it.

    `clean` is C* and `adversarial` is A*. `epsilon` is the radius of the perturbations with which it was trained.
    `nonnegative`: no client has input features of the module below 0.
    """

    clean: float
    adversarial: float
    epsilon: float
    nonnegative: bool


@dataclass(frozen=True)
class BestRound:
    """A stage's best round: its `score` C_m + rho A_m, C_m (`clean`), A_m (`adversarial`), and alpha in its training."""

    score: float
    clean: float
    adversarial: float
    alpha: float
    round: int


@dataclass
class FedProphetState(StrategyState):
    """The state of the cascade. `r_min` is in bytes. `stage` is the stage's number from 0, and `stage_round` its rounds done.

    `distance` is E[max ||Delta z_{m-1}||], or None before it is measured. `nonnegative`: no client has features z_{m-1} below
    0. `recent` are C_m and A_m of the last rounds. `fixed` is module m - 1, or None in the first stage. `best` is the stage's
    best round, or None before a round is scored; `since_best` counts the rounds scored after it. `void` are pairs of the first
    and the last of consecutive rounds that were undone.
    """

    r_min: int = 0
    stage_rounds: int = 0
    stage: int = 0
    stage_round: int = 0
    alpha: float = 1.0
    distance: float | None = None
    nonnegative: bool = False
    recent: list[list[float]] = field(default_factory=list)
    fixed: FixedModule | None = None
    best: BestRound | None = None
    since_best: int = 0
    void: list[list[int]] = field(default_factory=list)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Return the state of `to_values`. Raises ValueError for a missing or unknown field."""
        state, fixed, best = super().from_values(values), values["fixed"], values["best"]
        return replace(state, fixed=FixedModule(**fixed) if fixed else None, best=BestRound(**best) if best else None)

    @property
    def epsilon(self) -> float:
        """epsilon_{m-1} (Eq. 11), the L2 radius around features; 0 in the first stage, whose radius is a setting."""
        return self.alpha * (self.distance or 0.0)


def adjust_alpha(alpha: float, recent: list[list[float]], fixed: FixedModule, settings: Settings) -> float:
    """Return the next alpha (Eq. 12), with C and A summed over the `recent` rounds, and without divisions, as A may be 0."""
    own = settings.of(FedProphetSettings)
    least = own.apa_start if own.apa_bound == "start" else 0.0
    clean, adversarial = (sum(column) for column in zip(*recent, strict=True))
    ratio, target = clean * fixed.adversarial, adversarial * fixed.clean
    if ratio > (1 + own.apa_margin) * target:
        return round(alpha + own.apa_step, 9)
    if ratio < (1 - own.apa_margin) * target:
        return round(max(least, alpha - own.apa_step), 9)
    return alpha


def measurement(metrics: Mapping[str, Any], maximum: int) -> tuple[float, float, int]:
    """Return a client's mean of max ||Delta z||, smallest feature, and number of examples (1 to `maximum`).

    Raises UpdateRejectedError for invalid metrics, KeyError for missing ones.
    """
    distance, lowest, examples = metrics["perturbation"], metrics["min-feature"], metrics["num-examples"]
    if isinstance(distance, list) or isinstance(lowest, list) or distance < 0 or not 0 < examples <= maximum:
        raise UpdateRejectedError(
            f"perturbation {distance}, min-feature {lowest}, num-examples {examples} are invalid: the client has {maximum}"
        )
    return distance, lowest, examples
