"""How a training step fits into less memory than the plain one: the values that work items, parts and configs share."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar

from pydantic import FailFast

Segment = tuple[int, int]  # positions [first, last) in a piece's atoms
Segments = Annotated[tuple[Segment, ...], FailFast()]  # a message may be from anyone: the first bad value is an error
Holder = TypeVar("Holder", bound="Step")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step computes `micro_batch` > 0 examples of its batch at once, and adds up their gradients; 0 = its batch.

    Of the segments of atoms in `recompute` it keeps no activations: their forward pass runs again in the backward pass. With
    `cheap`, it computes norms and activations again instead of keeping their outputs. With `in_backward`, a parameter moves as
    soon as its gradient is complete, which is then freed. With `pages`, which are all atoms in order, only one segment is in
    memory at a time, the last one with the head; `spilled`: the inputs of segments are in files, not in memory; `ahead`: while
    one segment is computed the next one is read, so that two are in memory.
    """

    micro_batch: int = 0
    recompute: Segments = ()
    cheap: bool = False
    in_backward: bool = False
    pages: Segments = ()
    spilled: bool = False
    ahead: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this is the plain step."""
        return step_of(self) == Step()

    @property
    def step(self) -> str:
        """How a step fits, in words; empty for the plain step."""
        return ", ".join(_phrases(self))


def step_of(holder: Step) -> Step:
    """Return the step of a work item, a part or a training config by itself."""
    return Step(**step_fields(holder))


def step_fields(holder: Step) -> dict[str, Any]:
    """Return the fields of a step by name."""
    return {field.name: getattr(holder, field.name) for field in fields(Step)}


def with_step(holder: Holder, step: Step) -> Holder:
    """Return a work item, a part or a training config with the step of another."""
    return replace(holder, **step_fields(step))


def _phrases(step: Step) -> list[str]:
    count = sum(last - first for first, last in step.recompute)
    said = {
        f"micro-batches of {step.micro_batch}": step.micro_batch,
        "recomputes norms and activations": step.cheap,
        f"recomputes {count} atom{'s' if count > 1 else ''}": count,
        "steps in the backward pass": step.in_backward,
        f"pages through {len(step.pages)} segment{'s' if len(step.pages) > 1 else ''}": step.pages,
        "reads ahead": step.ahead,
        "with features in files": step.spilled,
    }
    return [phrase for phrase, holds in said.items() if holds]
