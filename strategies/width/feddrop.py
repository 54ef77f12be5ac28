"""FedDrop, federated dropout (Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018, https://arxiv.org/abs/1812.07210; Wen, Jeon, Huang, "Federated Dropout", 2022).

As HeteroFL, with channels that are drawn again for every client and round, uniformly among those of a layer; channels that a
residual sum joins are drawn together. What layers make is divided by the ratio of channels kept, as in dropout
(`heterofl.scaler`). All classes are trained everywhere. The mean of an entry is weighted by numbers of examples.
"""

from piecework.client_app.trainers.width.heterofl import HeteroFLTaskConfig
from piecework.models.width import Select, drawn
from piecework.strategies.width.heterofl import HeteroFL, HeteroFLPolicy
from piecework.training.messages import Task
from piecework.training.randomness import generator


class FedDropPolicy(HeteroFLPolicy):
    """Without a mask."""

    masks = False
    moving = True


class FedDrop(HeteroFL):
    """Sub-models of channels drawn at random."""

    name = "feddrop"
    policy_class = FedDropPolicy
    by_examples = True

    def select(self, task: Task) -> Select:
        """Drawn by (seed, round, client)."""
        return drawn(generator(self.settings.seed, task.round, HeteroFLTaskConfig.of(task).draw, "channels"))
