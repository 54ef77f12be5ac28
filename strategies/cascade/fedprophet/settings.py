"""Settings of FedProphet and jFAT."""

from typing import Literal

from piecework.training.settings.table import AtLeastOne, Count, Fraction, NonNegative, Table, case, setting

FEDPROPHET = case("fedprophet")
ADJUSTED = case("fedprophet", fedprophet__apa=True)


class FedProphetSettings(Table):
    """FedProphet; and jFAT, which is a FedProphet with a single module."""

    name = "fedprophet"

    r_min: str = setting(
        "",
        "R_min, memory that modules are cut for: 60MB, or 0.2x of the whole model's attacked step; empty = the fleet's minimum",
        FEDPROPHET,
    )
    convexity: NonNegative = setting(1e-5, "mu, weight of strong convexity (Eq. 9)")
    feature_norm: Literal["l2", "linf"] = setting("l2", "the norm of the ball around features", FEDPROPHET)
    stage_rounds: Count = setting(0, "maximum rounds of a stage; 0 = num-rounds of the first start / stages")
    stage_patience: Count = setting(50, "a stage ends after this many rounds without a better score; 0 = off")
    aux_pool: Literal["auto", "authors", "none"] = setting(
        "auto",
        "pooling before the auxiliary head of a module: to at least 256 features (auto), to as many as classes (the authors' "
        "choice), or none (Eq. 9 as written)",
        FEDPROPHET,
    )
    lr_restart: bool = setting(
        True,
        "the schedule of rates begins again with every stage; false = one schedule over all rounds, as in the paper",
        FEDPROPHET,
    )
    validation_clients: Literal["all", "round"] = setting(
        "all",
        "who validates the new model: all clients, or those of the round, so that chance picks the best one if data are skewed",
    )
    apa: bool = setting(True, "Adaptive Perturbation Adjustment (Eqs. 11 and 12)", FEDPROPHET)
    apa_start: NonNegative = setting(0.3, "alpha at the beginning of a stage", FEDPROPHET)
    apa_step: NonNegative = setting(0.1, "Delta alpha, the step by which alpha changes", ADJUSTED)
    apa_margin: Fraction = setting(0.05, "gamma, margin of the ratio of accuracies", ADJUSTED)
    apa_every: AtLeastOne = setting(1, "rounds between adjustments of alpha", ADJUSTED)
    apa_after: Count = setting(0, "rounds of a stage before its first score and adjustment, besides the warm-up")
    apa_window: AtLeastOne = setting(1, "rounds over which the ratio is averaged", ADJUSTED)
    apa_bound: Literal["start", "none"] = setting(
        "start", "lower bound of alpha: apa-start, or none (Eq. 12 as written, by which alpha may fall to 0)", ADJUSTED
    )
    dma: bool = setting(True, "Differentiated Module Assignment (Eqs. 14 and 15)", FEDPROPHET)
