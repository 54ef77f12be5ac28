"""What tells one value, function or class of the user's from another, as bytes that are the same in every process.

Addresses, the order of sets and the values of weights are left out, for they differ between processes that make the same.
"""

import dis
import inspect
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

INSTALLED = {"site-packages", "dist-packages"}
SELDOM = ("_thread", "logging", "threading", "weakref", "_io")  # modules whose objects say nothing of what is computed
# What Python notes of a class, which says where it stands and not what it does.
NOTES = {
    "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__", "__static_attributes__",
    "__abstractmethods__", "_abc_impl", "__slotnames__", "__dataclass_fields__", "__dataclass_params__", "__qualname__",
    "__annotate__", "__annotate_func__", "__annotations_cache__", "__parameters__", "__orig_bases__",
}  # fmt: skip
WRITTEN = {  # types whose repr is all that they are
    *("builtins.complex", "builtins.range", "builtins.slice", "builtins.ellipsis", "torch.dtype", "torch.device"),
    *("torch.layout", "torch.memory_format", "re.Pattern", "decimal.Decimal", "fractions.Fraction"),
}
# What callable objects are made of: partial functions, methods, and functions whose results are kept.
PARTS = ("func", "args", "keywords"), ("__func__", "__self__"), ("__wrapped__",)
# The number of each value that was met, and the value, so that no other has its id meanwhile.
Seen = dict[int, tuple[int, object]]


def is_own(kind: type) -> bool:
    """Return whether a class is neither torch's nor Python's."""
    return kind.__module__.partition(".")[0] not in ("torch", "builtins")


def facts(value: object, seen: Seen | None = None) -> bytes:
    """Return what tells a value from another.

    Of a function that is its code, what it holds and the globals that it reads; of an object, its attributes.
    """
    seen = {} if seen is None else seen
    if (plain := _of_plain(value, seen)) is not None:
        return plain
    if id(value) in seen:
        return f"#{seen[id(value)][0]}".encode()
    seen[id(value)] = len(seen), value
    if isinstance(value, CodeType):
        return _of_code(value, seen)
    if isinstance(value, list | Mapping):
        return _listed(value, seen) if isinstance(value, list) else _mapped(value, seen)
    return _of_callable(value, seen) if callable(value) else _of_object(value, seen)


def _of_plain(value: object, seen: Seen) -> bytes | None:
    """Return what tells a value from another that cannot change, and of which Python may make one or several; else None."""
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}={value.value!r}".encode()
    if isinstance(value, bool | int | float | str | bytes | None) or _name(type(value)) in WRITTEN:
        return repr(value).encode()
    if isinstance(value, tuple):
        return _listed(value, seen)
    if isinstance(value, set | frozenset):
        return b"{" + b",".join(sorted(facts(each, dict(seen)) for each in value)) + b"}"
    return None


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _listed(values: Any, seen: Seen) -> bytes:
    return b"[" + b",".join(facts(each, seen) for each in values) + b"]"


def _mapped(values: Mapping[Any, Any], seen: Seen) -> bytes:
    """Return what is in a mapping, unless it keeps tensors: that is what passes have left, and says nothing of the next."""
    if any(_is_tensor(each) for each in values.values()):
        return _name(type(values)).encode()
    return b"{" + b",".join(facts(key, seen) + b":" + facts(each, seen) for key, each in values.items()) + b"}"


def _of_callable(value: Any, seen: Seen) -> bytes:
    """Return what a function, or an object that is called, does."""
    if isinstance(value, FunctionType):
        return _of_function(value, seen)
    if isinstance(value, type):
        return _name(value).encode() + (_of_class(value, seen) if is_written(value) else b"")
    for parts in PARTS:
        if all(hasattr(value, part) for part in parts):
            return _name(type(value)).encode() + _listed([getattr(value, part) for part in parts], seen)
    return _of_builtin(value, seen) if inspect.isroutine(value) else _of_object(value, seen)


def _of_builtin(value: Any, seen: Seen) -> bytes:
    """Return the name of a function of C, and what it is bound to."""
    holder = getattr(value, "__self__", None)
    bound = b"" if holder is None or isinstance(holder, ModuleType | type) else facts(holder, seen)
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}".encode() + bound


