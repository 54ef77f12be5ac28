"""FedAvg, the client's side: local training (client_app/whole.py), and fine-tuning before a personal evaluation.

Fine-tuning is the usual simple rival of methods that leave each client a model of its own (Yu, Bagdasaryan and Shmatikov,
"Salvaging Federated Learning by Local Adaptation", 2020, https://arxiv.org/abs/2002.04758): a client trains the server's
model on its own examples, and that is its model.
"""

from dataclasses import replace

from piecework.client_app.client import Client
from piecework.client_app.validation import evaluate_whole
from piecework.client_app.whole import train, train_whole
from piecework.models.partition import fits
from piecework.models.work_item import WorkItem
from piecework.strategies.whole.fedavg.settings import FedAvgSettings
from piecework.training.answers import Metrics
from piecework.training.messages import Task

__all__ = ["evaluate", "train"]


def evaluate(task: Task, client: Client) -> Metrics:
    """Return loss and accuracy of the server's model, in a personal evaluation after `fedavg.fine-tuning-epochs`.

    The epochs have the rate of the first round. A client evaluates the model as it is if it has fewer than two training
    examples, or if its budget is too small for training; raises MemoryBudgetExceededError if it is too small for that too.
    """
    epochs = client.settings.of(FedAvgSettings).fine_tuning_epochs if task.personal else 0
    item = WorkItem(tuple(range(len(client.blueprint.atoms))), variant=task.variant)
    trainable = len(client.local_data(0)) > 1 and fits(task.needed_bytes(item), client.allowed)
    if not (epochs and trainable and len(client.validation)):
        return evaluate_whole(task, client)
    config = replace(client.training_config, lr=client.settings.training.lr, epochs=epochs, iterations=0)
    metrics = train_whole(task, replace(client, training_config=config)).metrics
    kept = {key: value for key, value in metrics.items() if key.startswith("val-") or key == "predicted-peak"}
    return kept | {"fine-tuned": 1}
