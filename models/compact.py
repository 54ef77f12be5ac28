"""The compact form of a masked model (SpaFL), without pruned filters and without inputs that are always zero.

A channel is removed if a single masked layer makes it and only the layer's silent norm, ReLUs and poolings lie between it and
its readers, because then it is zero. Where several layers make the same channels, as on shortcuts, and for logits, each layer
drops its own pruned filters and puts zeros in their places.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint
from piecework.models.channel_axes import Axes, Axis
from piecework.models.channels import channel_axes
from piecework.models.masked import Masked, Silent, masked_layers

Units = Mapping[str, nn.Module]
Places = tuple[Tensor | None, ...]  # per dimension of an array: the entries that are kept; None = all


@dataclass(frozen=True)
class Layout:
    """The axes of a masked model's arrays, and the groups of channels that one masked layer makes and may drop."""

    axes: Mapping[str, Axes]
    alone: frozenset[int]


@dataclass
class Compact:
    """The `units` of a compact form and, by name, which part of the masked model's array each of its arrays is."""

    units: dict[str, nn.Module]
    places: dict[str, Places]

    @torch.no_grad()
    def write_back(self, units: Units) -> None:
        """Copy the trained values into the `units` of the masked model."""
        for unit, module in self.units.items():
            whole = units[unit].state_dict()
            for name, part in module.state_dict().items():
                write_back(whole[name], part, self.places[_join(unit, name)])


def layout(blueprint: Blueprint, masked_blueprint: Blueprint) -> Layout:
    """Return the layout of a model, given with and without masks. Raises ValueError if its channels cannot be followed."""
    axes, makers, logits = channel_axes(blueprint), dict[int, int](), 0
    for unit in masked_blueprint.units():
        with without_data():
            module = masked_blueprint.build_unit(unit)
        for path, layer in module.named_modules():
            if isinstance(layer, Silent):
                continue
            for name, value in layer.named_parameters(recurse=False):
                axis = axes[_join(unit, path, name)][0] if name != "tau" else None
                if axis is not None and value.dim() and not (isinstance(layer, Masked) and name == "bias"):
                    once = isinstance(layer, Masked) and axis == Axis(axis.group)
                    makers[axis.group] = makers.get(axis.group, 0) + (1 if once else 2)
                    logits = axis.group  # the last assignment stays: the head's last layer
    return Layout(axes, frozenset(group for group, count in makers.items() if count == 1 and group != logits))


@torch.no_grad()
def kept_parts(units: Units, plan: Layout) -> dict[str, Places]:
    """Return, by name, which part of each array of a masked model's `units` its present mask keeps."""
    kept, found = dict[int, Tensor](), dict[str, Places]()
    for unit, module in units.items():
        for path, layer in masked_layers(module):
            axis = plan.axes[_join(unit, path, "weight")][0]
            if axis is not None and axis.group in plan.alone and (rows := open_rows(layer)) is not None:
                kept[axis.group] = rows
    for unit, module in units.items():
        for path, layer in module.named_modules():
            for name, whole in _arrays(layer):
                full = _join(unit, path, name)
                found[full] = _places(plan.axes.get(full, ()), kept, layer, whole)
    return found


def kept_fraction(units: Units, parts: Mapping[str, Places]) -> float:
    """Return the fraction of a model's parameters that lies in these parts."""
    kept = total = 0
    for unit, module in units.items():
        for name, whole in module.named_parameters():
            sizes = [
                len(place) if place is not None else size
                for place, size in zip(parts[_join(unit, name)], whole.shape, strict=False)
            ]
            kept += prod(sizes) * prod(whole.shape[len(sizes) :])
            total += whole.numel()
    return kept / total


@torch.no_grad()
def compact_units(units: Units, plan: Layout, empty: Units, parts: Mapping[str, Places]) -> Compact:
    """Return the compact form of a masked model's `units`, in `empty`: modules built like them, without values.

    Thresholds and arrays that are kept whole are not copied.
    """
    for unit, small in empty.items():
        for (path, layer), (_, source) in zip(small.named_modules(), units[unit].named_modules(), strict=True):
            for name, whole in _arrays(source):
                part, places = whole, parts[_join(unit, path, name)]
                if places:
                    part = nn.Parameter(take(whole, places)) if isinstance(whole, nn.Parameter) else take(whole, places)
                setattr(layer, name, part)
            if isinstance(layer, Masked) and isinstance(source, Masked):
                weight = _join(unit, path, "weight")
                axis, (rows, inputs) = plan.axes[weight][0], (*parts[weight], None, None)[:2]
                layer.rows, layer.zero_filled = rows, axis is None or axis.group not in plan.alone
                if inputs is not None:
                    there = torch.zeros(source.weight.shape[1], dtype=torch.bool, device=inputs.device)
                    there[inputs] = True
                    lost = take(source.weight, (rows, (~there).nonzero()[:, 0]))
                    layer.absent = lost.abs().flatten(1).sum(1)
    return Compact(dict(empty), dict(parts))


def open_rows(layer: Masked) -> Tensor | None:
    """Return the numbers of the filters that are not pruned, one number if all are pruned, or None if none is."""
    mask = layer.mask()
    if mask.all():
        return None
    rows = mask.nonzero()[:, 0]
    return rows if len(rows) else torch.zeros(1, dtype=torch.int64, device=mask.device)


def take(whole: Tensor, places: Places) -> Tensor:
    """Return a part of an array, in the memory format of convolutions; () = the array itself."""
    part = whole.detach()
    if not places:
        return part
    for dim, place in enumerate(places):
        if place is not None:
            part = part.index_select(dim, place)
    return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part


def take_into(part: Tensor, whole: Tensor, places: Places) -> None:
    """Copy a part of an array into existing memory."""
    chosen = [(dim, place) for dim, place in enumerate(places) if place is not None]
    if not chosen:
        part.copy_(whole)
        return
    for dim, place in chosen[:-1]:
        whole = whole.index_select(dim, place)
    part.copy_(whole.index_select(*chosen[-1]))


def write_back(whole: Tensor, part: Tensor, places: Places) -> None:
    """Write a part back into its places; the inverse of `take_into`."""
    rows, inputs = (*places, None, None)[:2]
    if rows is None and inputs is None:
        whole.copy_(part)
    elif rows is None:
        whole[:, inputs] = part
    elif inputs is None:
        whole[rows] = part
    else:
        whole[rows[:, None], inputs] = part


def _places(axes: Axes, kept: Mapping[int, Tensor], source: nn.Module, whole: Tensor) -> Places:
    """Return which part of an array of layer `source` is kept; () = all."""
    found: list[Tensor | None] = []
    for dim, axis in enumerate(axes):
        if axis is not None and axis.group in kept:
            found.append(_along(axis, kept[axis.group], whole.shape[dim]))
        elif axis is not None and not dim and isinstance(source, Masked):
            found.append(open_rows(source))
        else:
            found.append(None)
    return tuple(found) if any(place is not None for place in found) else ()


def _along(axis: Axis, channels: Tensor, size: int) -> Tensor:
    """Return the places of channels along an axis of `size` entries."""
    count = size // (axis.outer * axis.inner)
    outer, inner = (torch.arange(n, device=channels.device) for n in (axis.outer, axis.inner))
    return ((outer[:, None, None] * count + channels[:, None]) * axis.inner + inner).flatten()


def _arrays(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))
