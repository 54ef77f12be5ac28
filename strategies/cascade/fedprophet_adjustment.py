"""FedProphet's Adaptive Perturbation Adjustment (section 6.2): what is remembered of stages, and Eqs. 11 and 12.

z_{m-1}: the features at the entrance of module m; C_m, A_m: clean and adversarial validation accuracy of modules 1 to m;
starred, their values when a module was fixed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from piecework.federation.aggregation import UpdateRejectedError
from piecework.federation.reports import count, finite
from piecework.strategies.state import StrategyState
from piecework.training.settings import Settings

LARGEST = 1e30  # of a distance between features: sums of squares stay finite


@dataclass(frozen=True)
class FixedModule:
    """What a stage leaves to the next one when its module is fixed.

    `clean`: C*; `adversarial`: A*; `epsilon`: the radius of the perturbations that it was trained with; `nonnegative`: whether
    no client has features below 0 at its entrance.
    """

    clean: float
    adversarial: float
    epsilon: float
    nonnegative: bool


@dataclass(frozen=True)
class BestRound:
    """A stage's best round. `score`: C_m + rho A_m; `clean`: C_m; `adversarial`: A_m; `alpha`: what the round trained with."""

    score: float
    clean: float
    adversarial: float
    alpha: float
    round: int


@dataclass
class FedProphetState(StrategyState):
    """Where the cascade is. `r_min`: bytes; `stage`: m, from 0; `stage_round`: rounds of it that are done.

    `distance`: E[max ||Delta z_{m-1}||], None until it is measured; `nonnegative`: no client has features z_{m-1} below 0;
    `recent`: C_m, A_m of the last rounds; `fixed`: module m - 1, None in the first stage; `best`: this stage's best round, None
    until one is scored; `void`: first and last of rounds that were undone.
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
        """Read what `to_values` gave. Raises ValueError for a field that is missing or not known."""
        state, fixed, best = super().from_values(values), values["fixed"], values["best"]
        return replace(state, fixed=FixedModule(**fixed) if fixed else None, best=BestRound(**best) if best else None)

    @property
    def epsilon(self) -> float:
        """epsilon_{m-1} (Eq. 11), 0 in the first stage, whose radius is fixed."""
        return self.alpha * (self.distance or 0.0)


def adjusted_alpha(alpha: float, recent: list[list[float]], fixed: FixedModule, settings: Settings) -> float:
    """Eq. 12 for C and A summed over the `recent` rounds; without divisions, as A may be 0."""
    clean, adversarial = (sum(column) for column in zip(*recent, strict=True))
    ratio, target = clean * fixed.adversarial, adversarial * fixed.clean
    if ratio > (1 + settings.fedprophet.apa_margin) * target:
        return round(alpha + settings.fedprophet.apa_step, 9)
    if ratio < (1 - settings.fedprophet.apa_margin) * target:
        return round(max(settings.fedprophet.apa_min, alpha - settings.fedprophet.apa_step), 9)
    return alpha


def measurement(metrics: Mapping[str, Any], maximum: int) -> tuple[float, float, int]:
    """A client's mean largest ||Delta z||, smallest feature, and examples (1 to `maximum`). Raises UpdateRejectedError."""
    distance, lowest = finite(metrics, "perturbation"), finite(metrics, "least-feature")
    examples = count(metrics, "num-examples")
    if distance is None or distance < 0 or distance > LARGEST or lowest is None or not 0 < examples <= maximum:
        raise UpdateRejectedError(
            f"perturbation {distance}, least-feature {lowest}, num-examples {examples} make no sense: the client has {maximum}"
        )
    return distance, lowest, examples
