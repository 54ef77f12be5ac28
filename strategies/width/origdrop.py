"""OrigDrop, PriSM's rival in the original space: the first channels of every layer, for every client (ordered dropout).

A client of keep ratio c (`prism.keep-ratios`) trains HeteroFL's sub-model of that fraction of the channels, without Scaler and
class mask. Each entry is averaged over the clients that had it. Channels that no client can ever train are 0 in the server's
model, as in the code of PriSM's authors: it is in effect the largest sub-model that any client trains. Ours: as in HeteroFL,
the first layer is cut too.
"""

from functools import cached_property

from flwr.app import Array, ArrayRecord

from piecework.models.width import only, ordered, sub_indices
from piecework.strategies.width.heterofl import HeteroFL, HeteroFLPolicy


class OrigDropPolicy(HeteroFLPolicy):
    """HeteroFL's policy with PriSM's keep ratios as width ratios."""

    caveat = "other channels are zero"
    zeroed = True
    masks = False
    scales = False

    @cached_property
    def ratios(self) -> list[float]:
        """PriSM's keep ratios, largest first."""
        return self.settings.prism.ratios()


class OrigDrop(HeteroFL):
    """Sub-models of the first channels; channels beyond the largest sub-model are zero."""

    name = "origdrop"
    policy_class = OrigDropPolicy

    def finish(self) -> ArrayRecord:
        """Return the new model, with 0 in the entries that no client can train."""
        largest = self.policy.shapes[min(self.fitting_levels())]
        kept = sub_indices(self.axes, self.full, largest, ordered)
        return ArrayRecord({name: Array(only(array.numpy(), kept[name])) for name, array in super().finish().items()})
