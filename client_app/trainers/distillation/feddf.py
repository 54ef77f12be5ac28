"""FedDF (Lin et al., NeurIPS 2020) and FedET (Cho et al., IJCAI 2022), the client's side: local training of a model of another
architecture, the one that this client can afford.

It trains all of it, as in federated averaging, also on adversarial examples; what the server makes of it, it need not know.
"""

from dataclasses import dataclass

from piecework.client_app.client import Client, Update
from piecework.client_app.trainers.whole.fedavg import train_whole
from piecework.training.messages import Task, TaskConfig


@dataclass(frozen=True)
class FedDFTaskConfig(TaskConfig):
    """What the server says: the number of the model in the family."""

    level: int


def train(task: Task, client: Client) -> Update:
    """Train the model. Raises MemoryBudgetExceededError."""
    return train_whole(task, client)
