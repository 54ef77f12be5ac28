"""Settings of SLT."""

from typing import Literal

from piecework.training.settings.table import Table, setting


class SLTSettings(Table):
    """SLT."""

    name = "slt"

    rounds: Literal["added", "trained"] = setting(
        "added",
        "what the rounds of a step are in proportion to: the parameters that it adds to the network, or (trained, the authors' "
        "code) those that it trains, after a fraction s of all rounds for pretraining",
    )
    depth: Literal["budget", "one"] = setting(
        "budget",
        "how many layers a client with more memory than the poorest trains in full width: as many as fit, or one",
    )
