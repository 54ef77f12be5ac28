"""Settings of FedDF and FedET."""

from typing import Literal

from piecework.training.settings.table import AtLeastOne, BatchSize, Positive, Table, setting


class FedDFSettings(Table):
    """FedDF, and FedET, which distils likewise."""

    name = "feddf"

    family: str = setting(
        "",
        "other models that clients may have, largest first, as in vgg13,vgg11,cnn3; empty = FedProphet's for vgg16 and "
        "resnet34",
    )
    server_iterations: AtLeastOne = setting(128, "batches of public examples per round and model")
    server_batch_size: BatchSize = setting(64, "examples in such a batch")
    server_lr: Positive = setting(0.005, "learning rate of the server")
    server_optimiser: Literal["sgd", "adam"] = setting(
        "sgd", "sgd: with momentum 0.9, as FedProphet's authors; adam: FedDF's own"
    )
