"""Networks whose first atoms have all their channels while the rest is narrow (SLT): W_1 .. W_K_T, then W^{1,s}, W^{s,s}, ..

The first narrow atom reads all channels of the atom before and makes a fraction s of its own: its kernel is W^{1,s}, with all
inputs and the first of the outputs. Where it adds its input to its output through an `nn.Identity`, it adds the first channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint, Shape, group_norm
from piecework.models.change import Change, Origin
from piecework.models.channels import input_channels

Build = Callable[[], nn.Module]
Inputs = tuple[tuple[str, int], ...]  # layers of a unit that read its input, by path, and the size of what they read


class FirstChannels(nn.Module):
    """The shortcut around a narrow layer: it passes on the first channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """Return x[B, :channels, H, W], a view."""
        return x[:, : self.channels]


@dataclass(frozen=True)
class WidePrefix(Change):
    """The first atoms with all channels of the run's model, in a network of another width ratio (SLT)."""

    full_atoms: Annotated[int, Field(ge=1)]

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        """Return the narrow model behind the full atoms. Raises ValueError, which names the atom, if it cannot be joined."""
        full, count = origin.at_width(1.0), self.full_atoms
        if not 0 < count <= len(model.atoms):
            raise ValueError(f"full_atoms = {count}: {model.name} has {len(model.atoms)} atoms")
        atoms = [*full.atoms[:count], *model.atoms[count:]]
        if count == len(atoms):
            head = _join(model, "the head", model.build_head, full.build_head, full.feature_shape)
            return replace(model, atoms=tuple(atoms), build_head=head)
        narrow, whole, before = model.atoms[count], full.atoms[count].build, full.shape_before(count)
        build = _join(model, f"atom {narrow.name!r}", narrow.build, whole, before, narrow.shape)
        atoms[count] = replace(narrow, build=build)
        return replace(model, atoms=tuple(atoms))


def _join(model: Blueprint, what: str, narrow: Build, full: Build, before: Shape, shape: Shape = ()) -> Build:
    try:
        return widen_input(narrow, full, before, shape)
    except ValueError as error:
        raise ValueError(f"{model.name} cannot be narrowed behind full atoms: {what} {error}") from None


@lru_cache(maxsize=256)  # the builds of a model are the same objects each time it is asked for
def widen_input(narrow: Build, full: Build, before: Shape, shape: Shape = ()) -> Build:
    """Return how to build a narrow unit that reads the input of the full one, of the shape `before`.

    `shape` is that of the narrow unit's output, empty for logits. Raises ValueError if there is no such unit.
    """
    inputs, kept = input_channels(full, before)
    channels = shape[0] if kept and len(shape) == 3 else 0  # it has a shortcut, which may be a module
    if channels:
        inputs, kept = input_channels(full, before, without_identities=True)
    if kept:
        raise ValueError("passes on the channels of its input, of which it has to make fewer")
    if not inputs:
        raise ValueError("has no layer that reads channels")
    build = partial(_build, narrow, tuple(inputs.items()), channels)
    with _disable_current_modes(), torch.no_grad(), without_data():
        try:
            out = build().eval()(torch.zeros(2, *before))
        except RuntimeError as error:
            raise ValueError(f"does not run on the channels of the full one: {error}") from None
    if shape and tuple(out.shape[1:]) != shape:
        raise ValueError(f"then makes {tuple(out.shape[1:])} in place of {shape}")
    return build


def _build(narrow: Build, inputs: Inputs, channels: int) -> nn.Module:
    module = narrow()
    for path, layer in list(module.named_modules()):
        if channels and type(layer) is nn.Identity:
            _set(module, path, FirstChannels(channels))
    for path, size in inputs:
        found = _widen(module.get_submodule(path), size)
        if not path:
            return found
        _set(module, path, found)
    return module


def _set(module: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, layer)


def _widen(layer: nn.Module, size: int) -> nn.Module:
    """Return a layer like this one that reads `size` channels or features. Raises ValueError for an unknown kind."""
    if isinstance(layer, nn.Conv2d) and isinstance(layer.padding, tuple):
        kernel, stride, padding, dilation = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        return nn.Conv2d(size, layer.out_channels, kernel, stride, padding, dilation, bias=layer.bias is not None)  # type: ignore[arg-type]
    if isinstance(layer, nn.Linear):
        return nn.Linear(size, layer.out_features, layer.bias is not None)
    if isinstance(layer, nn.LSTM):
        return nn.LSTM(size, layer.hidden_size, batch_first=layer.batch_first)
    if isinstance(layer, nn.GroupNorm):
        return group_norm(size)
    if isinstance(layer, nn.LayerNorm):
        return nn.LayerNorm(size, layer.eps)
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return type(layer)(size, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    raise ValueError(f"has a {type(layer).__name__}, which cannot read more channels")
