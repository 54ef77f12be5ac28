"""Settings of SplitMix."""

from typing import Annotated

from pydantic import Field

from piecework.training.settings.table import Table, setting


class SplitMixSettings(Table):
    """SplitMix."""

    name = "splitmix"

    # 1 / this, at most models/mix.py's MOST_NETS
    width_ratio: Annotated[float, Field(ge=0.01, le=1)] = setting(0.125, "width ratio of a base net, at least 0.01")
    scaler: bool = setting(
        True, "base nets begin with weights of the full model's size, and divide the layer outputs by their width ratio"
    )
