"""Settings of FedET, besides those of FedDF."""

from piecework.training.settings.table import NonNegative, Table, setting


class FedETSettings(Table):
    """FedET, besides FedDF's."""

    name = "fedet"

    diversity: NonNegative = setting(0.05, "lambda, the weight of clients that disagree")
