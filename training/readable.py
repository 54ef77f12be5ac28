"""Read what a message says into typed values: the first thing that is wrong is told in one sentence."""

from collections.abc import Callable
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from pydantic import TypeAdapter, ValidationError

from piecework.device_profiles.documents import abbreviate, read_json

Read = TypeVar("Read")
# What reading a message may raise: nested JSON raises RecursionError, and a list of a trillion examples MemoryError.
UNUSABLE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError)


class MessageError(ValueError):
    """A message of the server cannot be used. The text says why in one sentence."""


def config_of(content: RecordDict, name: str) -> ConfigRecord:
    """Return a record of settings of a message. Raises MessageError if there is none."""
    if name not in content.config_records:
        raise MessageError(f"the message has no record {name!r} of values")
    return content.config_records[name]


def arrays_of(content: RecordDict) -> ArrayRecord:
    """Return the arrays of a message, in parcels. Raises MessageError if there are none."""
    if "arrays" not in content.array_records:
        raise MessageError("the message has no record 'arrays' of arrays")
    return content.array_records["arrays"]


def first_of(error: ValidationError) -> str:
    """Return the first complaint of pydantic as a sentence, with the value."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "the whole"
    if first["type"] in ("missing", "missing_argument"):
        return f"{name} is missing"
    complaint = first["msg"].replace("Input should be", "it must be").removeprefix("Value error, ")
    return f"{name!s:.100} is {abbreviate(first['input'])}: {complaint}"


def parse(name: str, text: object, read: Callable[[Any], Read]) -> Read:
    """Return what `read` makes of a field that is JSON. Raises MessageError, which names the field."""
    try:
        if not isinstance(text, str):
            raise TypeError(f"it is {abbreviate(text)}, and no text")
        return read(read_json(text))
    except ValidationError as error:
        raise MessageError(f"the task's {name} cannot be read: {first_of(error)}") from None
    except UNUSABLE as error:
        said = str(error) if isinstance(error, ValueError | TypeError) else f"{type(error).__name__} {error}"
        raise MessageError(f"the task's {name} cannot be read: {' '.join(said.split())[:300]}") from None


def checked(adapter: TypeAdapter[Read], values: object, what: str) -> Read:
    """Return values as the adapter's type. Raises MessageError with the first that is missing, unknown or out of range."""
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        raise MessageError(f"{what} cannot be used: {first_of(error)}") from None
