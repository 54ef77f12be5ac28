"""JSON and TOML that others wrote, and their values in error messages. This lowest package has it: all read such."""

import json
import tomllib
from collections.abc import Callable
from typing import Any

DEEPEST = 50  # tables or lists in each other; what Piecework writes has 6
SHOWN = 200  # characters of a value in an error message


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for one that is nested too deeply."""
    return _read(json.loads, text)


def read_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError, also for one that is nested too deeply."""
    return dict(_read(tomllib.loads, text))


def _read(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    too_deep = f"it is nested too deeply: at most {DEEPEST} tables or lists may stand in each other"
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if _depth(value) > DEEPEST:
        raise ValueError(too_deep)
    return value


def _depth(value: Any) -> int:
    """Return how many lists and tables stand in each other, without recursion."""
    layer, depth = [value], 0
    while layer := [each for each in layer if isinstance(each, dict | list)]:
        layer = [inner for each in layer for inner in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


def abbreviate(value: Any) -> str:
    """Return a value as Python writes it, for an error message: its beginning if it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # Python writes no whole numbers of more than 4,300 digits
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} .. ({len(text):,} characters)"
