"""The models that a run leaves behind for devices: what devices of each class deploy, evaluated on the test split."""

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord

from piecework.federation.evaluation import Evaluator
from piecework.models.partition import Piece
from piecework.server_app.served_model import ServedModel

Found = dict[str, dict[str, Any]]


def evaluate_device_models(
    served: ServedModel,
    server_round: int,
    arrays: ArrayRecord,
    part: tuple[Piece, str],
    evaluate: Evaluator,
    measure: Callable[[ServedModel], int],
) -> Found:
    """Return the accuracy of each model that devices deploy, how many clients do, and the bytes of messages for measuring it.

    `arrays` and `part` are the trained model's. `measure` has the clients of the round measure the batch norms of another model
    than the served one, and returns the bytes of its messages. The result is by the models' names, without a model that none of
    them could measure.
    """
    found: Found = {}
    for model in served.server.serving.device_models(server_round):
        own = served if model.variant == served.serving.variant else ServedModel(served.server, model)
        atoms, head = model.part or part
        is_known = own is served or own.is_of(arrays, atoms, head)
        measured_bytes = 0 if is_known else measure(own)
        if own.is_of(arrays, atoms, head):
            evaluate.show(own.blueprint)
            accuracy = evaluate.clean(own.complete(arrays), atoms, head).accuracy
            found[model.name] = {"accuracy": accuracy, "clients": model.clients, "bytes_measuring": measured_bytes}
    return found
