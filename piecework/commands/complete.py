"""What a shell completes after options: names of systems, models, data sets, presets and fleets, and keys of settings.

None of these lists loads torch: a shell asks at each press of the key.
"""

import ast
from collections.abc import Callable, Iterable
from pathlib import Path

from piecework.app_folder import PRESETS
from piecework.device_profiles import fleet_file
from piecework.device_profiles.plugins import list_plugins
from piecework.training.methods import METHODS
from piecework.training.settings.run import fields

ROOT = Path(__file__).resolve().parents[2]
Complete = Callable[[str], list[str]]


def strategies() -> list[str]:
    """Return the names of the systems."""
    return sorted({*METHODS, *list_plugins("methods")})


def models() -> list[str]:
    """Return the names of the models."""
    return sorted({*keys_of("models/zoo.py", "MODELS"), *list_plugins("models")})


def datasets() -> list[str]:
    """Return the names of the data sets; a user's own are a kind and a colon."""
    own = keys_of("federated_data/catalogue.py", "OWN")
    named = [key for key in keys_of("federated_data/catalogue.py", "DATASETS") if key not in own]
    return sorted({*named, *(f"{kind}:" for kind in own), *list_plugins("datasets")})


def presets() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def settings() -> list[str]:
    """Return the keys of the settings, each with `=`."""
    return [f"{key}=" for key in fields()]


def keys_of(file: str, table: str) -> list[str]:
    """Return the keys of a table that a file of Piecework writes out, without importing the file."""
    place = next(path for path in (ROOT / file, ROOT / "piecework" / file) if path.is_file())
    for node in ast.parse(place.read_text(encoding="utf-8")).body:
        targets = (
            [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        )
        if any(isinstance(name, ast.Name) and name.id == table for name in targets):
            assert isinstance(node, ast.AnnAssign | ast.Assign)
            assert isinstance(node.value, ast.Dict)
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError(f"{place} writes out no table {table}")


def matching(names: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    """Return the names that begin so."""
    return [name for name in names() if name.startswith(incomplete)]


def each_of(names: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    """Return what completes the last name of several, separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in matching(names, last) if name not in before.split(",")]


def assignment(incomplete: str) -> list[str]:
    """Return keys with `=`, and after it the names of what the setting names."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return matching(settings, incomplete)
    named = NAMED.get(key)
    return [f"{key}={each}" for each in each_of(named, value)] if named is not None else []


NAMED: dict[str, Callable[[], list[str]]] = {
    "strategy": strategies,
    "model": models,
    "dataset": datasets,
    "fleet": fleet_file.shipped_fleets,
}


def one_of(names: Callable[[], list[str]]) -> Complete:
    """Return what completes a name, as typer calls it."""

    def complete(incomplete: str) -> list[str]:
        return matching(names, incomplete)

    return complete


def several_strategies(incomplete: str) -> list[str]:
    """Return what completes names of systems, separated by commas."""
    return each_of(strategies, incomplete)
