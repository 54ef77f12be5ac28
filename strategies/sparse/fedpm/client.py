"""FedPM (Isik et al., "Sparse Random Networks for Communication-Efficient Federated Learning", ICLR 2023), the client's side.

The server's probabilities theta arrive as scores s = logit(theta). The client trains the scores with Adam, whose moments it
keeps from round to round, as the authors' clients do (`fedpm.keep-adam = false`: Adam starts anew). Masks are drawn again in
every step, and gradients pass them straight-through. The client sends back one mask drawn from the trained scores, one bit per
weight. Frozen weights are drawn from the run's seed on both sides.
"""

from dataclasses import replace

import numpy as np

from piecework.client_app.client import Client, Update
from piecework.client_app.momentum import CarriedMomentum
from piecework.client_app.whole import train_whole
from piecework.strategies.sparse.fedpm.settings import FedPMSettings
from piecework.training.adam import Adam
from piecework.training.loop import PieceModel
from piecework.training.messages import Task
from piecework.training.settings.shared import WAYS

MASK = "mask"  # uint8 [scores / 8]: bits for all scores, arrays sorted by name, the first score in the lowest bit


class ScoredModel(PieceModel):
    """A model of scores, which Adam trains. A step draws one mask, so it does not compute micro-batches."""

    optimiser = Adam
    ways = tuple(way for way in WAYS if way != "micro-batch")


def train(task: Task, client: Client) -> Update:
    """Train the scores and draw the mask to upload. Raises MemoryBudgetExceededError if the model does not fit."""
    carried = CarriedMomentum(client) if client.settings.of(FedPMSettings).keep_adam else None
    update = train_whole(task, client, piece_class=ScoredModel, carried=carried)
    rng, drawn = client.rng("mask"), dict[str, np.ndarray]()
    for name, scores in client.store.read(sorted(update.units)):
        with np.errstate(over="ignore"):  # of exp, for a score so low that its probability is 0
            drawn[name] = rng.random(scores.size) < 1 / (1 + np.exp(-scores.reshape(-1).astype(np.float64)))
    mask = np.concatenate([drawn[name] for name in sorted(drawn)])
    client.store.write_units({MASK: np.packbits(mask, bitorder="little")})
    return replace(update, units=[MASK])
