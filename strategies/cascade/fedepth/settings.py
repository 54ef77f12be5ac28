"""Settings of FeDepth and m-FeDepth."""

from typing import Literal

from piecework.training.settings.table import AtLeastOne, Table, setting


class FeDepthSettings(Table):
    """FeDepth and m-FeDepth."""

    name = "fedepth"

    partial_training: Literal["leave-out", "dilute"] = setting(
        "leave-out",
        "what an update counts for in blocks that its client skipped: nothing, or (dilute, as the authors chose) as an "
        "unchanged block",
    )
    sub_problem: Literal["blocks", "network"] = setting(
        "blocks",
        "what a client holds: the blocks it trains; network = all blocks, and it trains its own, the first atom and the "
        "head, as the authors fine-tune transformers",
    )
    mutual_models: AtLeastOne = setting(
        2,
        "maximum number of models that teach each other on a client with surplus memory; if not even two fit at once, the "
        "second is trained block after block, if all its blocks fit the surplus; 1 = off",
    )
    mutual_loss: Literal["paper", "authors"] = setting("paper", "the loss of mutual distillation")
