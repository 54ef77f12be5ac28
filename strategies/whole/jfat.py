"""jFAT, joint federated adversarial training (Zizzo et al., "FAT: Federated Adversarial Training", 2020,
https://arxiv.org/abs/2012.01791): FedProphet's upper bound.

Every client trains the whole model on adversarial examples (FedProphet's Eq. 2); w <- sum_k q_k w_k. That is FedProphet with
one module, and is built so. A device that is short of memory swaps, which costs simulated time (FedProphet's clock) and not
accuracy. So budgets are not enforced, and jFAT runs only where they are emulated.

The model of the run is that of the round with the best C + 1.5 A on the clients' validation data, as in the authors' code; it
ends where that has not risen for `fedprophet.stage-patience` rounds. `fedprophet.r-min`, `fedprophet.apa` and `fedprophet.dma`
mean nothing here.
"""

from functools import cached_property

from piecework.device_profiles.profile import DeviceState
from piecework.models.partition import Piece
from piecework.planning.part import Part
from piecework.planning.partition_policy import Stage, Swapping
from piecework.strategies.cascade.fedprophet import FedProphet
from piecework.strategies.cascade.fedprophet_modules import FedProphetPolicy


class JFATPolicy(Swapping, FedProphetPolicy):
    """One stage, the whole model, whatever memory there is."""

    cuts = False

    @cached_property
    def stages(self) -> list[Stage]:
        """The whole model."""
        return [Stage("training", (self.part(self.whole),))]

    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """The whole model."""
        return list(self.stages[stage].parts)

    def assigned(self, stage: int, state: DeviceState, slowest: float) -> Piece:
        """The whole model."""
        return self.stages[stage].parts[0].atoms


class JFAT(FedProphet):
    """Joint federated adversarial training."""

    name = "jfat"
    policy_class = JFATPolicy
    first_rho = 1.5
