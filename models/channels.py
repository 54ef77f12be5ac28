"""Find which channels of a model's arrays belong together, by running it on tensors without values that carry their axes.

A convolution or a linear layer makes new channels. Norms, ReLUs and poolings keep them. A residual sum joins two sets of
channels into one. A model with a fraction of the channels is then a choice of channels in each group, from which the indices of
every array follow.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint, Shape
from piecework.models.channel_axes import Axes, Follower
from piecework.models.channel_keeping import KEEPING, MAKING
from piecework.models.channel_rules import HANDLERS, PROPERTIES, STAND_INS


class Following(Follower, TorchFunctionMode):
    """Follows the channels of a model that runs meanwhile."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and record the axes of its result. Raises ValueError if that is not known."""
        kwargs = kwargs or {}
        out = STAND_INS.get(func.__name__, func)(*args, **kwargs)
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        handler = (PROPERTIES if func.__name__ == "__get__" else HANDLERS).get(name)
        if handler is not None:
            try:
                handler(self, out, *args, **kwargs)
            except (TypeError, IndexError) as error:  # arguments in another way than any known model gives them
                raise ValueError(f"channels cannot be followed through {name}: {error}") from error
            return out
        makes = any(isinstance(each, Tensor) for each in tree_leaves(out))
        if name in MAKING or not (makes or name == "__setitem__"):
            return out
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if isinstance(out, Tensor) and name.strip("_") in KEEPING:
            self.carry(name, out, inputs)
        elif any(axis for each in inputs for axis in self.axes(each)):
            raise ValueError(f"channels cannot be followed through {name}")
        return out


@lru_cache(maxsize=64)
def channel_axes(blueprint: Blueprint, units: tuple[str, ...] = ()) -> Mapping[str, Axes]:
    """Return the axes of every array, parameters and buffers, by global name. `units` adds heads after atoms.

    Raises ValueError, which names the atom, for an unsupported layer.
    """
    found: dict[str, Axes] = {}
    tokens = torch.int64 if blueprint.vocabulary else torch.float32
    follow, modules = Following(), dict[str, torch.nn.Module]()
    # Without the caller's modes: where a step is traced, the cost must not depend on whether the axes were known before.
    with _disable_current_modes(), torch.no_grad(), without_data():
        features = [torch.zeros(2, *blueprint.input_shape, dtype=tokens)]
        for unit in [*blueprint.units(), *units]:
            modules[unit] = blueprint.build_unit(unit).eval()
            kind, _, index = unit.partition(".")
            place = features[int(index) + 1] if kind in ("exits", "aux") else features[-1]
            try:
                with follow:
                    out = modules[unit](place)
            except ValueError as error:
                name = f"atom {blueprint.atoms[int(index)].name!r}" if kind == "atoms" else f"the head {unit!r}"
                raise ValueError(f"{blueprint.name} cannot be cut by width: in {name}, {error}") from error
            if kind == "atoms":
                features.append(out)
    for unit, module in modules.items():
        arrays = dict(module.named_parameters()) | dict(module.named_buffers())
        found |= {f"{unit}.{name}": follow.free(array) for name, array in arrays.items()}
    return found


class _Forget(torch.nn.Module):
    """Passes on a tensor of the same shape whose channels are not known."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape)


def input_channels(
    build: Callable[[], torch.nn.Module], before: Shape, *, without_identities: bool = False
) -> tuple[dict[str, int], bool]:
    """Return the layers of a unit that read its input channels, by path with the size of what they read.

    Also returns whether the output has these channels. `before` is the shape of one example at the input. With
    `without_identities`, what passes an `nn.Identity` is not followed. Raises ValueError for an unsupported layer.
    """
    follow = Following()
    with _disable_current_modes(), torch.no_grad(), without_data():
        unit = build().eval()
        for path, layer in list(unit.named_modules()) if without_identities else ():
            if path and type(layer) is torch.nn.Identity:
                unit.set_submodule(path, _Forget())
        x, channels = torch.zeros(2, *before), follow.new()
        follow.note(
            x, [channels if place == (1 if len(before) == 3 else len(before)) else None for place in range(x.dim())]
        )
        with follow:
            out = unit(x)
    group, found = follow.resolve(channels).group, dict[str, int]()
    for name, array in [*unit.named_parameters(), *unit.named_buffers()]:
        for axis, size in zip(follow.axes(array), array.shape, strict=True):
            if axis is not None and axis.group == group:
                found[name.rpartition(".")[0]] = size
    return found, any(axis is not None and axis.group == group for axis in follow.axes(out))
