"""Settings of ProFL."""

from typing import Literal

from piecework.training.settings.table import AtLeastOne, AtLeastTwo, Count, Fraction, Positive, Table, case, setting

MOVED = case("profl", profl__freezing="movement")


class ProFLSettings(Table):
    """ProFL."""

    name = "profl"

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
