"""What functions and classes of the user's keep for later calls: passes without values leave none of theirs there.

A mask that `functools.lru_cache` keeps, or that code puts in a dict of its file, would be without values, or recorded, in
the user's own passes; and one of these would be a constant of the recorded ones.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from piecework.models.imported.containers import Contents, contents_of, restore
from piecework.models.imported.facts import is_installed, is_written

PLAIN = (dict, list, set)


@dataclass
class Caches:
    """Functions that keep their results (`functions`), and containers that code may keep some in."""

    functions: list[Any] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.functions or self.containers)


_CURRENT = ContextVar[Caches | None]("caches", default=None)
_PASSES = ContextVar[tuple[Contents, ...]]("passes", default=())


def find_caches(owners: Iterable[Any]) -> Caches:
    """Return what classes and functions of the user's keep, and what they reach in files of the user's."""
    found, pending, seen = Caches(), [*owners], set[int]()
    while pending:
        owner = pending.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        held, more = _reached(owner)
        pending += more
        found.functions += [each for each in held if _is_cached(each)]
        found.containers += [each for each in held if type(each) in PLAIN]
        pending += [each for each in held if isinstance(each, ModuleType | FunctionType | type) or _is_cached(each)]
    return found


def _is_cached(value: Any) -> bool:
    """Return whether a value is a function of the user's whose results `functools.lru_cache` keeps."""
    cached = type(value).__name__ == "_lru_cache_wrapper"
    return cached and not is_installed(str(getattr(value.__wrapped__, "__module__", "")))


def _reached(owner: Any) -> tuple[list[Any], list[Any]]:
    """Return what a class, a function or a module of the user's names, and where what it reads is named."""
    if isinstance(owner, partial):
        return [], [owner.func]
    if _is_cached(owner):
        return [], [owner.__wrapped__]
    if isinstance(owner, FunctionType):
        module = str(owner.__globals__.get("__name__"))
        return ([], []) if is_installed(module) else (_named(owner.__globals__), [])
    if isinstance(owner, ModuleType):
        return ([], []) if is_installed(owner.__name__) else (_named(vars(owner)), [])
    if isinstance(owner, type) and is_written(owner):
        held = [getattr(each, "__func__", getattr(each, "fget", each)) for each in _named(vars(owner))]
        return held, [sys.modules.get(owner.__module__)]
    return [], []


def _named(scope: Any) -> list[Any]:
    return [value for name, value in [*scope.items()] if not (name.startswith("__") and type(value) in PLAIN)]


@contextmanager
def watching(caches: Caches) -> Iterator[None]:
    """Have the passes of a cut leave caches as they are."""
    token = _CURRENT.set(caches)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def apart(caches: Caches | None = None) -> Iterator[None]:
    """Run a pass that finds no results of others in caches, those that are watched by default, and leaves none of its own."""
    found = _CURRENT.get() if caches is None else caches
    if not found:
        yield
        return
    before = _begin(found)
    try:
        yield
    finally:
        _end(found, before)


def _begin(caches: Caches) -> Contents:
    for function in caches.functions:
        if function.cache_info().currsize:
            function.cache_clear()
    before = contents_of(caches.containers)
    for each in caches.containers:
        if isinstance(each, dict) and all(isinstance(value, Tensor) and value.dim() for value in each.values()):
            each.clear()  # tensors with values, which a pass without any could not take
    return before


def _end(caches: Caches, before: Contents) -> None:
    restore(before)
    for function in caches.functions:
        if function.cache_info().currsize:
            function.cache_clear()


def caches_of(module: nn.Module) -> Caches:
    """Return what the classes of a module's layers keep."""
    return find_caches({kind for layer in module.modules() for kind in type(layer).__mro__ if is_written(kind)})


def keep_caches(module: nn.Module) -> None:
    """Have passes of a part without values run apart, if it calls code of the user's that keeps something."""
    if caches_of(module):
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def _is_valueless(inputs: tuple[Any, ...]) -> bool:
    real = all(type(each) in (Tensor, nn.Parameter) and not each.is_meta for each in inputs if isinstance(each, Tensor))
    return is_in_torch_dispatch_mode() or not real


def _enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if _is_valueless(inputs):
        _PASSES.set((*_PASSES.get(), _begin(caches_of(module))))


def _leave(module: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
    if _is_valueless(inputs) and _PASSES.get():
        *before, last = _PASSES.get()
        _PASSES.set(tuple(before))
        _end(caches_of(module), last)
