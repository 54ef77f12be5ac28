"""The memory of a part that is built, and the initial weights that its module draws."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn


def needs_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a function cannot be called without arguments."""
    needed = [each for each in signature(function).parameters.values() if each.default is Parameter.empty]
    return any(each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for each in needed)


def take_initial(module: nn.Module, whole: nn.Module) -> None:
    """Take the initial weights of the whole module. A narrower one has those of torch's layers, and parts of other arrays."""
    arrays = whole.state_dict()
    layers = {path: hasattr(layer, "reset_parameters") for path, layer in module.named_modules()}
    for name, array in module.state_dict().items():
        if array.shape == arrays[name].shape:
            array.copy_(arrays[name])
        elif not layers[name.rpartition(".")[0]]:
            array.copy_(arrays[name][tuple(map(slice, array.shape))])


def allocate(module: nn.Module) -> None:
    """Give the parameters and buffers of a module without values memory. What layers share, they share afterwards."""
    made: dict[int, Any] = {}
    for layer in module.modules():
        for held in (layer._parameters, layer._buffers):
            for name, array in held.items():
                if array is None:
                    continue
                if id(array) not in made:
                    empty = torch.empty(array.shape, dtype=array.dtype)
                    made[id(array)] = (
                        nn.Parameter(empty, array.requires_grad) if isinstance(array, nn.Parameter) else empty
                    )
                held[name] = made[id(array)]
