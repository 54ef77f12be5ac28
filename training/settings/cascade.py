"""Settings of the systems that train blocks or modules one after another: FeDepth, FedProphet, ProFL, DepthFL."""

from typing import Literal

from piecework.training.settings.table import (
    AtLeastOne,
    AtLeastTwo,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Table,
    case,
    setting,
)

FEDPROPHET = case("fedprophet")
ADJUSTED = case("fedprophet", fedprophet__apa=True)
MOVED = case("profl", profl__freezing="movement")


class FeDepthSettings(Table):
    """FeDepth and m-FeDepth."""

    used_by = ("fedepth", "m-fedepth")

    partial_training: Literal["leave-out", "dilute"] = setting(
        "leave-out",
        "what an update counts for in blocks that its client skipped: nothing, or (dilute, as the authors chose) as an "
        "unchanged block",
    )
    sub_problem: Literal["blocks", "network"] = setting(
        "blocks",
        "what a client holds: the blocks it trains; network = all blocks, and it trains its own, the first atom and the "
        "head, as the authors fine-tune transformers",
    )
    mutual_models: AtLeastOne = setting(
        2,
        "maximum number of models that teach each other on a client with surplus memory; if not even two fit at once, the "
        "second is trained block after block, if all its blocks fit the surplus; 1 = off",
    )
    mutual_loss: Literal["paper", "authors"] = setting("paper", "the loss of mutual distillation")


class FedProphetSettings(Table):
    """FedProphet; and jFAT, which is a FedProphet with a single module."""

    used_by = ("fedprophet", "jfat")

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
        "all", "who validates the new model: all clients, or those of the round"
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


class ProFLSettings(Table):
    """ProFL."""

    used_by = ("profl",)

    blocks: Literal["architecture", "budget"] = setting(
        "architecture", "where blocks come from; budget = as large as the client with the smallest budget can train"
    )
    cohort: Literal["eligible", "all"] = setting(
        "eligible",
        "whom a round's clients are drawn from: those with memory for the block, and those with memory for none, which train "
        "the output layer; or all, and those without memory for this block train the output layer",
    )
    shrinking: bool = setting(True, "progressive model shrinking, before the model grows")
    output_norm: bool = setting(
        False, "a batch norm behind each convolution of an output module, so that higher rates do not diverge"
    )
    growing_start: Literal["shrinking", "previous"] = setting(
        "shrinking",
        "the output module that a growing step starts from: that of its step in shrinking, or of the growing step before",
        case("profl", profl__shrinking=True),
    )
    stage_rounds: Count = setting(0, "maximum rounds of a step; 0 = num-rounds of the first start / steps", MOVED)
    distil_rounds: Count = setting(5, "rounds of integrating a block into its basic layer; 0 = none")
    distil_lr: Positive = setting(1e-5, "learning rate of these rounds")
    frozen_mode: Literal["evaluation", "training"] = setting(
        "evaluation", "how frozen blocks run; training = the authors' choice"
    )
    freezing: Literal["movement", "parameters"] = setting(
        "movement", "when a step ends: by effective movement, or after rounds in proportion to the block's parameters"
    )
    movement_window: AtLeastTwo = setting(10, "H, rounds of an effective movement, and of a slope", MOVED)
    movement_fraction: Fraction = setting(0.1, "phi, as a fraction of the block's initial slope", MOVED)
    movement_times: AtLeastOne = setting(20, "W, rounds in a row below phi that freeze a block", MOVED)
    movement_scalars: Count = setting(
        1_000_000,
        "parameters per block whose movement is measured; 0 = all; checkpoints hold H + 1 values of each",
        MOVED,
    )


class DepthFLSettings(Table):
    """DepthFL."""

    used_by = ("depthfl",)

    distillation_rounds: AtLeastOne = setting(300, "rounds in which self-distillation gains weight")
    feddyn_alpha: NonNegative = setting(0.0, "alpha, FedDyn's regularisation; 0 = federated averaging")
