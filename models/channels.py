"""Find which channels of a model's arrays belong together, by running it on tensors without values that carry their axes.

A convolution or a linear layer makes new channels. Norms, ReLUs and poolings keep them. A residual sum joins two sets of
channels into one. A model with a fraction of the channels is then a choice of channels in each group, from which the indices of
every array follow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint, Shape


@dataclass(frozen=True)
class Axis:
    """A dimension of `outer` x C x `inner`, C channels of a group: a flattened map has C x (H W), an LSTM's gates 4 x C."""

    group: int
    outer: int = 1
    inner: int = 1


Axes = tuple[Axis | None, ...]  # one entry per dimension; None: no channels, e.g. space, or the colours of images


class _Follower(TorchFunctionMode):
    """Record the axes of the tensors that a model makes and of the arrays it uses."""

    def __init__(self) -> None:
        super().__init__()
        self._links: list[Axis | None] = []  # for each group: the axis that it is a part of or equal to
        self._noted: dict[int, tuple[Tensor, Axes]] = {}  # the tensor is kept so that its id is not reused

    def new(self, **layout: int) -> Axis:
        """Return an axis for channels not seen before."""
        self._links.append(None)
        return Axis(len(self._links) - 1, **layout)

    def resolve(self, axis: Axis) -> Axis:
        """Return the axis in terms of the group it finally belongs to."""
        while (link := self._links[axis.group]) is not None:
            axis = Axis(link.group, axis.outer * link.outer, axis.inner * link.inner)
        return axis

    def axes(self, tensor: Tensor) -> Axes:
        """Return the known axes of a tensor. An unknown array gets a new axis in each dimension longer than 1."""
        if id(tensor) not in self._noted and isinstance(tensor, torch.nn.Parameter):
            self.note(tensor, [self.new() if size > 1 else None for size in tensor.shape])
        known = self._noted.get(id(tensor))
        return tuple(axis and self.resolve(axis) for axis in known[1]) if known else (None,) * tensor.dim()

    def note(self, tensor: Tensor | None, axes: Sequence[Axis | None]) -> None:
        """Record the axes of a tensor."""
        if tensor is not None:
            self._noted[id(tensor)] = tensor, tuple(axes)

    def same(self, one: Axis | None, other: Axis | None) -> Axis | None:
        """Return the common axis of tensors that are added, at least one of whose axes is known."""
        if one is None or other is None:
            return one or other
        one, other = self.resolve(one), self.resolve(other)
        if one.group != other.group:
            if (one.outer, one.inner) != (other.outer, other.inner):
                raise ValueError("channels are added up that are laid out in different ways")
            self._links[other.group] = Axis(one.group)
        return one

    def part(self, axis: Axis, runs: int) -> Axis:
        """Return the axis of one of the `runs` equal parts into which another axis is cut."""
        axis = self.resolve(axis)
        if axis.outer % runs == 0:
            return Axis(axis.group, axis.outer // runs, axis.inner)
        part = self.new()
        self._links[axis.group] = Axis(part.group, outer=runs)
        return Axis(part.group, axis.outer, axis.inner)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and record the axes of its result."""
        out = STAND_INS.get(func.__name__, func)(*args, **(kwargs or {}))
        handler = HANDLERS.get(func.__name__)
        if handler is not None:
            handler(self, out, *args, **(kwargs or {}))
        elif isinstance(out, Tensor):
            self._carry(func.__name__, out, [each for each in args if isinstance(each, Tensor)])
        return out

    def _carry(self, name: str, out: Tensor, inputs: list[Tensor]) -> None:
        """Carry axes through a function that treats all channels alike: dimensions are matched from the last one."""
        axes: list[Axis | None] = [None] * out.dim()
        for tensor in inputs:
            for place, axis in enumerate(reversed(self.axes(tensor)), start=1):
                if axis is not None:
                    if tensor.dim() > out.dim() or tensor.shape[-place] != out.shape[-place]:
                        raise ValueError(f"channels cannot be followed through {name}")
                    axes[-place] = self.same(axes[-place], axis)
        self.note(out, axes)


def _conv(
    follow: _Follower,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    before = follow.axes(x)[1]
    if groups not in (1, x.shape[1]):
        raise ValueError(f"channels cannot be followed through a convolution of {groups} groups")
    after = follow.new() if groups == 1 else before
    follow.note(weight, [after, before if groups == 1 else None, None, None])
    follow.note(bias, [after])
    follow.note(out, [None, after, None, None])


def _linear(follow: _Follower, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    *others, before = follow.axes(x)
    after = follow.new()
    follow.note(weight, [after, before])
    follow.note(bias, [after])
    follow.note(out, [*others, after])


def _batch_norm(follow: _Follower, out: Tensor, x: Tensor, *arrays: Any, **named: Any) -> None:
    axes = follow.axes(x)
    for array in (*arrays, *named.values()):
        if isinstance(array, Tensor):
            follow.note(array, [axes[1]])
    follow.note(out, axes)


def _layer_norm(follow: _Follower, out: Tensor, x: Tensor, shape: Any, *arrays: Any, **named: Any) -> None:
    axes = follow.axes(x)
    for array in (*arrays, *named.values()):
        if isinstance(array, Tensor):
            follow.note(array, axes[-array.dim() :])
    follow.note(out, axes)


def _embedding(follow: _Follower, out: Tensor, tokens: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    after = follow.new()
    follow.note(weight, [None, after])
    follow.note(out, [None] * tokens.dim() + [after])


def _lstm(follow: _Follower, out: Any, x: Tensor, states: Any, arrays: Sequence[Tensor], *_: Any, **__: Any) -> None:
    """Handle an LSTM of one layer: four gates of C rows each."""
    *others, before = follow.axes(x)
    after = follow.new()
    gates = Axis(after.group, outer=4)
    columns: list[Axes] = [(before,), (after,), (), ()]
    for array, inputs in zip(arrays, columns, strict=True):
        follow.note(array, [gates, *inputs])
    follow.note(out[0], [*others, after])


def _attention(follow: _Follower, out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> None:
    """Join the features of queries and keys, which are multiplied. The output has the features of the values."""
    follow.same(follow.axes(q)[-1], follow.axes(k)[-1])
    follow.note(out, follow.axes(v))


def _flatten(follow: _Follower, out: Tensor, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> None:
    axes, end = follow.axes(x), end_dim % x.dim()
    inside = [dim for dim in range(start_dim, end + 1) if axes[dim] is not None]
    merged = None
    if len(inside) > 1:
        raise ValueError("channels cannot be followed through flatten, which mixes two dimensions of channels")
    if inside:
        (dim,) = inside
        axis = axes[dim]
        assert axis is not None
        before, after = prod(x.shape[start_dim:dim]), prod(x.shape[dim + 1 : end + 1])
        merged = Axis(axis.group, before * axis.outer, axis.inner * after)
    follow.note(out, [*axes[:start_dim], merged, *axes[end + 1 :]])


def _unflatten(follow: _Follower, out: Tensor, x: Tensor, dim: int, sizes: Sequence[int]) -> None:
    """Keep the channels together in the last of the new dimensions."""
    axes, added = follow.axes(x), len(sizes) - 1
    axis = axes[dim]
    inner = axis and follow.part(axis, prod(out.shape[dim : dim + added]))
    follow.note(out, [*axes[:dim], *[None] * added, inner, *axes[dim + 1 :]])


def _permute(follow: _Follower, out: Tensor, x: Tensor, *dims: Any) -> None:
    axes = follow.axes(x)
    follow.note(out, [axes[dim] for dim in (dims[0] if isinstance(dims[0], tuple | list) else dims)])


def _transpose(follow: _Follower, out: Tensor, x: Tensor, one: int, other: int) -> None:
    axes = list(follow.axes(x))
    axes[one], axes[other] = axes[other], axes[one]
    follow.note(out, axes)


def _unbind(follow: _Follower, out: Sequence[Tensor], x: Tensor, dim: int = 0) -> None:
    axes = follow.axes(x)
    for each in out:
        follow.note(each, [*axes[:dim], *axes[dim + 1 :]])


def _getitem(follow: _Follower, out: Tensor, x: Tensor, key: Any) -> None:
    """Handle an index that takes whole dimensions (`:`, `...`) or one entry of a dimension, or adds one (`None`)."""
    keys, axes = [*key] if isinstance(key, tuple) else [key], follow.axes(x)
    if not any(axes):  # a table, whose entries may be taken by any index
        return follow.note(out, [None] * out.dim())
    if any(isinstance(each, Tensor | list) for each in keys):
        raise ValueError("channels cannot be followed through an index by a tensor or a list")
    rest = [slice(None)] * (x.dim() - sum(each is not None and each is not ... for each in keys))
    place = next((place for place, each in enumerate(keys) if each is ...), len(keys))
    keys[place : place + 1] = rest
    taken = iter(axes)
    pairs = [(each, None if each is None else next(taken)) for each in keys]
    return follow.note(out, [axis for each, axis in pairs if each is None or isinstance(each, slice)])


def _mean(follow: _Follower, out: Tensor, x: Tensor, dim: Any = (), keepdim: bool = False) -> None:
    gone = {each % x.dim() for each in (dim if isinstance(dim, tuple | list) else [dim])}
    axes = follow.axes(x)
    follow.note(out, [axis for place, axis in enumerate(axes) if keepdim or place not in gone])


def _cat(follow: _Follower, out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    axes: list[Axis | None] = [None] * out.dim()
    for tensor in tensors:
        axes = [follow.same(a, b) for a, b in zip(axes, follow.axes(tensor), strict=True)]
    if axes[dim] is not None:
        raise ValueError("channels cannot be followed through a concatenation of channels")
    follow.note(out, axes)


HANDLERS: Mapping[str, Callable[..., None]] = {
    "conv2d": _conv,
    "linear": _linear,
    "batch_norm": _batch_norm,
    "group_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "embedding": _embedding,
    "lstm": _lstm,
    "scaled_dot_product_attention": _attention,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "permute": _permute,
    "transpose": _transpose,
    "unbind": _unbind,
    "__getitem__": _getitem,
    "mean": _mean,
    "cat": _cat,
}


def _lstm_output(x: Tensor, states: Sequence[Tensor], *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, cell = states
    return x.new_empty(*x.shape[:-1], hidden.shape[-1]), hidden, cell


# Functions that torch runs in many steps on tensors without values, by what only has the shapes of their results.
STAND_INS: Mapping[str, Callable[..., Any]] = {"lstm": _lstm_output}


@lru_cache(maxsize=64)
def channel_axes(blueprint: Blueprint, units: tuple[str, ...] = ()) -> Mapping[str, Axes]:
    """Return the axes of every array, parameters and buffers, by global name. `units` adds heads after atoms.

    Raises ValueError, which names the atom, for an unsupported layer.
    """
    found: dict[str, Axes] = {}
    tokens = torch.int64 if blueprint.vocabulary else torch.float32
    follow, modules = _Follower(), dict[str, torch.nn.Module]()
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
        found |= {f"{unit}.{name}": follow.axes(array) for name, array in arrays.items()}
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
    follow = _Follower()
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
