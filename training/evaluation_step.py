"""How a client may evaluate a model: the server lists such steps in a task, with the bytes that each takes."""

from dataclasses import astuple, dataclass
from typing import Annotated, Any

from pydantic import Field


@dataclass(frozen=True)
class EvaluationStep:
    """A way to evaluate a model: the peak bytes, how many examples of a batch are computed at once, and how the model is held.

    With 0 `examples` a whole batch is computed at once. `held` is a word of the strategy, for those that hold models in more
    than one way.
    """

    bytes: Annotated[int, Field(strict=True, ge=0)]
    examples: Annotated[int, Field(strict=True, ge=0)] = 0
    held: Annotated[str, Field(strict=True)] = ""

    def to_values(self) -> list[Any]:
        """Return the fields as JSON values."""
        return list(astuple(self))
