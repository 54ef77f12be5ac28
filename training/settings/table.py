"""What a table of settings is made of: a frozen class, types with ranges, and the cases in which a run uses a setting."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Scalar = bool | int | float | str
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastTwo = Annotated[int, Field(ge=2)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

# A run uses a setting in a case if each key in it, with its table's name, has one of the values.
Case = Mapping[str, tuple[Scalar, ...]]


class Table(BaseModel):
    """A table of settings, with kebab-case keys. `used_by` names the strategies that read it; none = every strategy does."""

    used_by: ClassVar[tuple[str, ...]] = ()

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


def case(*strategies: str, **values: Scalar) -> tuple[Case, ...]:
    """Return the case of these strategies. A keyword is a key: `fedprophet__apa` stands for `fedprophet.apa`."""
    keys = {name.replace("__", ".").replace("_", "-"): (value,) for name, value in values.items()}
    return (({"strategy": strategies} if strategies else {}) | keys,)


def ratios(key: str, text: str) -> list[float]:
    """Return the fractions in a setting such as `1,0.5,0.25`, largest first. Raises ValueError."""
    try:
        found = sorted({float(ratio) for ratio in text.split(",")}, reverse=True)
    except ValueError:
        found = []
    if not found or not 0 < found[-1] <= found[0] <= 1:
        raise ValueError(f"{key} = {text!r}: give fractions above 0 and up to 1, as in 1,0.5,0.25")
    return found
