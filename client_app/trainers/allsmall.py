"""AllSmall, the client's side: federated averaging of a narrow model."""

from client_app.client import Client, Update
from client_app.setup import narrowed
from client_app.task import Metrics, Task
from client_app.trainers import fedavg
from client_app.validation import evaluate_whole


def train(task: Task, client: Client) -> Update:
    """Train the narrow model. Raises MemoryBudgetExceededError."""
    narrow(task, client)
    return fedavg.train(task, client)


def evaluate(task: Task, client: Client) -> Metrics:
    """Loss and accuracy of the narrow model on the client's validation share."""
    narrow(task, client)
    return evaluate_whole(task, client)


def narrow(task: Task, client: Client) -> None:
    """Let the client's model be the one of the task's share."""
    client.blueprint = narrowed(
        client.settings, client.data.input_shape, client.data.num_classes, float(task.own["share"])
    )
