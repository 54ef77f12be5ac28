"""FedRolex (Samiul Alam, Luyang Liu, Ming Yan, Mi Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling
Sub-Model Extraction", NeurIPS 2022, https://arxiv.org/abs/2212.01548).

FedRolex differs from HeteroFL in the choice of channels: a window that moves on by one channel every round. In round j, counted
from 0, a client with width ratio r trains the channels j, j + 1, .., j + r K - 1, modulo K, of a layer of K channels. Over many
rounds all channels are trained equally often. The window starts at the same channel for all clients of a round.

Where it differs from the paper: each entry is the unweighted mean over the clients that had it, as for all weights of
convolutions in the authors' code (`resnet_server.py`: `combine`). Their code weighs rows of linear layers, norms and biases by
a count of the updates that the entry has had. The count is that of the entry and not of the client, so it cancels in the mean,
except for a side effect: the count rises from client to client within a round, so those who come later weigh more (c, c + 1, ..
after c updates). This is not offered here, because it depends on the order of the clients and fades as c grows.
"""

from piecework.models.width import Select, rolling
from piecework.planning.assignment import Context
from piecework.strategies.width.heterofl.server import HeteroFL
from piecework.strategies.width.heterofl.serving import RollingServing
from piecework.training.methods import METHODS


class FedRolex(HeteroFL):
    """Sub-models of a rolling window of channels."""

    name = "fedrolex"
    can = METHODS["fedrolex"].can
    serving_class = RollingServing
    channels = "rolling"

    def select(self, ctx: Context) -> Select:
        """Return the window of the round."""
        return rolling(ctx.round)
