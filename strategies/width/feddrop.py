"""FedDrop, federated dropout.

Sebastian Caldas, Jakub Konecny, H. Brendan McMahan, Ameet Talwalkar, "Expanding the Reach of Federated Learning by Reducing
Client Resource Requirements", 2018, https://arxiv.org/abs/1812.07210
Dingzhu Wen, Ki-Jun Jeon, Kaibin Huang, "Federated Dropout - A Simple Approach for Enabling Federated Learning on Resource
Constrained Devices", IEEE Wireless Communications Letters 2022, https://arxiv.org/abs/2109.15258

FedDrop differs from HeteroFL in three ways. The channels of a sub-model are drawn uniformly, again for every client and round.
The loss has no class mask, so every client trains the rows of all classes. As in dropout, the outputs of layers are divided by
the fraction of their inputs that is kept (`heterofl.scaler`).

Where it differs from the paper: channels that a residual sum joins are drawn together, and numbers of channels are rounded
down, both as in the code of FedProphet's authors, with whose comparison this one is built. Each entry is the unweighted mean
over the clients that had it (`heterofl.client-weights`).
"""

from piecework.models.width import Select, draw_channels
from piecework.planning.assignment import Context
from piecework.strategies.serving import Serving
from piecework.strategies.width.heterofl.server import HeteroFL
from piecework.training.methods import METHODS
from piecework.training.randomness import generator


class FedDrop(HeteroFL):
    """Sub-models of random channels, drawn again for every client and round."""

    name = "feddrop"
    can = METHODS["feddrop"].can
    serving_class = Serving
    masks = False
    rounding = "down"
    channels = "random"

    def select(self, ctx: Context) -> Select:
        """Return a draw of channels, a function of seed, round and client."""
        return draw_channels(generator(self.settings.seed, ctx.round, ctx.client, "channels"))
