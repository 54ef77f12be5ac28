"""Settings of FedProx."""

from piecework.training.settings.table import NonNegative, Table, setting


class FedProxSettings(Table):
    """FedProx."""

    name = "fedprox"

    mu: NonNegative = setting(0.01, "mu, the weight of the proximal term; 0 = FedAvg")
