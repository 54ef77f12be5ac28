"""Settings of FjORD."""

from typing import Literal

from piecework.training.settings.table import Table, case, setting


class FjORDSettings(Table):
    """FjORD, besides HeteroFL's width ratios."""

    name = "fjord"

    sampling: Literal["batch", "round", "uniform"] = setting(
        "batch",
        "when a client draws a width ratio; round = once per round; uniform: so too, from U(the smallest of "
        "heterofl.width-ratios, the largest), of which it takes 32 equal parts, as in SpaFL's comparison",
    )
    distillation: bool = setting(
        False, "a client's widest net teaches those within it", case("fjord", fjord__sampling="batch")
    )
    norms: Literal["separate", "shared"] = setting(
        "separate", "whether the nets of different width ratios have separate scales and shifts in batch norms"
    )
