"""FedPM: clients train a mask of a frozen random network (the server's side).

Berivan Isik, Francesco Pase, Deniz Gunduz, Tsachy Weissman, Michele Zorzi, "Sparse Random Networks for
Communication-Efficient Federated Learning", ICLR 2023, https://arxiv.org/abs/2209.15328

theta is, for each weight of the frozen random network, the probability that the mask keeps it. Each round starts again from a
Beta(1, 1) prior. With masks m_k of K clients, the mode of the posterior is theta = sum_k m_k / K (Algorithm 2). The server
sends scores, 32 bits per weight, and a client sends a mask, 1 bit per weight. `coded_bits` in the records is the size of a mask
after arithmetic coding, layer by layer.

Where it differs from the paper: a mask's 0 and 1 count as 0.01 and 0.99, so that scores stay finite, and clients keep Adam's
moments between rounds (`fedpm.keep-adam`), both as in the authors' code. The straight-through gradient is the identity, as in
the paper; in the authors' code it is multiplied by theta (`fedpm.straight-through = authors`).
"""

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.federation.aggregation import CheckedUpdate, UpdateRejectedError
from piecework.models.supermask import Supermask
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.planning.assignment import Assignment, Context
from piecework.planning.counts import bits
from piecework.planning.cut import Cut, Traffic, require_no_statistics
from piecework.planning.part import Part
from piecework.strategies.method import Received, Round
from piecework.strategies.sparse.fedpm.client import MASK, ScoredModel
from piecework.strategies.sparse.fedpm.settings import FedPMSettings
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.capabilities import Refusal
from piecework.training.methods import METHODS

MIN_THETA = 0.01  # the smallest probability, for which a 0 in a mask counts


class FedPMCut(Cut):
    """Each device trains scores for all weights, or nothing if that does not fit."""

    def require_model(self) -> None:
        """Raise ValueError for a model with layers that cannot be masked, or with batch norms that keep statistics."""
        require_no_statistics(self.blueprint, self.settings, "fedpm sends masks, which cannot contain statistics")
        vary(self.blueprint, self.variant)

    @property
    def variant(self) -> Variant:
        """The run's model with a score for each weight."""
        gradient = self.settings.of(FedPMSettings).straight_through
        return Variant(changes=(Supermask(gradient, self.settings.seed),))

    def plain_part(self, item: WorkItem) -> Part:
        """Return the part that trains all scores of the model."""
        return Part(self.model, item.atoms, name="the scores of the whole model", piece_class=ScoredModel)

    def traffic(self, parts: list[Part]) -> Traffic:
        """Return the bytes sent down, those of the scores, and up, one bit per score."""
        down = sum(part.state_bytes for part in parts)
        return replace(super().traffic(parts), bytes=(down, -(-down // 32)))


class MaskCounts:
    """The sum of the clients' masks: `counts` of each score, and the number of `votes`; `coded` bits of each client's mask."""

    def __init__(self, scores: int) -> None:
        self.counts, self.votes = np.zeros(scores, dtype=np.int32), 0
        self.coded: dict[int, float] = {}


class FedPM(FedAvg):
    """Averages the clients' masks of a frozen random network."""

    name = "fedpm"
    can = METHODS["fedpm"].can
    refuses = (Refusal("training.init-weights", "fedpm never trains its random weights"),)
    cut_class = FedPMCut
    cut: FedPMCut

    def assign(self, ctx: Context) -> Assignment:
        """Return the scores of the whole model. What comes back is a mask."""
        return self.work(self.cut.whole, expects=empty_mask)

    def open(self, current: Round) -> None:
        """Begin a round: masks are summed as they arrive."""
        current.mean = MaskCounts(sum(sizes(current.arrays)))

    def check(self, received: Received) -> CheckedUpdate:
        """Check a mask, whose unused last bits must be 0. Raises UpdateRejectedError."""
        update, scores = super().check(received), sum(sizes(received.model))
        if np.unpackbits(update.arrays[MASK], bitorder="little")[scores:].any():
            raise UpdateRejectedError(f"the mask of {scores} scores has bits set after its end")
        return update

    def combine(self, current: Round, client: int, update: CheckedUpdate) -> None:
        """Add a client's mask to the sum, with the same weight for every client."""
        masks = current.mean
        mask = np.unpackbits(update.arrays[MASK], bitorder="little")[: len(masks.counts)]
        masks.counts += mask
        masks.votes += 1
        ends = np.cumsum(sizes(current.arrays))[:-1]
        masks.coded[client] = sum(coded_bits(part) for part in np.split(mask, ends))
        current.reports[client].counted_bits = bits(len(mask), 0) + masks.coded[client]

    def finish(self, current: Round) -> ArrayRecord:
        """Return the new scores, logit(theta) of the posterior's mode."""
        theta = MIN_THETA + (1 - 2 * MIN_THETA) * current.mean.counts / current.mean.votes
        scores = np.log(theta / (1 - theta)).astype(np.float32)
        parts = np.split(scores, np.cumsum(sizes(current.arrays))[:-1])
        new = dict(zip(sorted(current.arrays), parts, strict=True))
        return ArrayRecord({n: Array(new[n].reshape(array.shape)) for n, array in current.arrays.items()})

    def details(self, current: Round) -> dict[str, Any]:
        """Return the fraction of weights that masks keep, and each mask's coded bits, for the round record."""
        masks = current.mean
        ones = float(masks.counts.sum() / (len(masks.counts) * masks.votes)) if masks.votes else None
        return {"ones": ones, "coded_bits": {str(client): size for client, size in masks.coded.items()}}


def sizes(arrays: ArrayRecord) -> list[int]:
    """Return the number of scores in each array, sorted by name, because stored models have another order."""
    return [prod(arrays[name].shape) for name in sorted(arrays)]


def empty_mask(scores: ArrayRecord) -> ArrayRecord:
    """Return an empty mask of these scores, whose name and shape an update must have."""
    return ArrayRecord({MASK: Array(np.zeros(-(-sum(sizes(scores)) // 8), dtype=np.uint8))})


def coded_bits(mask: np.ndarray) -> float:
    """Return n H(p), the bits that an arithmetic coder takes for a mask[n] whose fraction of ones is p."""
    p = float(mask.mean())
    return 0.0 if p in (0.0, 1.0) else len(mask) * float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))
