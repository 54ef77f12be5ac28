"""State dicts under the names that a module of the user's own has.

In a run its arrays are `atoms.<i>.NAME` and `head.NAME`, where NAME is the module's own.
"""

from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from piecework.device_profiles.documents import abbreviate
from piecework.models.imported.objects import is_object
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
    described = description(file)
    model = described.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str) or not is_imported(name):
        raise ModelFileError(
            f"{file} was trained with model {name!r}, whose arrays have names of this project: load it without `into`"
        )
    try:
        with safe_open(file, framework="pt") as arrays:
            names = [each for each in arrays.keys() if _is_served(each, described)]  # noqa: SIM118
            trained = dict[str, Tensor]()
            for each in names:
                array = arrays.get_tensor(each)
                if not torch.equal(trained.setdefault(own_name(each), array), array):
                    raise ModelFileError(
                        f"{file} has two different arrays of the name {own_name(each)!r}, one of which is {each}, and the "
                        f"module has one: load it without `into`"
                    )
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    own = module.state_dict(keep_vars=True)
    buffers = dict(module.named_buffers(remove_duplicate=False))  # the file has those that are not persistent, too
    names_of: dict[int, list[str]] = {}
    for each, array in (buffers | own).items():
        names_of.setdefault(id(array), []).append(each)
    for same in names_of.values():  # what layers share has one name in the file
        trained |= {other: trained[one] for one in same if one in trained for other in same}
    trained = {each: array for each, array in trained.items() if each in own or each not in buffers}
    _require_same(
        f"{file} does not fit {type(module).__name__}",
        {name: tuple(array.shape) for name, array in trained.items()},
        {name: tuple(array.shape) for name, array in own.items()},
        _explain(described, name),
        _unused(model),
    )
    with torch.no_grad():
        module.load_state_dict(trained, strict=False)
    return module.eval()


def _is_served(array: str, described: dict[str, Any]) -> bool:
    """Return whether the trained model predicts with an array: atoms and the head, and exits only where it has several."""
    variant = described.get("variant")
    exits = isinstance(variant, dict) and "exits" in variant
    return exits or array.startswith(("atoms.", f"{described.get('head')}."))


def _explain(described: dict[str, Any], name: str) -> str:
    """Return why a run's model is no longer the module that it was made from, and what to do; empty if it may still be that."""
    settings, variant, head = (described.get(key) for key in ("settings", "variant", "head"))
    strategy = settings.get("strategy") if isinstance(settings, dict) else None
    where = "in the process that trained it, by Run.load()" if is_object(name) else "by piecework.load(PATH)"
    changes = dict(variant) if isinstance(variant, dict) else {}
    changes |= {} if head == "head" else {"head": head, "atoms": described.get("atoms")}
    shown = ", ".join(f"{key} = {abbreviate(value)}" for key, value in changes.items())
    return (
        f". What {strategy} trained is another network than the module ({shown}): load it without `into`, {where}"
        if shown
        else ""
    )


def _unused(model: Any) -> set[str]:
    """Return the arrays that no forward pass uses, so that no file has them; empty for a file that does not say so."""
    names = model.get("unused") if isinstance(model, dict) else None
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _require_same(
    what: str, found: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]], why: str, unused: Set[str]
) -> None:
    """Raise ModelFileError for other names or shapes. `unused` arrays, and layers that no pass uses, keep their values.

    `why` is appended to its message.
    """
    used = {name.rpartition(".")[0] for name in found}
    absent = own.keys() - found.keys() - unused
    if missing := {name for name in absent if name.rpartition(".")[0] in used}:
        raise ModelFileError(f"{what}: the file has no {_some(missing)}{why}")
    if more := found.keys() - own.keys():
        raise ModelFileError(f"{what}: the module has no {_some(more)}{why}")
    for name, shape in found.items():
        if own[name] != shape:
            raise ModelFileError(f"{what}: {name} has shape {shape} in the file, and {own[name]} in the module{why}")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:SHOWN]) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")
