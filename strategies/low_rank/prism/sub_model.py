"""What PriSM draws for a client, and the arrays that it sends of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Array, ArrayRecord

from piecework.client_app.momentum import MOMENTUM
from piecework.models.width import Indices, take

if TYPE_CHECKING:
    from piecework.strategies.low_rank.prism.server import PriSM


@dataclass(frozen=True)
class Drawn:
    """What PriSM drew for a client, by weight: I_c, and the output channels that it computes if these are random."""

    kernels: Mapping[str, np.ndarray]
    rows: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class SubModel:
    """The arrays of a low-rank sub-model, cut out of the model in its orthogonal space; without momentum in an evaluation."""

    method: "PriSM"
    indices: Callable[[], Mapping[str, Indices]]
    momentum: bool = True

    def __call__(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of the sub-model."""
        whole = self.method.factor(arrays)
        where = {n: w for n, w in self.indices().items() if self.momentum or not n.startswith(MOMENTUM)}
        return ArrayRecord({n: Array(take(whole[n].numpy(), w)) for n, w in where.items()})
