"""Settings of FedPM."""

from typing import Literal

from piecework.training.settings.table import Table, setting


class FedPMSettings(Table):
    """FedPM."""

    name = "fedpm"

    straight_through: Literal["paper", "authors"] = setting(
        "paper", "the gradient through masks: as if the draw were the identity; authors: times the probability"
    )
    keep_adam: bool = setting(True, "clients keep Adam's moments between rounds; false = Adam starts anew in each")
