"""Load a model's initial weights from a file (`training.init-weights`), as in papers that start from ImageNet weights.

The file has our names, as a run's own `model.safetensors` does, or torchvision's; for a torch module from outside this project
it may have the module's own. Such a file is made once where the library is installed:

    import torchvision
    from safetensors.torch import save_file
    save_file(torchvision.models.vgg16_bn(weights="DEFAULT").state_dict(), "vgg16_bn.safetensors")

Pickles (.pt, .pth) are not read, because they can run any code. Only the server reads the file; clients get the arrays from it.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from piecework.device_profiles.dispatch import without_data
from piecework.models.cascade import Blueprint, isolate_rng, parameter_names
from piecework.models.imported.source import is_imported, own_name
from piecework.models.model_file import ModelFileError, require_sound
from piecework.models.torchvision_names import NAMED, torchvision_name_map

SHOWN = 6


def read_pretrained(path: Path, blueprint: Blueprint) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the arrays of a file that fit the model, by our names and in its dtypes, and the names of the excluded ones.

    A layer is taken as a whole: if its weight has another shape (another number of classes, the `cifar` stem), its bias is
    excluded too. float16, bfloat16 and float64 become float32. Raises ValueError if the file cannot be read, has values that
    are not finite, or has no array that fits.
    """
    held = _read(path)
    own = _empty_state(blueprint)
    theirs = _names_in(held, blueprint, own)
    misfits = {_layer(our) for our, their in theirs.items() if not _fits(held[their], own[our])}
    taken = {our: their for our, their in theirs.items() if _layer(our) not in misfits}
    if not taken:
        raise ValueError(
            f"training.init-weights = {path}: none of its {len(held)} arrays fits {blueprint.name}. It holds "
            f"{_some(held)}; the model has {_some(own)}, and takes these names{_other_names(blueprint)}"
        )
    for their in taken.values():
        if not held[their].isfinite().all():
            raise ValueError(f"training.init-weights = {path}: {their} has values that are not finite")
    arrays = {our: held[their].to(own[our].dtype, copy=True).numpy() for our, their in taken.items()}
    used = set(taken.values())
    return arrays, [name for name in held if name not in used]


def pretrained_units(path: Path, blueprint: Blueprint) -> set[str]:
    """Return the units all of whose parameters are in the file. Raises ValueError as `read_pretrained` does."""
    taken = read_pretrained(path, blueprint)[0].keys()
    return {unit for unit in blueprint.units() if taken >= {*parameter_names(blueprint, unit)}}


def account(path: Path, taken: Mapping[str, np.ndarray], excluded: list[str]) -> str:
    """Return one sentence for the run's log about what `read_pretrained` loaded."""
    sentence = f"took {len(taken)} of {len(taken) + len(excluded)} arrays from {path}"
    if not excluded:
        return sentence
    more = len(excluded) - SHOWN
    return f"{sentence}; excluded: {', '.join(excluded[:SHOWN])}" + (f" and {more} more" if more > 0 else "")


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"training.init-weights = {path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        require_sound(path)
        return held
    except ModelFileError as error:
        raise ValueError(f"training.init-weights = {error}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"training.init-weights = {path} cannot be read as safetensors: {error}. Pickles (.pt, .pth) are not read: "
            "load them where you trust them, and save the state dict by safetensors.torch.save_file"
        ) from None


def _empty_state(blueprint: Blueprint) -> dict[str, Tensor]:
    """Return names, shapes and dtypes of the whole model without allocating it."""
    with isolate_rng(0), without_data():
        return {
            f"{unit}.{name}": value
            for unit in blueprint.units()
            for name, value in blueprint.build_unit(unit).state_dict().items()
        }


def _names_in(held: Mapping[str, Tensor], blueprint: Blueprint, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Map our names to the file's, for the arrays that the file has, in the model's order."""
    norm = "bn" if "atoms.0.bn.weight" in own else "none"
    known = torchvision_name_map(blueprint.name, norm) if blueprint.name in NAMED else {}
    if is_imported(blueprint.zoo_name):
        known = {our: own_name(our) for our in own}
    pairs = ((our, our if our in held else known.get(our, "")) for our in own)
    return {our: their for our, their in pairs if their in held}


def _fits(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.shape == ours.shape and theirs.is_floating_point() == ours.is_floating_point()


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _some(arrays: Mapping[str, Tensor]) -> str:
    shown = [f"{name} {tuple(value.shape)}" for name, value in list(arrays.items())[:SHOWN]]
    return ", ".join(shown) + (", ..." if len(arrays) > SHOWN else "") if shown else "nothing"


def _other_names(blueprint: Blueprint) -> str:
    if is_imported(blueprint.zoo_name):
        return " or the module's own, without atoms.<i>. or head. before them"
    return " or torchvision's" if blueprint.name in NAMED else ", for torchvision has no such model"
