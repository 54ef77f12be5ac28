"""ExclusiveFL, a baseline of ProFL's Table 1: FedAvg over the clients that can train the whole model.

Other clients are never sampled. If no client can train it, there is no result ("NA" in the table), and the run does not start.
"""

from piecework.strategies.resources import ClientResources
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.methods import METHODS


class ExclusiveFL(FedAvg):
    """FedAvg that excludes clients too poor for the whole model."""

    name = "exclusivefl"
    can = METHODS["exclusivefl"].can

    def begin(self, fleet: ClientResources) -> None:
        """Raise ValueError if no client can train the whole model."""
        fleet.require_capable_client(self.cut.needed_bytes(self.cut.whole), "Training the whole model")
