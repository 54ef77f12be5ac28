"""OrthDrop, a baseline of PriSM in the orthogonal space: every client trains the top kernels of every layer in every round.

FedHM (Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021,
https://arxiv.org/abs/2111.14655) chooses kernels in this way.

A client of keep ratio c has ceil(c R) of a layer's R kernels, those with the largest singular values, with all their output
channels. The rest is as in PriSM (its authors' code): decay by Eq. 6, averaging kernel by kernel, and a decomposition of the
mean in every round. PriSM's paper compares with it under this name.

Where it differs from the paper: FedHM drops the kernels below the top. Here, as in the code of PriSM's authors, they stay in
the server's model and are never trained. The model that is served, evaluated and saved has only the kernels that some client
can have (`portions`), so that they do not disturb it.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord

from piecework.models.kernels import inclusion
from piecework.models.low_rank import Factors
from piecework.strategies.low_rank.prism.server import PriSM
from piecework.training.methods import METHODS


class OrthDrop(PriSM):
    """Sub-models of the top kernels of every layer, with all output channels."""

    name = "orthdrop"
    can = METHODS["orthdrop"].can
    sampling = "top"
    computes = "all"

    def portions(self, layer: Factors, arrays: ArrayRecord, counts: Mapping[int, int]) -> np.ndarray | None:
        """Return 1 for the kernels of the largest sub-model that a client can have, and 0 for the others."""
        largest = max(self.cut.shapes[n][layer.v][0] for n in counts)
        return inclusion(self.kernels(layer, arrays)[0], largest, 0.0, "top")
