"""FedDF (Lin et al., NeurIPS 2020) and FedET (Cho et al., IJCAI 2022), the client's side: local training of the
architecture that this client can afford.

The client trains all of the model, as in federated averaging, also on adversarial examples. Distillation happens on the server
alone.
"""

from dataclasses import dataclass

from piecework.client_app.client import Client, Update
from piecework.client_app.whole import train_whole
from piecework.training.messages import Task, TaskConfig


@dataclass(frozen=True)
class FedDFTaskConfig(TaskConfig):
    """The server's instructions: `level` is the model's place in the family."""

    level: int


def train(task: Task, client: Client) -> Update:
    """Train all of the client's model. Raises MemoryBudgetExceededError if it does not fit."""
    return train_whole(task, client)
