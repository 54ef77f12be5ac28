"""Federated averaging, the client's side: local SGD on the whole model (McMahan et al., 2017, Algorithm 1).

A device whose budget does not allow the whole model says so; nothing is trained in its place.
"""

from client_app.client import Client, Update
from client_app.task import Task
from client_app.training import PieceModel, Trainee
from device_profiles.memory import MemoryBudgetExceededError
from models.partition import fits


def train(task: Task, client: Client) -> Update:
    """Train all atoms and the head together. Raises MemoryBudgetExceededError."""
    atoms = tuple(range(len(client.blueprint.atoms)))
    needed = task.price(atoms)
    if not fits(needed, client.allowed):
        raise MemoryBudgetExceededError(needed or task.reference, client.allowed, "training the whole model")
    trainee = Trainee(lambda: [PieceModel(client.blueprint, atoms, "head", client.load())], client.recipe)
    for epoch in trainee.epochs():
        examples = client.share(0 if client.settings.feature_cache else epoch)
        trainee.epoch(examples, client.rng("batches", 0, epoch), client.cap, "train the whole model")
    (piece,) = trainee.finish()
    client.save(piece)
    metrics = client.evaluate(piece.logits, client.validation)
    metrics |= {"train-loss": trainee.total_loss / trainee.seen, "predicted-peak": needed or 0}
    return Update([*piece.units()], metrics, [atoms], [trainee.seen])
