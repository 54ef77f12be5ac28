"""Settings of FedAvg."""

from typing import Literal

from piecework.training.settings.table import Count, Table, case, setting


class FedAvgSettings(Table):
    """FedAvg."""

    name = "fedavg"

    client_weights: Literal["examples", "equal"] = setting(
        "examples", "what a client counts for in the mean; equal: all alike, as in SpaFL's comparison"
    )
    fine_tuning_epochs: Count = setting(
        0,
        "epochs for which each client trains the model on its own examples before it evaluates it, personal evaluation",
        case("fedavg", evaluation__mode="personal"),
    )
