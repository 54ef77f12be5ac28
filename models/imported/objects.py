"""Modules that were given as objects from Python, by the names under which this process knows them.

Such a module stays in its process and in the workers of the engine `local`, which get a copy. Its weights are the initial ones.
"""

import copy
import hashlib
import inspect
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # lists of settings read names of models without loading torch
    from torch import Tensor, nn

HELD = ("_parameters", "_buffers", "_modules", "training")  # of a module, which are looked at by themselves
OBJECT = "object"  # what stands before the colon of such a name
_MODULES: dict[str, "nn.Module"] = {}


def is_object(name: str) -> bool:
    """Return whether a name is of a module that was given from Python."""
    return name.startswith(f"{OBJECT}:")


def name_object(module: "nn.Module") -> str:
    """Return the name of a module, `object:CLASS-DIGEST`, under which models are found from now on.

    The digest is of all that decides how it computes (code, sizes, plain attributes, hooks, what is frozen), but not of its
    weights, so a module of the same kind goes on with a run that another one began. Raises ValueError for a module that cannot
    be trained.
    """
    require_trainable(module, type(module).__name__)
    found = hashlib.sha256(repr(module).encode())
    for name, array in module.state_dict(keep_vars=True).items():
        found.update(f"{name} {tuple(array.shape)} {array.requires_grad}".encode())
    for path, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            if key not in HELD:
                # hooks are found by numbers that the process counts
                plain = list(value.values()) if isinstance(value, Mapping) and key.endswith("_hooks") else value
                found.update(f"{path}.{key}".encode() + _facts(plain))
    own = {kind for part in module.modules() for kind in type(part).__mro__ if _is_own(kind)}
    for kind in sorted(own, key=lambda kind: kind.__qualname__):
        found.update(_functions_of(kind))
    name = f"{OBJECT}:{type(module).__name__}-{found.hexdigest()[:12]}"
    _MODULES[name] = module
    return name


def require_trainable(module: "nn.Module", name: str) -> None:
    """Raise ValueError, which names the first array, for a module that devices cannot train."""
    from torch.nn.parameter import is_lazy

    if type(module).__name__ == "OptimizedModule":
        raise ValueError(f"model = {name!r} is compiled, and a part of it would not be: give the module itself")
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(
            f"model = {name!r} has hooks on the whole module, which its parts would not run: put them on layers"
        )
    for path, array in module.named_parameters():
        if is_lazy(array):
            raise ValueError(f"model = {name!r}: {path} has no shape yet: pass an example through the module before")
        if str(array.dtype) != "torch.float32":
            raise ValueError(f"model = {name!r}: {path} is {array.dtype}: parameters are float32 (module.float())")
    if not any(array.requires_grad for array in module.parameters()):
        raise ValueError(f"model = {name!r} has no parameter to train: set requires_grad of one that is to be trained")


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins")


def code_of(kind: type) -> bytes:
    """Return what tells the code of a class from another: its file, or its functions' code where it has no file.

    It is empty for the classes of torch and Python.
    """
    if not _is_own(kind):
        return b""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(file).read_bytes() if file is not None and Path(file).is_file() else _functions_of(kind)


def may_view(part: "nn.Module") -> bool:
    """Return whether a part calls a module of the user's, not recorded, in whose code `view` occurs."""
    kinds = {kind for module in part.modules() for kind in type(module).__mro__}
    return any(b"view" in code_of(kind) for kind in kinds if kind.__module__.partition(".")[0] != "piecework")


def _functions_of(kind: type) -> bytes:
    return b"".join(_facts(each) for each in vars(kind).values() if inspect.isfunction(each))


def _facts(value: object) -> bytes:
    """Return what tells a value from another: all of a plain one and of a function, else its type."""
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value).encode()
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(_facts, value)) + b"]"
    if isinstance(value, Mapping):
        return b"{" + b",".join(_facts(key) + b":" + _facts(each) for key, each in value.items()) + b"}"
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return _bytes_of(value.__code__) + _facts(value.__defaults__) + b"".join(map(_facts, cells))
    return f"{type(value).__module__}.{type(value).__qualname__}".encode()


def _bytes_of(code: CodeType) -> bytes:
    constants = [_bytes_of(each) if isinstance(each, CodeType) else repr(each).encode() for each in code.co_consts]
    return b"".join([code.co_code, *constants, *(name.encode() for name in code.co_names)])


def is_known(name: str) -> bool:
    """Return whether this process has the module of a name."""
    return name in _MODULES


def copy_object(name: str, num_classes: int, input_shape: object) -> "nn.Module":
    """Return a copy of a module: of its values, or on torch.device("meta") without any. Raises ValueError if it is unknown."""
    if name not in _MODULES:
        raise ValueError(
            f"model = {name!r} was a module of a Python process, and this one does not have it: give it again, as in "
            "piecework.run(model=net)"
        )
    import torch

    module = _MODULES[name]
    if torch.get_default_device().type != "meta":
        return copy.deepcopy(module).cpu()
    arrays = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(array): _without_values(array) for array in arrays})


def _without_values(array: "Tensor") -> "Tensor":
    import torch
    from torch import nn

    empty = torch.empty_like(array, device="meta")
    return nn.Parameter(empty, array.requires_grad) if isinstance(array, nn.Parameter) else empty


def dump_object(name: str) -> bytes:
    """Return a module for a worker process. cloudpickle adds what a notebook defines, which pickle cannot."""
    import cloudpickle

    dumped: bytes = cloudpickle.dumps(copy_object(name, 0, ()))
    return dumped


def take_object(name: str, dumped: bytes) -> None:
    """Know a module that the parent process has dumped."""
    _MODULES[name] = pickle.loads(dumped)  # noqa: S301 (written by the parent process, never from a network)
