"""Assignments: everything that is decided for one client in one round, by one pure function of a method.

Plans, the coverage check and the server ask a method for assignments, so that they cannot disagree. What can be derived from an
assignment is derived here, or by the server: the costs that a task lists, and the parts of a plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord

from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState
from piecework.models.cascade import unit_of
from piecework.models.partition import AtomTooLargeError
from piecework.models.variant import Variant
from piecework.models.width import Indices, take
from piecework.models.work_item import WorkItem
from piecework.planning.cut import Cut, label
from piecework.planning.page_plan import speed_of
from piecework.planning.part import Part
from piecework.training.evaluation_step import EvaluationStep

ArrayFilter = Callable[[ArrayRecord], ArrayRecord]  # arrays of the server's model -> arrays of a message


@dataclass(frozen=True)
class Context:
    """What an assignment depends on besides the method's cut and state.

    A plan has no `arrays` of a model, so that nothing is drawn from weights.
    """

    device: DeviceState
    slowest: float = inf  # the smallest FLOP/s among the round's devices
    stage: Any = 0  # what is trained now, as the method's `Stage.key` names it
    round: int = 1
    client: int = 0
    place: int = 0  # of the client among those that the round asks, from 0
    clients: int = 0  # in the federation
    measures_itself: bool = False  # whether the device measures its memory, and may have less than the server assumes
    measured: bool = False  # whether any device of the federation does
    arrays: ArrayRecord | None = None  # of the server's model


def everything(arrays: ArrayRecord) -> ArrayRecord:
    """Return all arrays of the model."""
    return arrays


@dataclass(frozen=True)
class OfUnits:
    """Selects the arrays of some units."""

    units: frozenset[str]

    def __call__(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of the units, not copied."""
        return ArrayRecord({name: array for name, array in arrays.items() if unit_of(name) in self.units})


@dataclass(frozen=True)
class OfEntries:
    """Selects the entries of the model's arrays at `indices`, by name, which are found for each message."""

    indices: Callable[[], Mapping[str, Indices]]

    def __call__(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the entries, copied."""
        indices = self.indices().items()
        return ArrayRecord({name: Array(take(arrays[name].numpy(), where)) for name, where in indices})


def nothing(arrays: ArrayRecord) -> ArrayRecord:
    """Return no arrays."""
    return ArrayRecord()


@dataclass(frozen=True)
class Assignment:
    """Everything that is decided for one client in one round. Without `items`, the client can do nothing (`refusal`)."""

    items: tuple[WorkItem, ...]  # the work, in order
    needed: Mapping[
        WorkItem, int
    ]  # the bytes that each item needs at least; also of less work, for a device with less memory
    sends: ArrayFilter = everything
    variant: Variant | None = None  # the network that the client builds; None = the server's
    expects: ArrayFilter | None = None  # what an update is compared with; by default what was sent
    frozen: tuple[str, ...] = ()  # units that the client only reads; they are sent once, ahead of the task
    adversarial: bool | None = (
        None  # whether to train on adversarial examples; None = as the settings say for the round
    )
    config: Any = None  # the method's own dataclass, which travels with the task
    memo: Any = None  # stays on the server
    discarded_rounds: list[list[int]] = field(default_factory=list)  # pairs of the first and the last of undone rounds
    kept_round: int = 0  # the server may go back to this round
    steps: list[EvaluationStep] = field(default_factory=list)  # ways to evaluate, preferred first
    lr: float | None = None  # the learning rate; None = that of the round
    covers: tuple[str, ...] | None = (
        None  # the units that such clients train over all rounds; None = those of the items
    )
    least: Callable[[], int] | None = (
        None  # the bytes below which the client can do nothing; by default the least `needed`
    )
    refusal: MemoryBudgetExceededError | AtomTooLargeError | None = None


def least_bytes(assignment: Assignment) -> int:
    """Return the bytes below which a client can do nothing of its assignment."""
    return assignment.least() if assignment.least is not None else min(assignment.needed.values(), default=0)


class Planner(Protocol):
    """A method as plans and coverage see it."""

    @property
    def cut(self) -> Cut:
        """The model, as the method cuts it for one fleet, and its costs."""

    def parts(self, stage: int, state: DeviceState, slowest: float, round: int = 1, client: int = 0) -> list[Part]:
        """Return the parts that a device trains in a round of a stage, one after another.

        `slowest` is the smallest FLOP/s among the round's devices. What is drawn is drawn for this round and client. Raises
        MemoryBudgetExceededError or AtomTooLargeError if the device can train nothing.
        """


def fitting_parts(cut: Cut, assignment: Assignment, device: DeviceState) -> list[Part]:
    """Return the parts of an assignment, each with the step that fits the device.

    Raises MemoryBudgetExceededError or AtomTooLargeError if the device can do nothing of it.
    """
    if assignment.refusal is not None:
        raise assignment.refusal
    allowed = device.allowed_bytes
    for item in assignment.items:
        if (needed := assignment.needed.get(item, 0)) > allowed and not cut.swaps:
            raise MemoryBudgetExceededError(needed, device.budget_bytes, f"training {label(cut.part(item))}")
    parts = [cut.fitting_part(item, allowed, speed_of(device)) for item in assignment.items]
    return parts if assignment.covers is None else [replace(part, covers=assignment.covers) for part in parts]
