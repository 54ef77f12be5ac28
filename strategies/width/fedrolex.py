"""FedRolex (Samiul Alam, Luyang Liu, Ming Yan, Mi Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling
Sub-Model Extraction", NeurIPS 2022, https://arxiv.org/abs/2212.01548).

As HeteroFL, with a window that rolls on: in round j, from 0, a client with ratio r of K channels trains channels j, j + 1, ..,
j + r K - 1, modulo K, so that all are trained alike often. Clients of a round roll together. The mean of an entry is weighted
by numbers of examples.
"""

from piecework.models.width import Select, rolling
from piecework.strategies.width.heterofl import HeteroFL, HeteroFLPolicy
from piecework.training.messages import Task


class FedRolexPolicy(HeteroFLPolicy):
    """As HeteroFL's."""

    moving = True


class FedRolex(HeteroFL):
    """Sub-models of a rolling window of channels."""

    name = "fedrolex"
    policy_class = FedRolexPolicy
    by_examples = True

    def select(self, task: Task) -> Select:
        """The window of the task's round."""
        return rolling(task.round)
