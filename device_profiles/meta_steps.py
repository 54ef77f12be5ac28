"""Runs a step on plain tensors without data, so that most of a trace's operators are only looked up.

For each operator torch's fake tensors run a Python kernel, or look into a cache that costs nearly as much. Here tensors are
those of torch's device `meta`. An operator that makes new tensors is asked once, on fake tensors of a CPU, what it returns;
later calls with equal arguments get empty tensors of these sizes, strides and types. Operators that change or view their
arguments are torch's own kernels for `meta`.

A function of torch may call other operators on a CPU than here, as RNNs, attention and autocast do. So only steps of this
package's own layers in float32 run here, and only operators in PLAIN. Another one raises UnsuitedError.
"""

import weakref
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from piecework.device_profiles.cpu_results import FILLS, AsOnTheCPU
from piecework.device_profiles.dispatch import Mode, makes_no_data

aten = torch.ops.aten
META = torch.device("meta")
MOST = 20_000  # kinds of calls that are kept
VIEWED = "viewed"  # the result of an operator that returns its arguments' storage although its schema does not say so
# Operators that the same functions of torch call on every device. Others, such as the softmax of attention and the gates of an
# LSTM, may be parts of a function that has an operator of its own on a CPU. Without a point, an operator's default is meant.
_PLAIN = """
    empty.memory_format empty_like empty_strided new_empty_strided zeros zeros_like new_zeros ones ones_like
    arange randn bernoulli clone _to_copy
    convolution convolution_backward mm addmm _int_mm embedding embedding_dense_backward
    native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward
    relu threshold_backward gelu gelu_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward _upsample_bilinear2d_aa
    _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward
    add.Tensor sub.Tensor rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg abs sign exp reciprocal rsqrt
    pow.Tensor_Scalar gt.Scalar eq.Tensor clamp_min masked_fill.Scalar bitwise_not
    sum sum.dim_IntList mean mean.dim amax argmax linalg_vector_norm
    constant_pad_nd stack cat index.Tensor flip slice_backward select_backward _unsafe_view
"""
PLAIN = frozenset(attrgetter(name if "." in name else f"{name}.default")(aten) for name in _PLAIN.split())

_RESULTS: dict[tuple[Any, ...], Any] = {}
_IN_PLACE: dict[Any, bool] = {}


class UnsuitedError(Exception):
    """A step cannot run on `meta` tensors as it would on a CPU."""


class OnMeta(Mode):  # type: ignore[no-untyped-call]
    """Runs operators on `meta` tensors with the results of a CPU. Raises UnsuitedError for those that are not in PLAIN.

    `refused` says whether it has done so. `nowhere` has the storages of tensors that the step makes `without_data`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nowhere: dict[int, weakref.KeyedRef[int, Any]] = {}
        self.refused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._fused_sgd_.default:
            return None  # as on fake tensors (cpu_results.py)
        if func in FILLS:
            return args[0]
        kwargs = kwargs or {}
        is_nowhere = bool(self.nowhere) and any(map(self._is_nowhere, args))
        if (asked := kwargs.get("device")) is not None:
            # A device `meta` is that of another tensor, unless the step makes no data.
            is_nowhere = asked.type == "meta" and (is_nowhere or makes_no_data())
            kwargs = kwargs | {"device": META}
        if func is aten.lift_fresh.default:
            return torch.empty_like(args[0], device=META)
        if _is_in_place(func):
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs)
        if is_nowhere:
            self._note(result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        circumstances = torch.get_default_dtype(), torch._C._get_mkldnn_enabled()
        key = (func, circumstances, _spell(args), _spell(tuple(kwargs.items())))
        if (result := _RESULTS.get(key)) is None:
            if func not in PLAIN:
                self.refused = True  # the step may catch the error
                raise UnsuitedError(f"{func} may be another operator on a CPU")
            if len(_RESULTS) >= MOST:
                _RESULTS.clear()
            result = _RESULTS[key] = _ask(func, args, kwargs)
        return func(*args, **kwargs) if result is VIEWED else _make(result)

    def _is_nowhere(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.untyped_storage()._cdata in self.nowhere
        return isinstance(value, (list, tuple)) and any(map(self._is_nowhere, value))

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            self.nowhere[storage._cdata] = weakref.KeyedRef(storage, self._forget, storage._cdata)
        elif isinstance(value, (list, tuple)):
            for each in value:
                self._note(each)

    def _forget(self, gone: "weakref.KeyedRef[int, Any]") -> None:
        self.nowhere.pop(gone.key, None)


def _is_in_place(func: Any) -> bool:
    """Return whether an operator changes or views an argument."""
    known = _IN_PLACE.get(func)
    if known is None:
        known = _IN_PLACE[func] = any(each.alias_info is not None for each in func._schema.arguments)
    return known


def _spell(value: Any) -> Any:
    """Return an argument as a part of a key: equal for tensors of the same sizes, strides and types."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.device.type
    if isinstance(value, (list, tuple)):  # a union of types takes longer
        return tuple([_spell(each) for each in value])
    return type(value), value


def _ask(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on fake tensors of a CPU, and return what it returns as sizes, strides and types."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    given: list[Tensor] = []

    def fake(value: Any) -> Any:
        if isinstance(value, Tensor):
            size, offset = value.untyped_storage().nbytes() // value.element_size(), value.storage_offset()
            given.append(torch.empty(size, dtype=value.dtype).as_strided(value.shape, value.stride(), offset))
            return given[-1]
        if isinstance(value, (list, tuple)):
            return type(value)(map(fake, value))
        return torch.device("cpu") if isinstance(value, torch.device) else value

    with _disable_current_modes(), FakeTensorMode(allow_fallback_kernels=False), AsOnTheCPU():
        result = func(*fake(args), **{name: fake(value) for name, value in kwargs.items()})
        made = [
            each for each in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(each, Tensor)
        ]
        theirs, ours = [[each.untyped_storage()._cdata for each in tensors] for tensors in (given, made)]
        shares_storage = len({*ours}) < len(ours) or not {*ours}.isdisjoint(theirs)
        return VIEWED if shares_storage else _describe(result)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), [_describe(each) for each in value]
    return None, value


def _make(described: Any) -> Any:
    kind, *parts = described
    if kind is Tensor:
        return torch.empty_strided(parts[0], parts[1], dtype=parts[2], device=META)
    return parts[0] if kind is None else kind(map(_make, parts[0]))
