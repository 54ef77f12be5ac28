"""Settings of the systems that narrow a model: HeteroFL, FedRolex, FedDrop, FjORD, SplitMix."""

from typing import Annotated, Literal

from pydantic import Field

from piecework.training.settings.table import Table, case, ratios, setting

BY_RULE = case("heterofl", "fedrolex", "feddrop", heterofl__width_rule="budget") + case("fjord")
STEPS = 64  # width ratios that are not listed are multiples of 1/64


class HeteroFLSettings(Table):
    """HeteroFL, and the systems whose sub-models have the same widths: FedRolex, FedDrop and FjORD."""

    used_by = ("heterofl", "fedrolex", "feddrop", "fjord")

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

    def ratios(self) -> list[float]:
        """Return the width ratios, largest first: those of `width-ratios`, or all multiples of 1/64. Raises ValueError."""
        if self.width_rule == "paper":
            return [n / STEPS for n in range(STEPS, 0, -1)]
        return ratios("heterofl.width-ratios", self.width_ratios)


class FjORDSettings(Table):
    """FjORD, besides HeteroFL's width ratios."""

    used_by = ("fjord",)

    sampling: Literal["batch", "round"] = setting(
        "batch", "when a client draws a width ratio; round = once per round, as in SpaFL's comparison"
    )
    distillation: bool = setting(
        False, "a client's widest net teaches those within it", case("fjord", fjord__sampling="batch")
    )
    norms: Literal["separate", "shared"] = setting(
        "separate", "whether the nets of different width ratios have separate scales and shifts in batch norms"
    )


class SplitMixSettings(Table):
    """SplitMix."""

    used_by = ("splitmix",)

    # 1 / this, at most models/mix.py's MOST_NETS
    width_ratio: Annotated[float, Field(ge=0.01, le=1)] = setting(0.125, "width ratio of a base net, at least 0.01")
    scaler: bool = setting(
        True, "base nets begin with weights of the full model's size, and divide the layer outputs by their width ratio"
    )
