"""Settings of FedAvg."""

from typing import Literal

from piecework.training.settings.table import Table, setting


class FedAvgSettings(Table):
    """FedAvg."""

    name = "fedavg"

    client_weights: Literal["examples", "equal"] = setting(
        "examples", "what a client counts for in the mean; equal: all alike, as in SpaFL's comparison"
    )
