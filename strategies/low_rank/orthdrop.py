"""OrthDrop, PriSM's rival in the orthogonal space: the top kernels of every layer, for every client, in every round.

FedHM (Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021,
https://arxiv.org/abs/2111.14655) chooses kernels so. A client of keep ratio c has ceil(c R) of a layer's R kernels, those with
the largest singular values, and of each all output channels. The rest is PriSM's (its authors' code): decay by Eq. 6, averaging
kernel by kernel, and a decomposition of the mean in every round. Kernels below the top stay in the server's model and are never
trained (FedHM drops them).
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
