"""A network as torch.export records it, which ONNX and ExecuTorch are made of."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from piecework.exports.formats import ExportError
from piecework.exports.network import ExportedNetwork

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# torch's own layers and passes cause them, also in an LSTM of torch as it is.
KNOWN = (
    r"The tensor attributes? .*_flat_weights.* (was|were) assigned during export",
    r"_check_is_size will be removed",
)


def record(network: ExportedNetwork, examples: Tensor, *, any_number: bool) -> "ExportedProgram":
    """Record a network for any number of examples, or for one. Raises ExportError if its code fixes the number."""
    if not any_number:
        return torch.export.export(network, (examples[:1],))
    dynamic = {"examples": {0: torch.export.Dim("batch")}}
    try:
        return torch.export.export(network, (examples[:2],), dynamic_shapes=dynamic)
    except Exception as error:
        if "Constraints violated (batch)" not in str(error):
            raise
        raise ExportError(
            "the model's code makes the number of examples a constant, as len(x) does where x.shape[0] does not: write that "
            "instead, or export to executorch, for one example at a time"
        ) from error


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Without the warnings that torch's exporters cause themselves."""
    with warnings.catch_warnings():
        for message in KNOWN:
            warnings.filterwarnings("ignore", message=message)
        yield
