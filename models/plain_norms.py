"""Batch norms of a user's own class, as timm's with the activation inside: what stands in their place would lose their code."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from piecework.models.frozen_norm import Frozen


def is_plain_norm(norm: nn.Module) -> bool:
    """Return whether a layer computes what torch's batch norms do, and no more."""
    return type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d) or isinstance(norm, Frozen)


def require_plain_norm(norm: _BatchNorm, replacement: str) -> None:
    """Raise ValueError, which names `replacement`, for a batch norm that is more than torch's."""
    if not is_plain_norm(norm):
        raise ValueError(
            f"a layer is a {type(norm).__name__}, which does more than torch's batch norms, and {replacement} in its place "
            "would not: choose another strategy, or a model with torch's norms"
        )
