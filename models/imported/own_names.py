"""State dicts under the names that a module of the user's own has.

In a run its arrays are `atoms.<i>.NAME` and `head.NAME`, where NAME is the module's own.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from piecework.models.imported.source import is_imported, own_name
from piecework.models.model_file import ModelFileError, description, find_file

SHOWN = 4  # names in a message


def fill_module(module: nn.Module, path: Path) -> nn.Module:
    """Give a module the trained weights of a run, from its folder or its model.safetensors, and return it for evaluation.

    Raises ModelFileError if the run's model was of this project, or has other arrays than the module, which keeps its weights.
    """
    if not isinstance(module, nn.Module):
        raise ModelFileError(f"into = {module!r:.100}: expected an nn.Module, to which the weights are given")
    file = find_file(path)
    described = description(file).get("model")
    name = described.get("name") if isinstance(described, dict) else None
    if not isinstance(name, str) or not is_imported(name):
        raise ModelFileError(
            f"{file} was trained with model {name!r}, whose arrays have names of this project: load it without `into`"
        )
    try:
        with safe_open(file, framework="pt") as arrays:
            trained = {own_name(each): arrays.get_tensor(each) for each in arrays.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    own = module.state_dict(keep_vars=True)
    shared = {name: next(n for n, each in own.items() if each is array) for name, array in own.items()}
    trained |= {name: trained[one] for name, one in shared.items() if name not in trained and one in trained}
    _require_same(
        f"{file} does not fit {type(module).__name__}",
        {name: tuple(array.shape) for name, array in trained.items()},
        {name: tuple(array.shape) for name, array in own.items()},
    )
    with torch.no_grad():
        module.load_state_dict(trained, strict=False)
    return module.eval()


def _require_same(what: str, found: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]]) -> None:
    """Raise ModelFileError for other names or shapes. Layers that a forward pass does not use are in no file."""
    used = {name.rpartition(".")[0] for name in found}
    if missing := {name for name in own.keys() - found.keys() if name.rpartition(".")[0] in used}:
        raise ModelFileError(f"{what}: the file has no {_some(missing)}")
    if more := found.keys() - own.keys():
        raise ModelFileError(f"{what}: the module has no {_some(more)}")
    for name, shape in found.items():
        if own[name] != shape:
            raise ModelFileError(f"{what}: {name} has shape {shape} in the file, and {own[name]} in the module")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:SHOWN]) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")
