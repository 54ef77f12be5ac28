"""What dicts, lists, sets and plain objects of the user's hold, so that a pass that changes it is seen, and it is restored."""

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from piecework.models.imported.facts import is_written

LARGE = 10_000  # entries of a container that holds data rather than what passes keep
Contents = list[tuple[Any, Any]]  # containers, and copies that hold the same


def contents_of(values: Iterable[Any]) -> Contents:
    """Return the containers among values, and those in these, with what they hold now."""
    found, pending, seen = Contents(), list(values), set[int]()
    while pending:
        container = container_of(pending.pop())
        if container is None or id(container) in seen or len(container) > LARGE:
            continue
        seen.add(id(container))
        found.append((container, container.copy()))
        pending += container.values() if isinstance(container, dict) else container
    return found


def container_of(value: Any) -> Any:
    """Return what a value holds others in: itself, or the attributes of an object of the user's; None for other values."""
    if isinstance(value, dict | list | set):
        return value
    if isinstance(value, SimpleNamespace) or (
        is_written(type(value)) and not isinstance(value, Tensor | nn.Module | type)
    ):
        return getattr(value, "__dict__", None)
    return None


def restore(contents: Contents, chosen: Callable[[Any], bool] = lambda _: True) -> bool:
    """Give containers what they held. Returns whether one held something else, or another number, that is `chosen`."""
    changed = False
    for container, before in contents:
        if any(chosen(each) for each in _difference(container, before)):
            changed = True
            container.clear()
            container.extend(before) if isinstance(before, list) else container.update(before)
    return changed


def _difference(now: Any, before: Any) -> list[Any]:
    """Return what a container holds now and did not hold at the same place, or None for each entry that it lost."""
    if isinstance(now, set):
        return [*(now - before), *([None] * len(before - now))]
    pairs, own = (dict(_pairs(each)) for each in (now, before))
    new = [value for key, value in pairs.items() if key not in own or own[key] is not value]
    return new + [None] * len(own.keys() - pairs.keys())


def _pairs(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, Mapping) else enumerate(container)
