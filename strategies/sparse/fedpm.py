"""FedPM: clients train a mask of a frozen random network (the server's side).

Berivan Isik, Francesco Pase, Deniz Gunduz, Tsachy Weissman, Michele Zorzi, "Sparse Random Networks for
Communication-Efficient Federated Learning", ICLR 2023, https://arxiv.org/abs/2209.15328

theta is, for each weight of the frozen random network, the probability that the mask keeps it. Each round starts again from a
Beta(1, 1) prior. With masks m_k of K clients, the mode of the posterior is theta = sum_k m_k / K (Algorithm 2). As in the
authors' code, a mask's 0 and 1 count as 0.01 and 0.99, so that scores stay finite. The server sends scores, 32 bits per
weight, and a client sends a mask, 1 bit per weight. `coded_bits` in the records is the size of a mask after arithmetic coding,
layer by layer.

The straight-through gradient is the identity, as in the paper. With `fedpm.straight-through = authors`, it is multiplied by
theta. Clients keep Adam's moments between rounds (`fedpm.keep-adam`), as in the authors' code.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord

from piecework.client_app.trainers.sparse.fedpm import MASK, ScoredModel
from piecework.federation.aggregation import CheckedUpdate, Norms, UpdateRejectedError
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.planning.counts import bits
from piecework.planning.part import Part
from piecework.planning.partition_policy import require_no_statistics
from piecework.strategies.state import Experiment
from piecework.strategies.whole.fedavg import FedAvg, FedAvgPolicy
from piecework.training.messages import Task

MIN_THETA = 0.01  # the smallest probability, for which a 0 in a mask counts


class FedPMPolicy(FedAvgPolicy):
    """Each device trains scores for all weights, or nothing if that does not fit."""

    adversarial = "optional"
    caveat = "a mask of random weights, not the model"

    def require_model(self) -> None:
        """Raise ValueError for a model with layers that cannot be masked, or with batch norms that keep statistics."""
        require_no_statistics(self.blueprint, self.settings, "fedpm sends masks, which cannot contain statistics")
        vary(self.blueprint, self.variant)

    @property
    def variant(self) -> Variant:
        """The run's model with a score for each weight."""
        return Variant(scores=self.settings.fedpm.straight_through, seed=self.settings.seed)

    def plain_part(self, item: WorkItem) -> Part:
        """Return the part that trains all scores of the model."""
        return Part(self.model, item.atoms, name="the scores of the whole model", piece_class=ScoredModel)

    def wire(self, parts: list[Part]) -> tuple[int, int]:
        """Return the bytes sent down, those of the scores, and up, one bit per score."""
        down = sum(part.state_bytes for part in parts)
        return down, -(-down // 32)


class FedPM(FedAvg):
    """Averages the clients' masks of a frozen random network."""

    name = "fedpm"
    accepts_late = False
    policy_class = FedPMPolicy
    policy: FedPMPolicy

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        if self.settings.training.init_weights:
            raise ValueError(
                f"training.init-weights = {self.settings.training.init_weights!r}: fedpm never trains its random weights"
            )
        self.counts, self.votes = np.zeros(0), 0
        self.coded: dict[int, float] = {}

    def sizes(self, arrays: ArrayRecord) -> list[int]:
        """Return the number of scores in each array, sorted by name, because stored models have another order."""
        return [prod(arrays[name].shape) for name in sorted(arrays)]

    def untrained(self, task: Task) -> ArrayRecord:
        """Return an empty mask, whose name and shape an update must have."""
        return ArrayRecord({MASK: Array(np.zeros(-(-sum(self.sizes(self.dispatcher.arrays)) // 8), dtype=np.uint8))})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies; masks are summed as they arrive."""
        self.counts, self.votes, self.coded = np.zeros(sum(self.sizes(self.dispatcher.arrays)), dtype=np.int32), 0, {}
        return super().aggregate_train(server_round, replies)

    def check(
        self, arrays: ArrayRecord, metrics: dict[str, Any], task: Task, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate:
        """Check a mask, whose unused last bits must be 0. Raises UpdateRejectedError."""
        update = super().check(arrays, metrics, task, limits, maximum)
        if np.unpackbits(update.arrays[MASK], bitorder="little")[len(self.counts) :].any():
            raise UpdateRejectedError(f"the mask of {len(self.counts)} scores has bits set after its end")
        return update

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add a client's mask to the sum, with the same weight for every client."""
        mask = np.unpackbits(update.arrays[MASK], bitorder="little")[: len(self.counts)]
        self.counts += mask
        self.votes += 1
        ends = np.cumsum(self.sizes(self.dispatcher.arrays))[:-1]
        self.coded[client] = sum(coded_bits(part) for part in np.split(mask, ends))
        self.reports[client].counted_bits = bits(len(mask), 0) + self.coded[client]

    def finish(self) -> ArrayRecord:
        """Return the new scores, logit(theta) of the posterior's mode."""
        theta = MIN_THETA + (1 - 2 * MIN_THETA) * self.counts / self.votes
        scores = np.log(theta / (1 - theta)).astype(np.float32)
        parts = np.split(scores, np.cumsum(self.sizes(self.dispatcher.arrays))[:-1])
        new = dict(zip(sorted(self.dispatcher.arrays), parts, strict=True))
        return ArrayRecord({n: Array(new[n].reshape(array.shape)) for n, array in self.dispatcher.arrays.items()})

    def details(self) -> dict[str, Any]:
        """Return the fraction of weights that masks keep, and each mask's coded bits, for the round record."""
        ones = float(self.counts.sum() / (len(self.counts) * self.votes)) if self.votes else None
        return {"ones": ones, "coded_bits": {str(client): size for client, size in self.coded.items()}}


def coded_bits(mask: np.ndarray) -> float:
    """Return n H(p), the bits that an arithmetic coder takes for a mask[n] whose fraction of ones is p."""
    p = float(mask.mean())
    return 0.0 if p in (0.0, 1.0) else len(mask) * float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))
