"""OrthDrop, PriSM's rival in the orthogonal space: the top kernels of every layer, for every client, in every round.

That is how FedHM (Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021)
chooses them: a client of keep ratio c has ceil(c R) of a layer's R kernels, those with the largest singular values, and of each
all output channels. The rest is PriSM's (its authors' code): decay by Eq. 6, averaging kernel by kernel, decomposition of what
comes of it in every round; kernels below the top stay in the server's model and are never trained (FedHM drops them).
"""

from typing import Literal

from piecework.strategies.low_rank.prism import PriSM, PriSMPolicy


class OrthDropPolicy(PriSMPolicy):
    """As PriSM's; sub-models with all output channels."""

    @property
    def channels_computed(self) -> Literal["all"]:
        """All of them."""
        return "all"


class OrthDrop(PriSM):
    """Sub-models of the top kernels."""

    name = "orthdrop"
    policy_class = OrthDropPolicy
    sampling = "top"
