"""Measure batch-norm statistics for the served model on a client, when training keeps no running statistics."""

from piecework.client_app.client import Client
from piecework.client_app.features import measure_statistics
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.models.partition import fits
from piecework.models.work_item import WorkItem
from piecework.training.messages import Task


def served_item(task: Task) -> WorkItem:
    """Return the work item that measures the served model. It costs the forward pass of the largest atom."""
    return WorkItem(tuple(task.atoms), task.head, task.variant, measured=True)


def measure_served(task: Task, client: Client) -> list[str]:
    """Measure the batch norms of the task's atoms and head, save them to the store, and return the names of these units.

    Raises MemoryBudgetExceededError if even one atom at a time does not fit.
    """
    needed = task.needed_bytes(served_item(task))
    if not fits(needed, client.allowed):
        raise MemoryBudgetExceededError(needed or 0, client.allowed, "measuring batch norms for the served model")
    measure_statistics(client, tuple(task.atoms), task.head)
    return [*(f"atoms.{atom}" for atom in task.atoms), task.head]
