"""AllSmall, the client's side: federated averaging of a narrow model."""

from client_app.client import Client, Update
from client_app.setup import narrowed
from client_app.task import Metrics, Task
from client_app.trainers import fedavg
from client_app.validation import evaluate_whole
from models.cascade import Blueprint


def train(task: Task, client: Client) -> Update:
    """Train the narrow model. Raises MemoryBudgetExceededError."""
    client.blueprint = network(task, client)
    return fedavg.train(task, client)


def evaluate(task: Task, client: Client) -> Metrics:
    """Loss and accuracy of the narrow model on the client's validation share."""
    client.blueprint = network(task, client)
    return evaluate_whole(task, client)


def network(task: Task, client: Client) -> Blueprint:
    """The model with the share of its channels that the task names."""
    share = float(task.own["share"])
    return narrowed(client.settings, client.data.input_shape, client.data.num_classes, share)
