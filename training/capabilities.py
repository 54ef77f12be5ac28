"""What a method can do, as data: plans, advice, checks of settings and the records read it, none of them a method's name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Scalar = bool | int | float | str
Norms = Literal["running", "measured", "static", "batch", "local"]
# A run is in a case if each setting in it, by key, has one of the values.
Case = Mapping[str, tuple[Scalar, ...]]


@dataclass(frozen=True)
class Capabilities:
    """What a method can do, and how it treats clients and parts of the model that go short.

    `fit`, `pages` and `public` may depend on the method's settings: then they are the case in which they hold.
    """

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
    personal: bool = False  # there is no model but the clients' own
    norms: Norms = "running"  # what `architecture.batch-norm = auto` means
    other_norms: bool = True  # the method leaves batch norms as they are, so that `architecture.norm` can replace them
    fit: bool | Case = (
        True  # a step may be fitted into a small budget (`memory.fit`), because the method does not change it
    )
    lacks: Mapping[str, str] = field(default_factory=dict)  # ways of `memory.fit` that no step can go, with the reason
    pages: bool | Case = (
        False  # clients train the whole model with the usual step, which may page through it (`memory.fit`)
    )
    optimisers: bool = (
        True  # clients train with the optimiser that the settings name, and not with one of the method's own
    )
    public: bool | Case = False  # the server trains on public data
    private: bool = False  # what comes of the clients is the mean of their updates alone, which can be made private
    why_not_private: str = "what its server does with updates has not been checked for it"  # if it is not `private`
    when_excluded: str = "excluded"  # what plans say of a device that cannot train
    advised: int = 0  # the place among the methods that one would try first, from 1; 0 = it is not among them
    advised_fit: str = (
        ""  # ways of `memory.fit` with which one would try an advised method too, if plain steps do not fit
    )
    caveat: str = ""  # a remark that advice adds to the method's figures

    @property
    def always_attacks(self) -> bool:
        """Whether the method trains on adversarial examples whatever the settings."""
        return self.attack == "always"


@dataclass(frozen=True)
class Refusal:
    """A setting with which a method cannot work: one of `values`, or if there are none, any but the default.

    `why` completes the error `KEY = VALUE: ...`; `{name}` in it is the method's name. It is refused in the case `when` alone.
    """

    key: str
    why: str
    values: tuple[Scalar, ...] = ()
    when: Case = field(default_factory=dict)
