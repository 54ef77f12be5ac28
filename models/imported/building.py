"""How a module is built without values, though its code may ask for some, as for the rates of stochastic depth."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from piecework.device_profiles.dispatch import makes_no_data

# They make ranges and short lists, which code reads back (`.item()`, `.tolist()`) to choose sizes and rates.
SERIES = (torch.arange, torch.as_tensor, torch.linspace, torch.logspace, torch.tensor)


def build(function: Callable[[], Any]) -> Any:
    """Return what a function makes. Where it needs values that tensors on `meta` do not have, series have values.

    Raises what the function raises; if values of series are not enough, what it raised without.
    """
    try:
        return function()
    except Exception as error:  # whatever the user's code raises
        if not (makes_no_data() and needs_values(error)):
            raise
        first = error
    try:
        with _SeriesWithValues():
            made = function()
    except Exception as error:
        raise (first if needs_values(error) or "device" in str(error) else error) from None
    if isinstance(made, nn.Module):
        _drop_values(made)
    return made


def needs_values(error: Exception) -> bool:
    """Return whether an error says that a tensor on `meta` has no values."""
    return re.search(r"\bmeta\b", str(error), re.IGNORECASE) is not None


class _SeriesWithValues(TorchFunctionMode):
    """Makes series on the CPU, where no device is named."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call."""
        kwargs = kwargs or {}
        if func in SERIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _drop_values(root: nn.Module) -> None:
    """Put arrays without values in the place of those that have some. What shares memory, does so afterwards."""
    dropped: dict[int, Any] = {}
    memories: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for layer in root.modules():
        for held in (layer._parameters, layer._buffers):
            for name, array in held.items():
                if array is None or array.is_meta:
                    continue
                if id(array) not in dropped:
                    memory, numbers = array.untyped_storage(), array.untyped_storage().nbytes() // array.itemsize
                    whole = torch.empty(numbers, dtype=array.dtype, device="meta")
                    whole = memories.setdefault((memory._cdata, array.dtype), whole)
                    empty = whole.as_strided(array.shape, array.stride(), array.storage_offset())
                    learned = isinstance(array, nn.Parameter)
                    dropped[id(array)] = nn.Parameter(empty, array.requires_grad) if learned else empty
                held[name] = dropped[id(array)]
