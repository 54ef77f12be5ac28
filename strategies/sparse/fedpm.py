"""FedPM (Isik et al., "Sparse Random Networks for Communication-Efficient Federated Learning", ICLR 2023,
https://arxiv.org/abs/2209.15328), the server's side.

theta: for each weight of a frozen random network the probability that it is there. Each round starts from a Beta(1, 1) prior
again; with masks m_k of K clients its mode is theta = sum_k m_k / K (Algorithm 2), where masks count 0.01 and 0.99 for 0 and 1,
as in the authors' code, so that scores stay finite. Down go scores, 32 bits each; up a mask, a bit each: records have as
`coded_bits` what an arithmetic coder would leave of it, layer by layer.

Ours: the straight-through gradient is the identity (`spafl.straight-through` other than paper: the authors' code, theta times
it).
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

LEAST = 0.01  # of a probability, as a mask's 0


class FedPMPolicy(FedAvgPolicy):
    """The whole model with scores, or nothing."""

    adversarial = "optional"
    caveat = "a mask of random weights, not the model"

    def require_model(self) -> None:
        """Raises ValueError for layers without masks, and for norms with statistics."""
        require_no_statistics(self.blueprint, self.settings, "fedpm sends masks, and statistics are none")
        vary(self.blueprint, self.variant)

    @property
    def variant(self) -> Variant:
        """The model with scores."""
        return Variant(scores=self.settings.spafl.straight_through, seed=self.settings.seed)

    def part(self, item: WorkItem) -> Part:
        """All of it."""
        return Part(self.model, item.atoms, name="the whole model, its scores", piece_class=ScoredModel)

    def wire(self, parts: list[Part]) -> tuple[int, int]:
        """Scores down, a bit each up."""
        down = sum(part.state_bytes for part in parts)
        return down, -(-down // 32)


class FedPM(FedAvg):
    """Masks of a frozen random network."""

    name = "fedpm"
    policy_class = FedPMPolicy
    policy: FedPMPolicy

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        if self.settings.training.init_weights:
            raise ValueError(
                f"training.init-weights = {self.settings.training.init_weights!r}: fedpm's weights are random and stay so"
            )
        self.counts, self.votes = np.zeros(0), 0
        self.coded: dict[int, float] = {}

    def sizes(self, arrays: ArrayRecord) -> list[int]:
        """How many scores each array has, by name: stored models have an order of their own."""
        return [prod(arrays[name].shape) for name in sorted(arrays)]

    def untrained(self, task: Task) -> ArrayRecord:
        """A mask, for its name and shape."""
        return ArrayRecord({MASK: Array(np.zeros(-(-sum(self.sizes(self.dispatcher.arrays)) // 8), dtype=np.uint8))})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As usual; masks are counted as they come."""
        self.counts, self.votes, self.coded = np.zeros(sum(self.sizes(self.dispatcher.arrays)), dtype=np.int32), 0, {}
        return super().aggregate_train(server_round, replies)

    def check(
        self, arrays: ArrayRecord, metrics: dict[str, Any], task: Task, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate:
        """A mask, with nothing behind its end."""
        update = super().check(arrays, metrics, task, limits, maximum)
        if np.unpackbits(update.arrays[MASK], bitorder="little")[len(self.counts) :].any():
            raise UpdateRejectedError(f"the mask of {len(self.counts)} scores has bits behind its end")
        return update

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Count a mask's bits; each client counts alike."""
        mask = np.unpackbits(update.arrays[MASK], bitorder="little")[: len(self.counts)]
        self.counts += mask
        self.votes += 1
        ends = np.cumsum(self.sizes(self.dispatcher.arrays))[:-1]
        self.coded[client] = sum(coded_bits(part) for part in np.split(mask, ends))
        self.reports[client].counted_bits = bits(len(mask), 0) + self.coded[client]

    def finish(self) -> ArrayRecord:
        """The scores of the posterior's mode."""
        theta = LEAST + (1 - 2 * LEAST) * self.counts / self.votes
        scores = np.log(theta / (1 - theta)).astype(np.float32)
        parts = np.split(scores, np.cumsum(self.sizes(self.dispatcher.arrays))[:-1])
        new = dict(zip(sorted(self.dispatcher.arrays), parts, strict=True))
        return ArrayRecord({n: Array(new[n].reshape(array.shape)) for n, array in self.dispatcher.arrays.items()})

    def details(self) -> dict[str, Any]:
        """The fraction of weights that the clients' masks keep; bits of each client's mask, coded."""
        ones = float(self.counts.sum() / (len(self.counts) * self.votes)) if self.votes else None
        return {"ones": ones, "coded_bits": {str(client): size for client, size in self.coded.items()}}


def coded_bits(mask: np.ndarray) -> float:
    """n H(p) of a mask[n] whose fraction of ones is p: what an arithmetic coder takes."""
    p = float(mask.mean())
    return 0.0 if p in (0.0, 1.0) else len(mask) * float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))
