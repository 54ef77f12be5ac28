"""Settings of DepthFL."""

from piecework.training.settings.table import AtLeastOne, NonNegative, Table, setting


class DepthFLSettings(Table):
    """DepthFL."""

    name = "depthfl"

    distillation_rounds: AtLeastOne = setting(300, "rounds in which self-distillation gains weight")
    feddyn_alpha: NonNegative = setting(0.0, "alpha, FedDyn's regularisation; 0 = federated averaging")
