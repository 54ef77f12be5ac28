"""What a table of settings is made of: a frozen class, types with ranges, and the cases in which a run uses a setting."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from piecework.training.capabilities import Case, Scalar

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Whole numbers are bounded so that a product of some, with the sizes of a model, is still a number of 64 bits.
LARGEST = 2**31 - 1
Count = Annotated[int, Field(ge=0, le=LARGEST)]
AtLeastOne = Annotated[int, Field(ge=1, le=LARGEST)]
AtLeastTwo = Annotated[int, Field(ge=2, le=LARGEST)]
BatchSize = Annotated[int, Field(ge=2, le=2**20)]
Bytes = Annotated[int, Field(ge=0, le=2**56)]
PositiveBytes = Annotated[int, Field(ge=1, le=2**56)]
MOST_RATIOS = 100  # sub-models of a run: each is built and traced
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    """A table of settings, with kebab-case keys. `name` is that of a method's table; the shared ones are fields of Settings."""

    name: ClassVar[str] = ""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
    )


def setting(default: Scalar, meaning: str, only: tuple[Case, ...] = ()) -> Any:
    """Declare a setting. It is used in the cases `only`; without them, in every run of the strategies that read its table."""
    return Field(default, description=meaning, json_schema_extra={"only": only})  # type: ignore[dict-item]


def able(capability: str, **values: Scalar) -> tuple[Case, ...]:
    """Return the case of the strategies that have this capability, a field of Capabilities; keywords are as in `case`."""
    return tuple({"can": (capability,), **each} for each in case(**values))


def case(*strategies: str, **values: Scalar) -> tuple[Case, ...]:
    """Return the case of these strategies. A keyword is a key: `training__lr` stands for `training.lr`."""
    keys = {name.replace("__", ".").replace("_", "-"): (value,) for name, value in values.items()}
    return (({"strategy": strategies} if strategies else {}) | keys,)


def ratios(key: str, text: str) -> list[float]:
    """Return the fractions in a setting such as `1,0.5,0.25`, largest first. Raises ValueError."""
    try:
        found = sorted({float(ratio) for ratio in text.split(",")}, reverse=True)
    except ValueError:
        found = []
    if len(found) > MOST_RATIOS:
        raise ValueError(f"{key} has {len(found):,} fractions: give at most {MOST_RATIOS}")
    if not found or not 0 < found[-1] <= found[0] <= 1:
        raise ValueError(f"{key} = {text!r}: give fractions above 0 and up to 1, as in 1,0.5,0.25")
    return found


def flat(tables: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return nested tables as keys with dots."""
    found: dict[str, Scalar] = {}
    for key, value in tables.items():
        found |= {f"{key}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
    return found


def nest(values: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return keys with dots as tables."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        table, dot, name = key.rpartition(".")
        if dot:
            found.setdefault(table, {})[name] = value
        else:
            found[key] = value
    return found
