"""Where a model outside this project is found, by the name that the setting `model` gives it.

MODULE:FUNCTION       a function of (num_classes, input_shape) that returns an nn.Module
FILE.py:FUNCTION      one in a file
torchvision:NAME      a classifier of torchvision.models
timm:NAME             a model of timm
object:NAME           a module that was given from Python (objects.py)
NAME                  what an installed package registers under this name (device_profiles/plugins.py)
"""

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecework.device_profiles.names import did_you_mean
from piecework.device_profiles.plugins import load_plugin, refuse_exit
from piecework.models.imported.objects import OBJECT, copy_object, is_known, is_object

if TYPE_CHECKING:  # lists of settings read names of models without loading torch
    from torch import nn

    from piecework.models.cascade import Shape

Make = Callable[..., "nn.Module"]
LIBRARIES = ("torchvision", "timm")


def is_imported(name: str) -> bool:
    """Return whether a name is of a model outside this project."""
    return ":" in name


def is_own(name: str) -> bool:
    """Return whether a name is of the user's own code, which other machines may not have."""
    return is_imported(name) and name.partition(":")[0] not in LIBRARIES


def own_name(name: str) -> str:
    """Return the module's own name of an array: what stands behind its unit."""
    unit, _, rest = name.partition(".")
    return rest.partition(".")[2] if unit == "atoms" else rest


@lru_cache(maxsize=64)
def find_make(name: str) -> Make:
    """Return the function that makes a model, of (num_classes, input_shape). Raises ValueError, which says what is missing."""
    if not is_imported(name):
        registered: Make = load_plugin("models", name)
        return registered
    place, _, function = name.rpartition(":")
    if place in LIBRARIES:
        return partial(_of_library, place, function)
    if place == OBJECT:
        return partial(copy_object, name)
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, name)
    make = getattr(module, function, None)
    if not callable(make):
        functions = inspect.getmembers(module, inspect.isfunction)
        known = [key for key, value in functions if value.__module__ == module.__name__]
        raise ValueError(
            f"model = {name!r}: there is no function {function!r} in {place}{did_you_mean(function, known)}"
        )
    found: Make = make
    return found


def _load_module(place: str, name: str) -> Any:
    try:
        with refuse_exit():
            return import_module(place)
    except ImportError as error:
        raise ValueError(
            f"model = {name!r}: {place!r} cannot be imported ({error}): expected MODULE:FUNCTION, FILE.py:FUNCTION, "
            "torchvision:NAME or timm:NAME"
        ) from error
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"model = {name!r}: {place!r} cannot be imported: {type(error).__name__}: {error}") from error


def _module_name(path: Path) -> str:
    return f"piecework_model_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"


def is_loaded(name: str) -> bool:
    """Return whether the user's code that a name is of has been imported already."""
    place = name.rpartition(":")[0]
    if is_object(name):
        return is_known(name)
    return (_module_name(Path(place)) if place.endswith(".py") else place) in sys.modules


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"model: there is no file {str(path)!r} (looked for from {Path.cwd()})")
    known = _module_name(path)
    if known not in sys.modules:
        spec = spec_from_file_location(known, path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[known] = module
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)  # last, so that a file there hides no package; it may import those beside it
        try:
            _require_files_beside(path.resolve())
            with refuse_exit():
                spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[known]
            if not isinstance(error, Exception):
                raise
            raise ValueError(f"model: {str(path)!r} cannot be imported: {type(error).__name__}: {error}") from error
    return sys.modules[known]


def _require_files_beside(path: Path) -> None:
    """Raise ImportError if a file, or one beside it that it leads to, imports a name beside it that Python finds elsewhere."""
    reached = [path]
    for file in reached:  # which grows: those beside it may import others there
        for name in _imported(file):
            package, module = path.parent / name, path.parent / f"{name}.py"
            own = [each for each in (package / "__init__.py", module) if each.is_file()]
            found = find_spec(name) if own or package.is_dir() else None
            if found is None:
                continue
            place = Path(found.origin or next(iter(found.submodule_search_locations or ()), ""))
            # A folder without __init__.py counts as a module only where Python finds nothing else: it may hold anything.
            beside = own or [package] * (not found.origin and any(package.rglob("*.py")))
            same = [each for each in beside if place.exists() and each.samefile(place)]
            if beside and not same:
                raise ImportError(
                    f"{file.name} imports {name!r}, which is {found.origin or place} here, not {beside[0]}: rename the latter"
                )
            reached += [each for each in same if each.is_file() and each not in reached]


def _imported(file: Path) -> list[str]:
    """Return the first part of each name that a file imports, without relative imports."""
    nodes = list(ast.walk(ast.parse(file.read_bytes(), file)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _of_library(library: str, name: str, num_classes: int, input_shape: "Shape") -> "nn.Module":
    try:
        package = import_module("torchvision.models" if library == "torchvision" else library)
    except ImportError as error:
        raise ValueError(f"model = '{library}:{name}': {library} is not installed: {error}") from error
    known = package.list_models()
    if name not in known:
        raise ValueError(f"model = '{library}:{name}': {library} has no such model{did_you_mean(name, known)}")
    options: dict[str, Any] = {"num_classes": num_classes}
    if library == "timm":
        options |= {"in_chans": input_shape[0]}
        make = package.create_model
    else:
        make = package.get_model
        options |= {"weights": None}
    if name.startswith("vit_"):
        options |= {"img_size" if library == "timm" else "image_size": input_shape[1]}
    made: nn.Module = make(name, **options)
    return made
