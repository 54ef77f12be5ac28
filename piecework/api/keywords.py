"""Settings as Python writes them: keywords, tables as mappings, values of Python's own types."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from piecework.training.settings import Scalar, SettingsError

Values = Mapping[str, Any]
SHORT = {"rounds": "num-rounds", "nodes": "clients"}  # as the command line's options
# Options of which errors speak that the command line and Python share; Python's keyword has the same words.
OPTION = re.compile(
    r"--(input-shape|classes|precision|budget|dataset|superlink|root-certificates|insecure|ray-address|preset|nodes|rounds)\b"
)


@contextmanager
def speak_of_keywords() -> Iterator[None]:
    """Have errors name keywords, `input_shape`, where they name the command line's options, `--input-shape`."""
    try:
        yield
    except ValueError as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (OPTION.sub(lambda found: found[1].replace("-", "_"), error.args[0]),)
        raise


def read_keywords(settings: Values | None, keywords: Values) -> dict[str, Scalar]:
    """Return settings by key, from a mapping and from keywords.

    `num_rounds=5` is `num-rounds`, and `training={"batch_size": 8}` is `training.batch-size`; so is the key
    `"training.batch-size"` of a mapping. A list or a tuple is joined by commas, and a path is text. A module (`model=net`) is
    given a name that this process knows. Raises SettingsError for a value of another type, or one that is given twice.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise SettingsError(f"{settings!r:.100}: settings are keywords, or a mapping from their keys")
    found: dict[str, Scalar] = {}
    for key, value in [*flatten(settings or {}), *flatten(keywords)]:
        read = read_value(key, value)
        if key in found and (type(found[key]), found[key]) != (type(read), read):
            raise SettingsError(f"{key} = {found[key]!r} contradicts {key} = {read!r}: give one of them")
        found[key] = read
    return found


def flatten(values: Values, table: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its key, table before name."""
    for name, value in values.items():
        key = f"{table}{str(name).replace('_', '-')}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{key}.")
        else:
            yield SHORT.get(key, key), value


def read_value(key: str, value: Any) -> Scalar:
    """Return the value of a setting. Raises SettingsError for one of another type."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(each, bool | int | float | str) for each in value):
        return ",".join(map(str, value))
    if key == "model" and (named := _name_module(value)):
        return named
    if key == "model":
        raise SettingsError(f"model = {value!r:.100}: expected a name or an nn.Module, not its class or a function")
    raise SettingsError(
        f"{key} = {value!r:.100}: {type(value).__name__} is no type of a setting; expected text, a number, True or False, a "
        "list of these, or a mapping of a table's settings"
    )


def _name_module(value: Any) -> str:
    """Return the name of a module, or nothing for a value of another type."""
    from torch import nn

    from piecework.models.imported.objects import name_object

    return name_object(value) if isinstance(value, nn.Module) else ""
