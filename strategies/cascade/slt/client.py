"""SLT, the client's side: the layers K_F + 1 .. K of the step's network are trained on the features behind the frozen ones.

W_1 .. W_K_F are frozen, W_{K_F + 1} .. W_K_T have all their channels, and the head behind them has a fraction s of its own.
All that is not frozen is trained by cross-entropy. A client that finds too little memory for what it was given freezes more
layers, at most as many as the poorest client.

Ours: frozen layers run in evaluation mode, one at a time, and their features are kept in the store for all rounds of a step.
"""

from dataclasses import dataclass

from piecework.client_app.client import Client, Update
from piecework.client_app.features import prefix_features
from piecework.models.partition import fits
from piecework.models.work_item import WorkItem
from piecework.strategies.cascade.profl.client import learn
from piecework.training.messages import Task, TaskConfig


@dataclass(frozen=True)
class SLTTaskConfig(TaskConfig):
    """The server's instructions: the numbers of atoms that the client may freeze, fewest first."""

    frozen: list[int]


def train(task: Task, client: Client) -> Update:
    """Train all atoms but the frozen ones. Raises MemoryBudgetExceededError if that does not fit."""
    item = widest(task, client)
    frozen = [(atom,) for atom in range(item.atoms[0])]
    # images are augmented again in every round, but stored features are not
    z = prefix_features(client, frozen) if frozen else client.local_data(0)
    return learn(task, client, item.atoms, z)


def widest(task: Task, client: Client) -> WorkItem:
    """Return the work item with the fewest frozen atoms that fits this client. Raises MemoryBudgetExceededError."""
    for frozen in SLTTaskConfig.of(task).frozen:
        item = WorkItem(tuple(range(frozen, len(client.blueprint.atoms))), variant=task.variant)
        if fits(task.needed_bytes(item), client.allowed):
            return item
    raise task.refusal(item, client.allowed, "training a layer and the narrow head behind it")
