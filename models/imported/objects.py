"""Modules that were given as objects from Python, by the names under which this process knows them.

Such a module stays in its process and in the workers of the engine `local`, which get a copy. Its weights are the initial ones.
"""

import copy
import hashlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from piecework.models.imported.facts import facts, is_own, of_attribute

if TYPE_CHECKING:  # lists of settings read names of models without loading torch
    from torch import Tensor, nn

HELD = ("_parameters", "_buffers", "_modules", "training")  # of a module, which are looked at by themselves
OBJECT = "object"  # what stands before the colon of such a name
FORGETTING: list[Callable[[], object]] = []  # what drops all that was kept by such names
_MODULES: dict[str, "nn.Module"] = {}


def is_object(name: str) -> bool:
    """Return whether a name is of a module that was given from Python."""
    return name.startswith(f"{OBJECT}:")


def name_object(module: "nn.Module") -> str:
    """Return the name of a module, `object:CLASS-DIGEST`, under which models are found from now on.

    The digest is of all that decides how it computes (code, sizes, attributes, hooks, what is frozen), but not of its weights,
    so a module of the same kind goes on with a run that another one began. Raises ValueError for a module that cannot
    be trained.
    """
    require_trainable(module, type(module).__name__)
    found, seen = hashlib.sha256(repr(module).encode()), dict[int, tuple[int, object]]()
    for name, array in module.state_dict(keep_vars=True).items():
        found.update(f"{name} {tuple(array.shape)} {array.requires_grad}".encode())
    for path, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            if key not in HELD:
                found.update(f"{path}.{key}".encode() + of_attribute(key, value, seen))
    for kind in (kind for part in module.modules() for kind in type(part).__mro__ if is_own(kind)):
        found.update(facts(kind, seen))
    name = f"{OBJECT}:{type(module).__name__}-{found.hexdigest()[:12]}"
    _know(name, module)
    return name


def _know(name: str, module: "nn.Module") -> None:
    """Have a name stand for a module. What is kept of another one that had the name may not be true of this one."""
    before = _MODULES.get(name, module)
    _MODULES[name] = module
    if before is not module:
        for forget in FORGETTING:
            forget()


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
        if array._backward_hooks or getattr(array, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"model = {name!r}: {path} has a hook, which the parameters that devices build would not have: change "
                "gradients in the forward pass, or by a hook on the layer (register_full_backward_hook)"
            )
    if not any(array.requires_grad for array in module.parameters()):
        raise ValueError(f"model = {name!r} has no parameter to train: set requires_grad of one that is to be trained")


def code_of(kind: type) -> bytes:
    """Return what tells the code of a class from another: its file, or what stands in it where it has no file.

    It is empty for the classes of torch and Python.
    """
    if not is_own(kind):
        return b""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(file).read_bytes() if file is not None and Path(file).is_file() else facts(kind)


def may_view(part: "nn.Module") -> bool:
    """Return whether a part calls a module of the user's, not recorded, in whose code `view` occurs."""
    kinds = {kind for module in part.modules() for kind in type(module).__mro__}
    return any(b"view" in code_of(kind) for kind in kinds if kind.__module__.partition(".")[0] != "piecework")


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
    """Return a module for a worker process. cloudpickle adds what a notebook defines, which pickle cannot.

    Raises ValueError for a module that cannot be written.
    """
    import cloudpickle

    module = copy_object(name, 0, ())
    try:
        dumped: bytes = cloudpickle.dumps(module)
    except Exception as error:  # whatever the classes of its layers raise, as those with parametrizations do
        reason = str(error).partition("\n")[0].removesuffix(".")
        raise ValueError(
            f"model = {name!r} cannot be sent to worker processes ({type(error).__name__}: {reason}): write a function of "
            "(num_classes, input_shape) that makes it, and give model = 'FILE.py:FUNCTION'"
        ) from error
    return dumped


def take_object(name: str, dumped: bytes) -> None:
    """Know a module that the parent process has dumped."""
    _know(name, pickle.loads(dumped))  # noqa: S301 (written by the parent process, never from a network)
