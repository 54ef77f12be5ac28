"""What functions of torch do with the channels of their inputs, by the names of the functions."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from piecework.models.channel_axes import Axes, Axis, Follower


def _conv(
    follow: Follower,
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
    if groups != 1 and not groups == x.shape[1] == weight.shape[0]:
        raise ValueError(f"channels cannot be followed through a convolution of {groups} groups")
    after = follow.new() if groups == 1 else before
    follow.bind(weight, [after, before if groups == 1 else None, None, None])
    follow.bind(bias, [after])
    follow.note(out, [None, after, None, None])


def _linear(follow: Follower, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    *others, before = follow.axes(x)
    after = follow.new()
    follow.bind(weight, [after, before])
    follow.bind(bias, [after])
    follow.note(out, [*others, after])


def _batch_norm(follow: Follower, out: Tensor, x: Tensor, *arrays: Any, **named: Any) -> None:
    axes = follow.axes(x)
    for array in (*arrays, *named.values()):
        if isinstance(array, Tensor):
            follow.bind(array, [axes[1]])
    follow.note(out, axes)


def _layer_norm(follow: Follower, out: Tensor, x: Tensor, shape: Any, *arrays: Any, **named: Any) -> None:
    axes = follow.axes(x)
    for array in (*arrays, *named.values()):
        if isinstance(array, Tensor):
            follow.bind(array, axes[-array.dim() :])
    follow.note(out, axes)


def _embedding(follow: Follower, out: Tensor, tokens: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    after = follow.new()
    follow.bind(weight, [None, after])
    follow.note(out, [None] * tokens.dim() + [after])


def _lstm(follow: Follower, out: Any, x: Tensor, states: Any, arrays: Sequence[Tensor], *_: Any, **__: Any) -> None:
    """Handle an LSTM of one layer: four gates of C rows each."""
    *others, before = follow.axes(x)
    after = follow.new()
    gates = Axis(after.group, outer=4)
    columns: list[Axes] = [(before,), (after,), (), ()]
    for array, inputs in zip(arrays, columns, strict=True):
        follow.bind(array, [gates, *inputs])
    follow.note(out[0], [*others, after])


def _attention(follow: Follower, out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> None:
    """Join the features of queries and keys, which are multiplied. The output has the features of the values."""
    follow.same(follow.axes(q)[-1], follow.axes(k)[-1])
    follow.note(out, follow.axes(v))


def _flatten(follow: Follower, out: Tensor, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> None:
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


def _unflatten(follow: Follower, out: Tensor, x: Tensor, dim: int, sizes: Sequence[int]) -> None:
    """Keep the channels together in the last of the new dimensions."""
    axes, added, dim = follow.axes(x), len(sizes) - 1, dim % x.dim()
    axis = axes[dim]
    inner = axis and follow.part(axis, prod(out.shape[dim : dim + added]))
    follow.note(out, [*axes[:dim], *[None] * added, inner, *axes[dim + 1 :]])


def _permute(follow: Follower, out: Tensor, x: Tensor, *dims: Any) -> None:
    axes = follow.axes(x)
    follow.note(out, [axes[dim] for dim in (dims[0] if isinstance(dims[0], tuple | list) else dims)])


def _transpose(follow: Follower, out: Tensor, x: Tensor, one: int, other: int) -> None:
    axes = list(follow.axes(x))
    axes[one], axes[other] = axes[other], axes[one]
    follow.note(out, axes)


def _unbind(follow: Follower, out: Sequence[Tensor], x: Tensor, dim: int = 0) -> None:
    axes, dim = follow.axes(x), dim % x.dim()
    if axes[dim] is not None:
        raise ValueError("channels cannot be followed through a split of channels")
    for each in out:
        follow.note(each, [*axes[:dim], *axes[dim + 1 :]])


def _getitem(follow: Follower, out: Tensor, x: Tensor, key: Any) -> None:
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
    lengths = iter(x.shape)
    for each, axis in pairs:
        length = 1 if each is None else next(lengths)
        if axis and isinstance(each, slice) and each.indices(length) != (0, length, 1):
            raise ValueError("channels cannot be followed through a slice of channels")
    return follow.note(out, [axis for each, axis in pairs if each is None or isinstance(each, slice)])


def _reduce(follow: Follower, out: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> None:
    """Handle a sum, a mean and the like over some dimensions, or over all."""
    dims = dim if isinstance(dim, tuple | list) else [dim] if dim is not None else []
    gone = {each % x.dim() for each in dims} or set(range(x.dim()))
    axes = [None if place in gone else axis for place, axis in enumerate(follow.axes(x))]
    follow.note(out, [axis for place, axis in enumerate(axes) if keepdim or place not in gone])


def _norm(
    follow: Follower, out: Tensor, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
) -> None:
    _reduce(follow, out, x, dim, keepdim)


def _spread(
    follow: Follower, out: Tensor, x: Tensor, dim: Any = None, *_: Any, keepdim: bool = False, **__: Any
) -> None:
    """Handle a variance, whose second argument may be whether it is unbiased."""
    _reduce(follow, out, x, None if isinstance(dim, bool) else dim, keepdim)


def _extreme(follow: Follower, out: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **named: Any) -> None:
    """Handle a maximum or minimum: of two tensors, of all, or along a dimension with the places."""
    other = named.get("other", dim)
    if isinstance(other, Tensor):
        return follow.carry("max", out, [x, other])
    for each in [out] if isinstance(out, Tensor) else out:
        _reduce(follow, each, x, dim, keepdim)
    return None


def _matmul(follow: Follower, out: Tensor, a: Tensor, b: Tensor) -> None:
    """Handle a product of matrices, which sums over the columns of one and the rows of the other."""
    one, other = follow.axes(a), follow.axes(b)
    if min(a.dim(), b.dim()) < 2:
        if any((*one, *other)):
            raise ValueError("channels cannot be followed through a product with a vector")
        return
    follow.join(one[-1], other[-2])
    batch: list[Axis | None] = [None] * (out.dim() - 2)
    for axes in (one[:-2], other[:-2]):
        for place, axis in enumerate(reversed(axes), start=1):
            batch[-place] = follow.same(batch[-place], axis) if axis else batch[-place]
    follow.note(out, [*batch, one[-2], other[-1]])


def _prelu(follow: Follower, out: Tensor, x: Tensor, weight: Tensor) -> None:
    axes = follow.axes(x)
    follow.bind(weight, [axes[1] if weight.numel() > 1 else None])
    follow.note(out, axes)


def _order(follow: Follower, out: Tensor, x: Tensor, *dims: Any, **named: Any) -> None:
    """Handle a reversal, a shift or a running sum along dimensions that are no channels."""
    given = named.get("dims", named.get("dim", dims[-1] if dims else None))
    flat = [each for each in (dims if named == {} and len(dims) > 1 else [given]) if each is not None]
    places = [place for each in flat for place in (each if isinstance(each, tuple | list) else [each])]
    axes = follow.axes(x)
    if any(axes) and (not places or any(axes[place] is not None for place in places)):
        raise ValueError("channels cannot be followed through a change of their order")
    follow.note(out, axes)


def _roll(follow: Follower, out: Tensor, x: Tensor, shifts: Any, dims: Any = ()) -> None:
    _order(follow, out, x, dims=dims)


def _unsqueeze(follow: Follower, out: Tensor, x: Tensor, dim: int) -> None:
    axes = [*follow.axes(x)]
    axes.insert(dim % out.dim(), None)
    follow.note(out, axes)


def _squeeze(follow: Follower, out: Tensor, x: Tensor, dim: Any = None) -> None:
    dims = range(x.dim()) if dim is None else dim if isinstance(dim, tuple | list) else [dim]
    gone = {each % x.dim() for each in dims if x.shape[each] == 1}
    follow.note(out, [axis for place, axis in enumerate(follow.axes(x)) if place not in gone])


def _stack(follow: Follower, out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    axes: list[Axis | None] = [None] * tensors[0].dim()
    for tensor in tensors:
        axes = [follow.same(a, b) for a, b in zip(axes, follow.axes(tensor), strict=True)]
    axes.insert(dim % out.dim(), None)
    follow.note(out, axes)


def _chunk(follow: Follower, out: Sequence[Tensor], x: Tensor, chunks: int, dim: int = 0) -> None:
    """Handle equal parts, as queries, keys and values are: a narrow model has the same choice of channels in each."""
    axes, dim = [*follow.axes(x)], dim % x.dim()
    if (axis := axes[dim]) is not None:
        if x.shape[dim] % chunks or (axis.outer > 1 and axis.outer % chunks):
            raise ValueError(f"channels cannot be followed through {chunks} unequal parts of channels")
        axes[dim] = follow.part(axis, chunks)
    for each in out:
        follow.note(each, axes)


def _parts(follow: Follower, out: Sequence[Tensor], x: Tensor, size: Any, dim: int = 0) -> None:
    """Handle a split along a dimension that is no channels."""
    axes = follow.axes(x)
    if axes[dim] is not None:
        raise ValueError("channels cannot be followed through a split of channels")
    for each in out:
        follow.note(each, axes)


def _cat(follow: Follower, out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
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
    "instance_norm": _batch_norm,
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
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(("mean", "sum", "amax", "amin", "logsumexp"), _reduce),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm"), _norm),
    **dict.fromkeys(("std", "var"), _spread),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), _matmul),
    "prelu": _prelu,
    **dict.fromkeys(("flip", "cumsum", "cumprod"), _order),
    "roll": _roll,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "chunk": _chunk,
    "split": _parts,
}
PROPERTIES: Mapping[str, Callable[..., None]] = {
    "mT": lambda follow, out, x, *_: _transpose(follow, out, x, -2, -1),
    "T": lambda follow, out, x, *_: follow.note(out, follow.axes(x)[::-1]),
}


def _lstm_output(x: Tensor, states: Sequence[Tensor], *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, cell = states
    return x.new_empty(*x.shape[:-1], hidden.shape[-1]), hidden, cell


# Functions that torch runs in many steps on tensors without values, by what only has the shapes of their results.
STAND_INS: Mapping[str, Callable[..., Any]] = {"lstm": _lstm_output}
