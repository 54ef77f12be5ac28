"""What a method can do, as data on its class: plans, advice, checks of settings and the records read it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Capabilities:
    """What a method can do, and how it treats clients and parts of the model that go short."""

    attack: Literal["never", "optional", "always"] = (
        "never"  # trains on adversarial examples; optional: the settings decide
    )
    cuts: bool = False  # the model is cut to fit a budget
    adapts: bool = False  # the model is not cut, but narrowed or shortened
    swaps: bool = False  # devices that are too small swap, which is only simulated, so budgets are not enforced
    swaps_with: str = ""  # the `memory.model` with which they do, if not always
    stages: bool = False  # the model is trained in several stages
    single_atoms: bool = False  # atoms are also trained alone, and skipped if they do not fit even so
    exits: bool = False  # the server's model has an exit head after every atom but the last
    rotates: bool = False  # sub-models change their channels or nets from round to round
    zeroed: bool = False  # untrained channels are 0 in the served model; otherwise it ends before them
    untrained: Literal["random", "cut off", "distilled"] = "random"  # how a part that no client trains ends up
    asks: Literal["all", "able"] = "all"  # who may be asked: every client, or those that can do their assignment
    evaluates: Literal["whole", "as trained"] = "whole"  # how clients hold the model when they evaluate it
    measures: bool = True  # clients hold the served model, so that they can measure its batch norms
    late: bool = (
        False  # the new model is the mean of what clients trained of one model, so that late answers can enter it
    )
    when_excluded: str = "excluded"  # what plans say of a device that cannot train
    caveat: str = ""  # a remark that advice adds to the method's figures
