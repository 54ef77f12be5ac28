"""Sub-models by width of a model outside this project: its layers with a part of their channels.

Which channels belong together is followed through the atoms (models/channels.py). Of a group of C channels a sub-model has
`scale_channels(C, width)`; classes and the colours of images stay whole.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.channel_axes import Axes
from piecework.models.channels import Following
from piecework.models.frozen_norm import FrozenBatchNorm1d, FrozenBatchNorm2d
from piecework.models.imported.caches import apart, caches_of
from piecework.models.imported.graph import Recorded

Channels = Mapping[int, int]  # how many channels of each group are kept
UNLIKE = 1009  # channels of the first group where each has another number
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, FrozenBatchNorm1d, FrozenBatchNorm2d)


def kept_channels(
    axes: Mapping[str, Axes], shapes: Mapping[str, Sequence[int]], whole: int, scale: Callable[[int], int]
) -> dict[int, int]:
    """Return how many channels of each group are kept; `whole` is the group of the classes, all of which are."""
    found: dict[int, int] = {}
    for name, each in axes.items():
        for axis, size in zip(each, shapes[name], strict=True):
            if axis is not None:
                channels = size // (axis.outer * axis.inner)
                found[axis.group] = channels if axis.group == whole else scale(channels)
    return found


def narrow(module: nn.Module, axes: Mapping[str, Axes], kept: Channels) -> None:
    """Give the arrays of a module without values the sizes of a sub-model, in place. `axes` are by the module's own names.

    Raises ValueError for a layer that is not known to work with fewer channels.
    """
    for path, layer in module.named_modules():
        sizes: dict[str, list[int]] = {}
        for held in (layer._parameters, layer._buffers):
            for name, array in held.items():
                if array is None:
                    continue
                full = f"{path}.{name}" if path else name
                if full not in axes:
                    raise ValueError(f"{full} is shared with another layer, and shared channels are not followed")
                sizes[name] = [
                    size if axis is None else axis.outer * kept[axis.group] * axis.inner
                    for axis, size in zip(axes[full], array.shape, strict=True)
                ]
                if sizes[name] != list(array.shape):
                    held[name] = _empty(array, sizes[name])
        if sizes:
            _note_sizes(path, layer, sizes)


def narrow_all(
    parts: Mapping[str, nn.Module],
    names: Mapping[str, str],
    axes: Mapping[str, Axes],
    kept: Channels,
    x: Tensor,
    follow: AbstractContextManager[Any] | None = None,
) -> list[Tensor]:
    """Narrow the units of a model in place, and return what each makes of examples x without values, while it is followed.

    Raises ValueError, which says the name of the unit that does not work with these channels.
    """
    found = list[Tensor]()
    for unit, part in parts.items():
        own = {name.removeprefix(f"{unit}."): each for name, each in axes.items() if name.startswith(f"{unit}.")}
        try:
            narrow(part, own, kept)
            with follow or nullcontext():
                x = _run(part, x)
        except (ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            failed = "" if isinstance(error, ValueError) else "a call does not work with other numbers of channels: "
            raise ValueError(f"in {names[unit]!r}, {failed}{reason}") from error
        found.append(x)
    return found


def require_linked(
    parts: Mapping[str, nn.Module], names: Mapping[str, str], axes: Mapping[str, Axes], whole: Channels, x: Tensor
) -> None:
    """Raise ValueError if channels that belong together are in several groups, of which a sub-model would mix the channels.

    Equal fractions of them are equally many, so nothing else tells. Each group gets another number of channels here, unless
    `whole` has it, or it has one channel. Changes the parts.
    """
    sizes = dict[int, int]()
    for name, each in axes.items():
        for axis, size in zip(each, _array(parts, name).shape, strict=True):
            if axis is not None:
                sizes[axis.group] = size // (axis.outer * axis.inner)
    moved = {group: UNLIKE + n for n, group in enumerate(sizes) if sizes[group] > 1 and group not in whole}
    try:
        logits = narrow_all(parts, names, axes, {**sizes, **moved, **whole}, x, Following())[-1]
        if logits.shape[1:] != (*whole.values(),):
            raise ValueError(f"its output has the shape {tuple(logits.shape)}")
    except ValueError as error:
        numbers = {int(number) for number in re.findall(r"\d+", str(error))}
        groups = [group for group, size in moved.items() if size in numbers]
        arrays = [next(name for name, each in axes.items() if _has(each, group)) for group in groups]
        of = f" (of {' and of '.join(arrays)})" if arrays else ""
        raise ValueError(
            f"{error}: its code puts channels together{of} that the operators do not show to belong together"
        ) from error


def _array(parts: Mapping[str, nn.Module], name: str) -> Tensor:
    unit = next(unit for unit in parts if name.startswith(f"{unit}."))
    owner, _, own = name.removeprefix(f"{unit}.").rpartition(".")
    array: Tensor = getattr(parts[unit].get_submodule(owner), own)
    return array


def _has(axes: Axes, group: int) -> bool:
    return any(axis is not None and axis.group == group for axis in axes)


def _run(part: nn.Module, x: Tensor) -> Tensor:
    """Return what a narrow part makes of x without values. Norms that have no arrays note how many channels they get."""

    def note(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(norm, nn.GroupNorm):
            _note_groups(norm, inputs[0].shape[1])
        else:
            norm.num_features = inputs[0].shape[1]

    bare = [layer for layer in part.modules() if isinstance(layer, (*NORMS, nn.GroupNorm)) and not layer.state_dict()]
    hooks = [layer.register_forward_pre_hook(note) for layer in bare]
    try:
        with torch.no_grad(), without_data(), apart(caches_of(part)):
            found: Tensor = part(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _note_groups(norm: nn.GroupNorm, channels: int) -> None:
    norm.num_channels = channels
    norm.num_groups = next(n for n in range(norm.num_groups, 0, -1) if channels % n == 0)


def _empty(array: Tensor, size: Sequence[int]) -> Tensor:
    with without_data():
        empty = torch.empty(*size, dtype=array.dtype)
    return nn.Parameter(empty, array.requires_grad) if isinstance(array, nn.Parameter) else empty


def _note_sizes(path: str, layer: nn.Module, sizes: Mapping[str, list[int]]) -> None:
    """Set the attributes of a layer that repeat the sizes of its arrays."""
    if isinstance(layer, nn.Conv2d):
        rows, columns = sizes["weight"][:2]
        if layer.groups > 1:
            layer.groups = rows  # a convolution of each channel for itself
        layer.out_channels, layer.in_channels = rows, columns * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = sizes["weight"]
    elif isinstance(layer, NORMS):
        layer.num_features = next(iter(sizes.values()))[0]
    elif isinstance(layer, nn.GroupNorm):
        _note_groups(layer, sizes["weight"][0])
    elif isinstance(layer, nn.LayerNorm):
        layer.normalized_shape = tuple(sizes["weight"])
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = sizes["weight"][1]
    elif type(layer).forward is not nn.Module.forward and not isinstance(layer, Recorded):
        raise ValueError(f"{path} is a {type(layer).__name__}, which is not known to work with fewer channels")
