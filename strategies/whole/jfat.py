"""jFAT, joint federated adversarial training (Giulio Zizzo, Ambrish Rawat, Mathieu Sinn, Beat Buesser, "FAT: Federated
Adversarial Training", 2020, https://arxiv.org/abs/2012.01791): FedProphet's upper bound.

Every client trains the whole model on adversarial examples (FedProphet's Eq. 2), and w <- sum_k q_k w_k. It is implemented as
FedProphet with one module. `fedprophet.r-min`, `fedprophet.apa` and `fedprophet.dma` have no effect here.

Where it differs from the paper: as in FedProphet's comparison, a device that is short of memory swaps, which costs simulated
time (FedProphet's clock) but no accuracy. Budgets are therefore not enforced, and jFAT runs only on emulated budgets.

The model of the run is that of the round with the best C + 1.5 A, as in the code of FedProphet's authors, where C and A are the
clean and adversarial accuracy on the clients' validation data. The run ends when this score has not risen for
`fedprophet.stage-patience` rounds.
"""

from functools import cached_property

from piecework.device_profiles.profile import DeviceState
from piecework.models.partition import Piece
from piecework.planning.cut import Stage
from piecework.strategies.cascade.fedprophet.cut import FedProphetCut
from piecework.strategies.cascade.fedprophet.server import FedProphet
from piecework.training.methods import METHODS


class JFATCut(FedProphetCut):
    """One stage: every device trains the whole model, and swaps if it does not fit."""

    @cached_property
    def stages(self) -> list[Stage]:
        """One stage, with the whole model as its only module."""
        return [Stage("training", (self.part(self.whole),))]

    def min_budget(self) -> int:
        """Return 0: a device with any budget trains, by swapping."""
        return 0

    def choose_atoms(self, stage: int, state: DeviceState, slowest: float) -> Piece:
        """Return all atoms of the model."""
        return self.stages[stage].parts[0].atoms


class JFAT(FedProphet):
    """Joint federated adversarial training: every client trains the whole model on adversarial examples."""

    name = "jfat"
    can = METHODS["jfat"].can
    cut_class = JFATCut
    first_rho = 1.5
