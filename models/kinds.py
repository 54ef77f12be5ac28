"""Values of a method's own within what all methods share: typed in code, and flat in messages and files.

Messages come from others: a name in one only ever leads to a kind that this process has registered.
"""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Generic, TypeVar, cast

from pydantic import TypeAdapter

Base = TypeVar("Base")
Kind = TypeVar("Kind")


class Kinds(Generic[Base]):
    """The kinds of values that `holder` has besides its shared fields, `names`. A kind is found by the names of its fields."""

    def __init__(self, holder: str, names: Collection[str]) -> None:
        self.holder, self.names = holder, frozenset(names)
        self._by_field: dict[str, type[Base]] = {}

    def register(self, kind: type[Kind]) -> type[Kind]:
        """Make a kind known, a frozen dataclass.

        Raises ValueError if another one has a field of the same name, or if every field has a default.
        """
        own: Any = kind
        if all(field.default is not MISSING or field.default_factory is not MISSING for field in fields(own)):
            raise ValueError(
                f"{own.__qualname__}: values with their defaults are not sent, so give at least one field no default"
            )
        for name in (field.name for field in fields(own)):
            other = self._by_field.get(name, own)
            if name in self.names or (other.__module__, other.__qualname__) != (own.__module__, own.__qualname__):
                raise ValueError(
                    f"{own.__qualname__}.{name}: {self.holder} has this name already, so choose another one"
                )
            self._by_field[name] = own
        return kind

    def read(self, values: object) -> tuple[dict[str, Any], tuple[Base, ...]]:
        """Return the shared fields among `values`, unchecked, and the methods' values, checked and in order.

        Raises TypeError for an unknown name, ValueError for a bad value.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"{self.holder} is {values!r:.100}: expected names and values")
        if unknown := sorted(set(values) - self.names - self._by_field.keys()):
            raise TypeError(f"{self.holder} has no {', '.join(unknown)}")
        found: dict[type[Base], dict[str, Any]] = {}
        for name in (name for name in values if name not in self.names):
            found.setdefault(self._by_field[name], {})[name] = values[name]
        shared = {name: values[name] for name in values if name in self.names}
        return shared, tuple(_adapter(cast(Any, kind)).validate_python(own) for kind, own in found.items())


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def flat(value: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return a dataclass's fields, or those of these names, that differ from their defaults, as JSON values."""
    found = ((field, getattr(value, field.name)) for field in fields(value) if names is None or field.name in names)
    return {field.name: plain(own) for field, own in found if own != field.default}


def plain(value: Any) -> Any:
    """Return tuples as lists, as in JSON."""
    return [plain(each) for each in value] if isinstance(value, tuple) else value
