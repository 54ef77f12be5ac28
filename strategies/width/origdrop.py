"""OrigDrop, PriSM's rival in the original space: the first channels of every layer, for every client (ordered dropout).

A client of keep ratio c (`prism.keep-ratios`) trains HeteroFL's sub-model of that fraction of the channels, without Scaler and
class mask. Each entry is averaged over the clients that had it. The model that is evaluated and saved is the largest sub-model
that any client trains, as in HeteroFL.

Where it differs from the paper: in the code of PriSM's authors all other channels are 0, which computes the same, and the first
layer is whole. Here it is cut too, as in HeteroFL.
"""

from functools import cached_property

from piecework.strategies.low_rank.prism.settings import PriSMSettings
from piecework.strategies.width.heterofl.server import HeteroFL, HeteroFLCut
from piecework.training.methods import METHODS


class OrigDropCut(HeteroFLCut):
    """HeteroFL's cut with PriSM's keep ratios as width ratios."""

    @cached_property
    def ratios(self) -> list[float]:
        """PriSM's keep ratios, largest first."""
        return self.settings.of(PriSMSettings).ratios()


class OrigDrop(HeteroFL):
    """Sub-models of the first channels; the largest one is the trained model."""

    name = "origdrop"
    can = METHODS["origdrop"].can
    cut_class = OrigDropCut
    masks = False
    scales = False
