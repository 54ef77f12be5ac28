"""Settings of PriSM, and of its rivals OrthDrop and OrigDrop."""

from typing import Literal, Self

from pydantic import model_validator

from piecework.training.settings.table import NonNegative, Table, case, ratios, setting

PRISM = case("prism")


class PriSMSettings(Table):
    """PriSM; its keep ratios are OrthDrop's and OrigDrop's too."""

    name = "prism"

    keep_ratios: str = setting("0.8,0.6,0.4,0.2", "allowed keep ratios of sub-models")
    kernel_sampling: Literal["importance", "uniform", "softmax"] = setting(
        "importance", "how kernels are drawn: by a power of their singular values, or as in the paper's Table 5", PRISM
    )
    kappa: NonNegative = setting(
        2.5,
        "kappa, the power of the singular values; 0 = uniform",
        case("prism", prism__kernel_sampling="importance"),
    )
    output_channels: Literal["first", "random", "all"] = setting(
        "first",
        "which output channels sub-models compute: the first ones (the served network is then as narrow as the largest "
        "sub-model), others in every round and client, or all",
        PRISM,
    )
    server_momentum: bool = setting(
        False,
        "the server averages the momentum of factors and norms, as the authors' code does",
        case("prism", "orthdrop"),
    )

    @model_validator(mode="after")
    def _ratios_are_readable(self) -> Self:
        """Raise ValueError if they are not."""
        self.ratios()
        return self

    def ratios(self) -> list[float]:
        """Return the values of `keep-ratios`, largest first. Raises ValueError."""
        return ratios("prism.keep-ratios", self.keep_ratios)
