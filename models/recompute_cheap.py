"""Cheap recomputation: what norms, activations, dropout and poolings return is computed again, from what is kept before them.

A convolution or a linear layer keeps its input for the backward pass. If a norm and a ReLU made this input, the norm keeps its
own input as well, of which the other follows in a fraction of the time of a second forward pass. In-Place ABN (Rota Bulo et
al., CVPR 2018, https://arxiv.org/abs/1712.02616) does this for pairs of a batch norm and an invertible activation, by layers of
its own; here it is done below autograd, for the operators of any model, and the result is the same bit for bit.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from piecework.device_profiles.dispatch import Mode
from piecework.models.replayed_random import RandomState

LONGEST = 16  # operators that run again for one tensor
JOIN = 10  # what an operator of two maps counts, so that there is one at most: else residual sums would lead back to the first


class _Cheap(NamedTuple):
    """An operator that may run again: how many of its first arguments are maps, and which of its outputs it makes anew."""

    maps: int = 1
    outputs: tuple[int, ...] = (0,)
    random: bool = False


def _find(names: str) -> Iterator[Any]:
    return (operator.attrgetter(name)(torch.ops.aten) for name in names.split())


NORMS = set(_find("native_batch_norm.default cudnn_batch_norm.default"))
CHEAP: dict[Any, _Cheap] = {
    **dict.fromkeys((*NORMS, *_find("native_layer_norm.default native_group_norm.default")), _Cheap()),
    **dict.fromkeys(_find("relu.default gelu.default silu.default hardswish.default hardtanh.default"), _Cheap()),
    **dict.fromkeys(_find("relu_.default gelu_.default silu_.default hardswish_.default hardtanh_.default"), _Cheap()),
    **dict.fromkeys(_find("leaky_relu.default sigmoid.default tanh.default elu.default hardsigmoid.default"), _Cheap()),
    **dict.fromkeys(_find("leaky_relu_.default sigmoid_.default tanh_.default elu_.default"), _Cheap()),
    **dict.fromkeys(_find("hardsigmoid_.default mish.default mish_.default div_.Scalar"), _Cheap()),
    **dict.fromkeys(_find("_to_copy.default clone.default"), _Cheap()),
    **dict.fromkeys(_find("mul.Tensor mul_.Tensor add.Tensor add_.Tensor"), _Cheap(maps=2)),
    **dict.fromkeys(_find("max_pool2d_with_indices.default"), _Cheap(outputs=(0, 1))),
    **dict.fromkeys(_find("native_dropout.default"), _Cheap(outputs=(0, 1), random=True)),
    **dict.fromkeys(_find("bernoulli_.float"), _Cheap(maps=0, random=True)),  # dropout's mask on a CPU
}


@contextmanager
def recompute_cheaply(wanted: bool = True) -> Iterator[None]:
    """Within this context, graphs for backward passes keep little of norms, activations, dropout and poolings.

    Gradients and running statistics are exactly those without it. With `wanted` = False, or without gradients, it does nothing.
    """
    if not (wanted and torch.is_grad_enabled()):
        yield
        return
    keeper = Keeper()
    with saved_tensors_hooks(keeper.pack, unpack), keeper:
        yield


class Keeper(Mode):  # type: ignore[no-untyped-call]
    """A dispatch mode that notes how each storage was made, so that `pack` can tell which need not be kept."""

    def __init__(self) -> None:
        super().__init__()
        self._made = WeakKeyDictionary[UntypedStorage, tuple[_Call, int]]()
        self._kept = WeakSet[UntypedStorage]()

    def pack(self, tensor: Tensor) -> "Tensor | Packed":
        """Return what to keep in place of a tensor that a backward pass needs; `unpack` returns the tensor again."""
        if (place := self._place(tensor)) is not None:
            return Packed(place, place.call.cell(place.output))
        self._kept.add(tensor.untyped_storage())
        return tensor

    def _place(self, tensor: Tensor) -> "_Place | None":
        """Return where a tensor lies in the output of an operator that can run again, or None if it is in none."""
        made = self._made.get(tensor.untyped_storage())
        if made is None or tensor.dtype != made[0].dtypes[made[1]]:
            return None
        return _Place(*made, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        cheap = CHEAP.get(func)
        call = self._note(func, cheap, args, kwargs) if cheap is not None else None
        result = func(*args, **kwargs)
        for position in _written(func):
            written = args[position] if position < len(args) else None
            for tensor in written if isinstance(written, list | tuple) else (written,):
                if isinstance(tensor, Tensor):
                    self._made.pop(tensor.untyped_storage(), None)
        for name in _written_names(func) & kwargs.keys():
            self._made.pop(kwargs[name].untyped_storage(), None)
        if call is not None and cheap is not None:
            outputs = result if isinstance(result, tuple) else (result,)
            call.dtypes = {output: outputs[output].dtype for output in cheap.outputs}
            for output in cheap.outputs:
                self._made[outputs[output].untyped_storage()] = call, output
        return result

    def _note(self, func: Any, cheap: _Cheap, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "_Call | None":
        """Return how to run an operator again, or None if that would keep a tensor that is not kept anyway."""
        maps = [arg for arg in args[: cheap.maps] if isinstance(arg, Tensor)]
        noted: list[Any] = [self._place(arg) or (arg if self._is_kept(arg) else None) for arg in maps]
        if any(place is None for place in noted) or (_written(func) and not _fills(args[0])):
            return None
        if not cheap.maps:
            noted = [_Blank(args[0].size(), args[0].stride(), args[0].dtype, args[0].device)]
        elif _written(func) and isinstance(noted[0], Tensor):
            return None  # it is overwritten
        length = 1 + max((place.call.length for place in noted if isinstance(place, _Place)), default=0)
        length += JOIN if len(maps) > 1 else 0
        if length > LONGEST:
            return None
        others = list(args[len(noted) :])
        if func in NORMS and args[5]:
            others[2:4] = [None, None]  # running statistics move once
        random = RandomState(args[0].device) if cheap.random else None
        # Detached, since a graph that is held by what it holds would never be freed.
        held = [arg.detach() if isinstance(arg, Tensor) else arg for arg in (*noted, *others)]
        return _Call(func, tuple(held), dict(kwargs), random, length)

    def _is_kept(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or tensor.untyped_storage() in self._kept


class _Call:
    """An operator that may run again, on tensors that are kept and on outputs of others. Its outputs live while in use."""

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], random: RandomState | None, length: int
    ) -> None:
        self.func, self.args, self.kwargs, self.random, self.length = func, args, kwargs, random, length
        self.dtypes: dict[int, torch.dtype] = {}
        self._cells = WeakValueDictionary[int, _Cell]()

    def cell(self, output: int) -> "_Cell":
        """Return what holds an output from its computation on, for as long as the cell itself is held."""
        cell = self._cells.get(output)
        if cell is None:
            cell = self._cells[output] = _Cell()
        return cell

    def compute(self, output: int, *, to_change: bool = False) -> Tensor:
        """Return an output. If it is `to_change`, nobody else holds it."""
        cell = self._cells.get(output)
        if cell is not None and cell.value is not None:
            return cell.value.clone() if to_change else cell.value
        first, *others = (
            arg.tensor(to_change=bool(_written(self.func)) and not number) if isinstance(arg, _Place | _Blank) else arg
            for number, arg in enumerate(self.args)
        )
        with self.random.restored() if self.random is not None else nullcontext():
            found = self.func(first, *others, **self.kwargs)
        found = found if isinstance(found, tuple) else (found,)
        for number, held in list(self._cells.items()):
            held.value = found[number]
        value: Tensor = found[output]
        return value.clone() if to_change and cell is not None else value


class _Cell:
    """An output of an operator that ran again."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: Tensor | None = None


