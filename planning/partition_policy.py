"""How a system cuts a model among devices: what it trains in which stage, which device can train it, what travels.

Each system's rule stands in its own file beside its strategy. Plans need no more than rules; nothing is trained by them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState, allowance
from piecework.models.cascade import Blueprint, has_statistics
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import AtomTooLargeError, Piece
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel
from piecework.planning.counts import entries
from piecework.planning.part import Part
from piecework.training.settings import Settings


@dataclass(frozen=True)
class Stage:
    """A time in which the same is trained everywhere: `parts` is what there is to train for a device."""

    name: str
    parts: tuple[Part, ...]


class PartitionPolicy(ABC):
    """How a system cuts one model for one fleet.

    `smallest` is the smallest budget (bytes) that a client will have, `allowed` what such a client may use.

    A policy does not change: `fit` and `with_smallest` make another one.

    `cuts`: the model is cut to fit a budget. `adapts`: the model is not cut, but narrowed or shortened.
    `when_excluded` says what becomes of a device that cannot train.
    `adversarial`: whether the system trains on adversarial examples; with `optional` the settings decide.
    `caveat` is what advice says of the system beside its figures.
    `untrained`: what becomes of a part of the model that no client trains. It keeps its initial weights, or the trained model
    ends before it, or the server trains it by distillation.
    """

    cuts: ClassVar[bool] = False
    adapts: ClassVar[bool] = False
    exits: ClassVar[bool] = False
    adversarial: ClassVar[Literal["never", "optional", "always"]] = "never"
    caveat: ClassVar[str] = ""
    moving: ClassVar[bool] = False  # whether sub-models have other channels, or are other nets, from round to round
    when_excluded: ClassVar[str] = "excluded"
    untrained: ClassVar[Literal["random", "cut off", "distilled"]] = "random"

    def __init__(self, blueprint: Blueprint, cost_model: CostModel, settings: Settings, smallest: int = 0) -> None:
        self.blueprint, self.cost_model, self.settings, self.smallest = blueprint, cost_model, settings, smallest
        self.allowed = allowance(smallest, settings.memory.excess)
        self._bytes: dict[WorkItem, int] = {}

    @classmethod
    def attacks(cls, settings: Settings) -> bool:
        """Whether a run with these settings trains on adversarial examples. Raises ValueError where it should and cannot."""
        if settings.training.adversarial and cls.adversarial == "never":
            raise ValueError(f"training.adversarial = true: {settings.strategy} trains on clean examples only")
        if (
            settings.training.adversarial
            and cls.adversarial == "optional"
            and settings.attack.warmup >= settings.num_rounds
        ):
            raise ValueError(
                f"attack.warmup = {settings.attack.warmup} leaves no adversarial round of num-rounds = {settings.num_rounds}"
            )
        return cls.adversarial == "always" or (cls.adversarial == "optional" and settings.training.adversarial)

    def require_model(self) -> None:  # noqa: B027 (most systems take every model)
        """Raises ValueError, which names layer and reason, for a model that the system cannot take."""

    @property
    def variant(self) -> Variant:
        """What the server's model is of the run's own."""
        return Variant()

    @cached_property
    def model(self) -> Blueprint:
        """The server's model. Raises ValueError for a model of which it cannot be made."""
        return vary(self.blueprint, self.variant)

    @property
    def enforced(self) -> bool:
        """Whether clients are held to their budgets."""
        return self.settings.memory.enforced

    @property
    def swaps(self) -> bool:
        """Whether a device trains also what does not fit, at the cost of time."""
        return False

    def item(self, atoms: Piece) -> WorkItem:
        """The work item that trains these atoms of the server's model with the head that belongs behind them."""
        return WorkItem(atoms, variant=self.variant)

    @property
    def whole(self) -> WorkItem:
        """The work item that trains the server's model."""
        return self.item(tuple(range(len(self.model.atoms))))

    def bytes(self, item: WorkItem) -> int:
        """The memory cost of a work item, found once."""
        if item not in self._bytes:
            self._bytes[item] = self.cost_model.bytes(self.part(item))
        return self._bytes[item]

    def min_budget(self) -> int:
        """The least budget (bytes) for which there are stages."""
        return 0

    def with_smallest(self, budget: int) -> Self:
        """The same policy where the smallest budget is so many bytes."""
        return type(self)(self.blueprint, self.cost_model, self.settings, budget)

    def fit(self, minimum: int, maximum: int) -> Self:
        """The policy that cuts or sizes the model for clients of which none has less, or more, than so many bytes.

        Raises ValueError where no client could train anything.
        """
        return self.with_smallest(minimum)

    def part(self, item: WorkItem) -> Part:
        """What a work item means: here its atoms of the server's model with their head."""
        return Part(self.model, item.atoms, item.head)

    @cached_property
    @abstractmethod
    def stages(self) -> list[Stage]:
        """What is trained, stage by stage. Raises ValueError where the model cannot be cut for the smallest budget."""

    @property
    def stage_count(self) -> int:
        """How many stages there are: known also of a rule that cuts the model again for each device."""
        return 1

    @abstractmethod
    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """What a device trains in a round of a stage, one part after another; `slowest` is the least FLOP/s of the round.

        Raises MemoryBudgetExceededError or AtomTooLargeError where there is nothing that it can train.
        """

    def trainable(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """What a device can train in a stage, for the coverage of the model: `work`, or nothing where that raises."""
        try:
            return self.work(stage, state, slowest)
        except (MemoryBudgetExceededError, AtomTooLargeError):
            return []

    def covered(self, part: Part) -> list[str]:
        """The units of the run's own model, its atoms and its head, that training a part changes."""
        own = {*(f"atoms.{atom}" for atom in range(len(self.blueprint.atoms))), "head"}
        return [unit for unit in part.learned if unit in own]

    def channels(self, part: Part) -> float:
        """The largest fraction of its channels that is ever trained of a layer by clients that train such parts."""
        return 1.0

    def alone(self, atom: int) -> int | None:
        """Bytes of training an atom without the others; None where that is not a step of this system."""
        return None

    def wire(self, parts: list[Part]) -> tuple[int, int]:
        """Bytes of arrays down and up in a round for a client that trains `parts`: what it trains, there and back."""
        units = {unit: part.blueprint for part in parts for unit in part.units}
        size = sum(layer_statistics(blueprint, unit).state_bytes for unit, blueprint in units.items())
        return size, size

    def values(self, parts: list[Part]) -> tuple[float, float]:
        """Values down and up in a round for a client that trains `parts`, as SpaFL's Table 2 counts (planning/counts.py)."""
        units = {unit: part.blueprint for part in parts for unit in part.units}
        count = sum(entries(blueprint, unit) for unit, blueprint in units.items())
        return count, count

    def excluded(self, parts: list[Part]) -> list[str]:
        """The atoms that a client should train and cannot: none, unless a system goes on without them."""
        return []

    def within(self, part: Part, state: DeviceState) -> Part:
        """The part, if the device can train it. Raises MemoryBudgetExceededError."""
        needed = self.cost_model.bytes(part)
        if needed > state.allowed_bytes:
            raise MemoryBudgetExceededError(needed, state.budget_bytes, f"training {label(part)}")
        return part


class Swapping(PartitionPolicy):
    """By which every device trains the whole model, and swaps, in pretence, what does not fit: budgets are not enforced."""

    caveat = "devices only pretend to swap"

    @property
    def swaps(self) -> bool:
        """Always."""
        return True

    @property
    def enforced(self) -> bool:
        """Never: what does not fit is swapped."""
        return False

    def min_budget(self) -> int:
        """Nothing: it swaps."""
        return 0


def require_no_statistics(blueprint: Blueprint, settings: Settings, reason: str) -> None:
    """Raises ValueError, with the `reason`, for a model whose batch norms keep statistics."""
    found = next((unit for unit in blueprint.units() if has_statistics(blueprint, unit)), None)
    if found is None:
        return
    if not settings.batch_statistics:
        raise ValueError(
            f"architecture.batch-norm = {settings.architecture.batch_norm!r}: {reason}, use measured or batch"
        )
    raise ValueError(
        f"{found} of {blueprint.name} keeps statistics although architecture.batch-norm = {settings.norms!r}, and "
        f"{reason}: build its batch norms with track_running_stats=batch_norm != 'batch'"
    )


def label(part: Part) -> str:
    """A part for people: the names of its first and last atom."""
    if part.name:
        return part.name
    if part.whole:
        return "the whole model"
    names = part.names()
    consecutive = list(part.atoms) == list(range(part.atoms[0], part.atoms[-1] + 1))
    return f"{names[0]}..{names[-1]}" if consecutive and len(names) > 2 else "+".join(names)
