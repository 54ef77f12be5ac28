"""What a client does for the model that is served: it measures the statistics of batch norms that training keeps none of."""

from client_app.client import Client
from client_app.features import measure_statistics
from client_app.task import Task
from device_profiles.memory import MemoryBudgetExceededError
from models.partition import fits

SERVED = ()  # in a price list: the largest atom of the served model, forward only


def measure_served(task: Task, client: Client) -> list[str]:
    """Measure the batch norms of the atoms and the head that the task names, in the store. Returns these units.

    Raises MemoryBudgetExceededError where not even one atom at a time fits.
    """
    needed = task.price(SERVED)
    if not fits(needed, client.allowed):
        raise MemoryBudgetExceededError(needed or 0, client.allowed, "measuring batch norms for the served model")
    measure_statistics(client, tuple(task.atoms), task.head)
    return [*(f"atoms.{atom}" for atom in task.atoms), task.head]
