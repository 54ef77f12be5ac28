"""What a client does for the model that is served: it measures the statistics of batch norms that training keeps none of."""

from piecework.client_app.client import Client
from piecework.client_app.features import measure_statistics
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.models.partition import fits
from piecework.models.work_item import WorkItem
from piecework.training.messages import Task


def served_item(task: Task) -> WorkItem:
    """The work item that measures the served model; it costs what its largest atom takes, forward only."""
    return WorkItem(tuple(task.atoms), task.head, task.variant, measured=True)


def measure_served(task: Task, client: Client) -> list[str]:
    """Measure the batch norms of the atoms and the head that the task names, in the store. Returns these units.

    Raises MemoryBudgetExceededError where not even one atom at a time fits.
    """
    needed = task.cost(served_item(task))
    if not fits(needed, client.allowed):
        raise MemoryBudgetExceededError(needed or 0, client.allowed, "measuring batch norms for the served model")
    measure_statistics(client, tuple(task.atoms), task.head)
    return [*(f"atoms.{atom}" for atom in task.atoms), task.head]
