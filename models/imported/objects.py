"""Modules that were given as objects from Python, by the names under which this process knows them.

Such a module stays in its process and in the workers of the engine `local`, which get a copy. Its weights are the initial ones.
"""

import copy
import hashlib
import inspect
import pickle
import sys
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # lists of settings read names of models without loading torch
    from torch import Tensor, nn

OBJECT = "object"  # what stands before the colon of such a name
_MODULES: dict[str, "nn.Module"] = {}


def is_object(name: str) -> bool:
    """Return whether a name is of a module that was given from Python."""
    return name.startswith(f"{OBJECT}:")


def name_object(module: "nn.Module") -> str:
    """Return the name of a module, `object:CLASS-DIGEST`, under which models are found from now on.

    The digest is of the classes' code and the sizes, so a module of the same kind goes on with a run that another one began.
    """
    found = hashlib.sha256(repr(module).encode())
    for name, array in module.state_dict().items():
        found.update(f"{name} {tuple(array.shape)} {array.dtype}".encode())
    own = {
        kind for part in module.modules() for kind in type(part).__mro__ if kind.__module__.partition(".")[0] != "torch"
    }
    for kind in sorted(own, key=lambda kind: kind.__qualname__):
        found.update(_functions_of(kind))
    name = f"{OBJECT}:{type(module).__name__}-{found.hexdigest()[:12]}"
    _MODULES[name] = module
    return name


def code_of(kind: type) -> bytes:
    """Return what tells the code of a class from another: its file, or its functions' code where it has no file.

    It is empty for the classes of torch and Python.
    """
    if kind.__module__.partition(".")[0] in ("torch", "builtins"):
        return b""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(file).read_bytes() if file is not None and Path(file).is_file() else _functions_of(kind)


def _functions_of(kind: type) -> bytes:
    functions = [each.__code__ for each in vars(kind).values() if inspect.isfunction(each)]
    return b"".join(map(_bytes_of, functions))


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
