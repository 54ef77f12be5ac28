"""Settings of FedRBN."""

from typing import Literal

from piecework.training.settings.table import Fraction, Table, setting


class FedRBNSettings(Table):
    """FedRBN."""

    name = "fedrbn"

    clean_weight: Fraction = setting(
        0.5, "weight of clean examples in the adversarial loss; 0 = none, as in FedProphet's comparison"
    )
    evaluation_branch: Literal["oracle", "clean", "adversarial", "detector"] = setting(
        "oracle",
        "statistics of the model in evaluation: oracle = by the kind of example, a fixed set, or by a detector that "
        "learns from public examples",
    )
