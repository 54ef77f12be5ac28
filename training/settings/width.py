"""Settings of the systems that narrow a model: HeteroFL, FedRolex, FedDrop, FjORD, SplitMix."""

from typing import Annotated, Literal

from pydantic import Field

from piecework.training.settings.table import Table, case, ratios, setting


class HeteroFLSettings(Table):
    """HeteroFL, and the systems whose sub-models have the same widths: FedRolex, FedDrop and FjORD."""

    used_by = ("heterofl", "fedrolex", "feddrop", "fjord")

    width_ratios: str = setting("1,0.5,0.25,0.125,0.0625", "allowed width ratios of sub-models")
    scaler: bool = setting(
        True,
        "divide the layer outputs of sub-models by their width ratio",
        case("heterofl", "fedrolex", "feddrop"),
    )
    masked_loss: bool = setting(
        True, "set the logits of classes that a client does not have to 0", case("heterofl", "fedrolex")
    )

    def ratios(self) -> list[float]:
        """Return the values of `width-ratios`, largest first. Raises ValueError."""
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


class SplitMixSettings(Table):
    """SplitMix."""

    used_by = ("splitmix",)

    width_ratio: Annotated[float, Field(gt=0, le=1)] = setting(0.125, "width ratio of a base net")
