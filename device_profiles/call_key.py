"""A digest of a function and all its arguments, by which its result can be found again in another process.

Equal digests mean equal calls: every argument enters with its type and all its parts. Functions and classes enter by name, and
those made within a function (a loss with its weight, a piece class) by their place, their code and all that they hold. Code
that `known` does not cover, and values of other kinds, have no digest, because nothing would tell when they change.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

PLAIN = (type(None), bool, int, float, str, bytes)
OF_TORCH = (torch.dtype, torch.device, torch.memory_format, torch.layout)
# The parts of which a value consists, besides its type.
PARTS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (tuple | list, iter),
    (Mapping, lambda value: value.items()),
    (set | frozenset, lambda value: sorted(value, key=repr)),
    (Enum, lambda value: [value.name]),
    (partial, lambda value: [value.func, value.args, value.keywords]),
    (np.ndarray | np.generic, lambda value: [value.dtype.str, value.shape, sha256(_raw(value)).hexdigest()]),
    (MethodType, lambda value: [value.__self__, value.__func__]),
    (property, lambda value: [value.fget, value.fset, value.fdel]),
    (staticmethod | classmethod, lambda value: [value.__func__]),
)
# What a class has besides what its author wrote, or what does nothing.
UNSEEN = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__"),
    *("__static_attributes__", "__firstlineno__", "__annotate_func__", "__annotations_cache__"),
}


class NoKeyError(ValueError):
    """A call has no digest that is equal in other processes."""


def call_key(known: Callable[[str], bool], function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the digest of a call. `known` says whether code of a module is the same in each process that asks.

    Raises NoKeyError.
    """
    return sha256(_Speller(known).spell((function, args, kwargs)).encode()).hexdigest()


class _Speller:
    """Writes values as text. Functions and classes that refer to themselves are written once, then by number."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        self._known = known
        self._begun: dict[int, int] = {}

    def spell(self, value: Any) -> str:
        """Return a text that is equal for equal values of the same type, in any process. Raises NoKeyError."""
        if type(value) in PLAIN:
            return repr(value)
        if isinstance(value, OF_TORCH):
            return f"torch({value!r})"
        parts = _parts(value)
        if parts is None:
            return self._code(value)
        kind = type(value)
        name = kind.__name__ if kind.__module__ == "builtins" else self.spell(kind)
        return f"{name}({self._all(parts)})"

    def _all(self, values: Iterable[Any]) -> str:
        return ", ".join(map(self.spell, values))

    def _code(self, value: Any) -> str:
        """Return the text of a function or a class."""
        if not isinstance(value, type | FunctionType | BuiltinFunctionType):
            raise NoKeyError(f"{type(value).__name__} {value!r:.80} has no key")
        module, name = value.__module__ or "", value.__qualname__
        if not self._known(module):
            raise NoKeyError(f"{module}.{name} is code that may change unnoticed")
        if _at(module, name) is value:
            return f"{module}.{name}"
        if id(value) in self._begun:
            return f"again({self._begun[id(value)]})"
        self._begun[id(value)] = len(self._begun)
        return f"local({module!r}, {name!r}, {self._spell_made(value)})"

    def _spell_made(self, value: Any) -> str:
        """Return the text of a function or a class that is made within a function."""
        if isinstance(value, type):
            own = sorted((key, held) for key, held in vars(value).items() if key not in UNSEEN)
            return self._all((value.__bases__, type(value), own))
        if not isinstance(value, FunctionType):
            raise NoKeyError(f"{value!r:.80} is not found by its name")
        try:
            held = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:
            raise NoKeyError(f"{value.__qualname__} refers to a name without a value") from None
        return f"{_lines(value.__code__)}, {self._all((value.__defaults__, value.__kwdefaults__, held))}"


def _parts(value: Any) -> Iterable[Any] | None:
    """Return the parts of a value; None for a function, a class, and a value of which they are not known."""
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return next((parts(value) for kind, parts in PARTS if isinstance(value, kind)), None)


def _raw(value: Any) -> bytes:
    if value.dtype.hasobject:
        raise NoKeyError(f"an array of {value.dtype} has no key")
    return bytes(value.tobytes())


def _at(module: str, name: str) -> Any:
    """Return what a module has by a qualified name, or None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _lines(code: CodeType) -> str:
    """Return the text of a function's code: where it begins, and what it does, for two functions in one line."""
    constants = [_lines(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return repr((code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))