@dataclass(frozen=True)
class _Place:
    """A tensor that lies in an output of an operator."""

    call: _Call
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self, *, to_change: bool = False) -> Tensor:
        """Return the tensor, computed again."""
        return self.call.compute(self.output, to_change=to_change).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Blank:
    """A tensor of which the values do not matter."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self, **_: bool) -> Tensor:
        """Return such a tensor."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Packed:
    """What is kept in place of a tensor. The cell makes all that are left use the same value."""

    place: _Place
    cell: _Cell


@torch.no_grad()
def unpack(packed: Tensor | Packed) -> Tensor:
    """Return the tensor of which `Keeper.pack` made this."""
    return packed if isinstance(packed, Tensor) else packed.place.tensor()


def _fills(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its storage."""
    return (int(tensor.storage_offset()), tensor.numel() * tensor.itemsize) == (0, tensor.untyped_storage().nbytes())


@cache
def _written(func: Callable[..., Any]) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator changes."""
    return tuple(number for number, arg in enumerate(_arguments(func)) if arg.is_write)


@cache
def _written_names(func: Callable[..., Any]) -> frozenset[str]:
    return frozenset(arg.name for arg in _arguments(func) if arg.is_write)


def _arguments(func: Any) -> list[Any]:
    return list(func._schema.arguments) if func._schema.is_mutable else []