def is_written(kind: type) -> bool:
    """Return whether a class is the user's own, and not of an installed package."""
    return is_own(kind) and not is_installed(kind.__module__)


def _of_function(function: FunctionType, seen: Seen) -> bytes:
    """Return what a function does. Of an installed one, that is its name and code: what it reads is installed too."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    own = _listed((function.__code__, function.__defaults__, function.__kwdefaults__, cells), seen)
    if is_installed(str(function.__globals__.get("__name__"))):
        return function.__qualname__.encode() + own
    names = sorted({*_global_names(function.__code__)} & function.__globals__.keys())
    return own + b"".join(f"{name}=".encode() + _of_global(function.__globals__[name], seen) for name in names)


def _of_global(value: object, seen: Seen) -> bytes:
    """Return what a global name stands for. A module stands for its name."""
    return value.__name__.encode() if isinstance(value, ModuleType) else facts(value, seen)


def _is_filled(cell: Any) -> bool:
    """Return whether a variable of a closure has a value already."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that code reads, and the code within it. Attributes may have the names of globals."""
    yield from (str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _global_names(each)


def _of_code(code: CodeType, seen: Seen) -> bytes:
    return b"".join([code.co_code, _listed(code.co_consts, seen), *(name.encode() for name in code.co_names)])


def _of_class(kind: type, seen: Seen) -> bytes:
    """Return what stands in a class of the user's own and in its bases."""
    stated = {
        key: value for key, value in vars(kind).items() if key not in NOTES and not inspect.isdatadescriptor(value)
    }
    stated |= {key: value for key, value in vars(kind).items() if isinstance(value, property)}
    found = [f"{key}=".encode() + _of_member(value, seen) for key, value in sorted(stated.items())]
    bases = [base for base in kind.__bases__ if is_written(base)]
    return b";".join(found) + b"".join(facts(base, seen) for base in bases)


def _of_member(value: Any, seen: Seen) -> bytes:
    """Return what a name in a class stands for, also where it is wrapped."""
    if isinstance(value, property):
        return b"property" + _listed((value.fget, value.fset, value.fdel), seen)
    if isinstance(value, staticmethod | classmethod):
        return type(value).__name__.encode() + facts(value.__func__, seen)
    return _of_global(value, seen)


def _of_object(value: Any, seen: Seen) -> bytes:
    """Return the attributes of an object and what its class does; of a tensor its values, of a weight its sizes alone."""
    kind = type(value)
    name = f"{_name(kind)} {getattr(value, '__name__', '')}".encode()
    if _is_tensor(value):
        return name + _of_tensor(value)
    if kind.__module__ == "torch._ops":
        return str(value).encode()
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes"):
        return name + f"{value.dtype}{value.shape}".encode() + bytes(value.tobytes())
    if kind.__module__.partition(".")[0] in SELDOM or isinstance(value, ModuleType):
        return name
    slots = [key for each in kind.__mro__ for key in _slots(each) if hasattr(value, key)]
    held = {key: getattr(value, key) for key in slots} | dict(getattr(value, "__dict__", {}))
    own = facts(kind, seen) if is_own(kind) else b""
    return name + own + b"".join(f"{key}:".encode() + of_attribute(key, each, seen) for key, each in held.items())


def of_attribute(name: str, value: object, seen: Seen) -> bytes:
    """Return what an attribute is, or its type if it is nested too deeply.

    Hooks of a module are found by numbers that the process counts.
    """
    try:
        return facts([*value.values()] if isinstance(value, Mapping) and name.endswith("_hooks") else value, seen)
    except RecursionError:
        return _name(type(value)).encode()


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [each for each in slots if not each.startswith("__")]


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _of_tensor(array: Any) -> bytes:
    """Return the sizes of a tensor, and its values unless they are learned or it has none."""
    sizes = f"{tuple(array.shape)} {array.dtype} {array.requires_grad}".encode()
    if array.requires_grad or array.is_meta or str(array.layout) != "torch.strided":
        return sizes
    return sizes + repr(array.detach().cpu().tolist()).encode()


def is_installed(module: str) -> bool:
    """Return whether a module is Python's, this project's, or of a package that is installed."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if top == "__main__":  # also of a tool that runs what the user wrote
        return False
    return top in ("piecework", *sys.stdlib_module_names) or bool(INSTALLED & {*PurePath(file).parts})
