"""Settings of HeteroFL, and of the systems whose sub-models have the same widths."""

from typing import Literal, Self

from pydantic import model_validator

from piecework.training.settings.table import Table, case, ratios, setting

BY_RULE = case("heterofl", "fedrolex", "feddrop", heterofl__width_rule="budget") + case("fjord")
STEPS = 64  # width ratios that are not listed are multiples of 1/64


class HeteroFLSettings(Table):
    """HeteroFL, and the systems whose sub-models have the same widths: FedRolex, FedDrop and FjORD."""

    name = "heterofl"

    width_ratios: str = setting("1,0.5,0.25,0.125,0.0625", "allowed width ratios of sub-models", BY_RULE)
    width_rule: Literal["budget", "paper"] = setting(
        "budget",
        "a client's width ratio: the largest that fits its budget, or (paper, as for FedProphet's rivals) budget / memory of "
        "the whole model, down to 1/64",
        case("heterofl", "fedrolex", "feddrop", "allsmall"),
    )
    scaler: bool = setting(
        True,
        "divide the layer outputs of sub-models by their width ratio",
        case("heterofl", "fedrolex", "feddrop"),
    )
    client_weights: Literal["equal", "examples"] = setting(
        "equal",
        "what a client counts for in the mean of an entry that it had",
        case("heterofl", "fedrolex", "feddrop"),
    )
    masked_loss: bool = setting(
        True,
        "set the logits of classes that a client does not have to 0, in its training and its personal evaluation",
        case("heterofl", "fedrolex"),
    )

    left_out: str = setting(
        "",
        "width ratios whose sub-models are trained but left out of the mean, as in 0.25,0.125 (FeDepth's Figure 2); empty = "
        "none",
        case("heterofl", "fedrolex", "feddrop"),
    )

    @model_validator(mode="after")
    def _ratios_are_readable(self) -> Self:
        """Raise ValueError if they are not, or if none is left."""
        known, left_out = self.ratios(), self.left_out_ratios()
        if strange := [ratio for ratio in left_out if ratio not in known]:
            raise ValueError(f"heterofl.left-out = {self.left_out!r}: {strange[0]:g} is not one of the width ratios")
        if set(known) == set(left_out):
            raise ValueError(f"heterofl.left-out = {self.left_out!r}: leave at least one width ratio in the mean")
        return self

    def left_out_ratios(self) -> list[float]:
        """Return the width ratios that are left out of the mean, largest first. Raises ValueError."""
        return ratios("heterofl.left-out", self.left_out) if self.left_out else []

    def ratios(self) -> list[float]:
        """Return the width ratios, largest first: those of `width-ratios`, or all multiples of 1/64. Raises ValueError."""
        if self.width_rule == "paper":
            return [n / STEPS for n in range(STEPS, 0, -1)]
        return ratios("heterofl.width-ratios", self.width_ratios)
