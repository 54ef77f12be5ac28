"""How a strategy cuts a model for devices: the parts of each stage, the parts that a device can train, and the bytes sent.

Each strategy's partition policy is in the file of the strategy or next to it. Plans use partition policies alone and train
nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Self, final

from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState, allowance
from piecework.models.cascade import Blueprint, has_statistics
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import Piece
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel
from piecework.planning.counts import entries
from piecework.planning.part import Part
from piecework.training.settings import Settings


@dataclass(frozen=True)
class Stage:
    """A phase of a run that always trains the same parts. `parts` are those of a device with the smallest budget."""

    name: str
    parts: tuple[Part, ...]


class PartitionPolicy(ABC):
    """How a strategy cuts one model for one fleet.

    `smallest` is the smallest budget (bytes) that a client will have, and `allowed` the bytes that such a client may use. A
    policy is immutable: `fit` and `with_smallest` return another one.

    `cuts`: the model is cut to fit a budget. `adapts`: the model is not cut, but narrowed or shortened.
    `exits`: the server's model has an exit head after every atom but the last.
    `when_excluded` is the status that plans show for a device that cannot train.
    `alone`: atoms are also trained alone, if no more fits.
    `adversarial`: whether the strategy trains on adversarial examples; with `optional` the settings decide.
    `caveat` is a remark that advice adds to the strategy's figures.
    `untrained`: how a part of the model that no client trains ends up. It keeps its initial weights ("random"), or the trained
    model ends before it ("cut off"), or the server trains it by distillation ("distilled").
    `zeroed`: channels that no client trains are 0 in the model that is evaluated and saved; otherwise it ends before them.
    """

    cuts: ClassVar[bool] = False
    adapts: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    exits: ClassVar[bool] = False
    adversarial: ClassVar[Literal["never", "optional", "always"]] = "never"
    caveat: ClassVar[str] = ""
    zeroed: ClassVar[bool] = False
    moving: ClassVar[bool] = False  # whether sub-models change their channels or nets from round to round
    when_excluded: ClassVar[str] = "excluded"
    untrained: ClassVar[Literal["random", "cut off", "distilled"]] = "random"

    def __init__(self, blueprint: Blueprint, cost_model: CostModel, settings: Settings, smallest: int = 0) -> None:
        self.blueprint, self.cost_model, self.settings, self.smallest = blueprint, cost_model, settings, smallest
        self.allowed = allowance(smallest, settings.memory.excess)
        self._bytes: dict[WorkItem, int] = {}
        self._made: dict[WorkItem, Part] = {}

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute once, because `stages` and costs are computed from it and cached. Raises AttributeError later."""
        if name in self.__dict__:
            raise AttributeError(
                f"{name} of a partition policy is set already: `fit` and `with_smallest` return another one"
            )
        super().__setattr__(name, value)

    @classmethod
    def attacks(cls, settings: Settings) -> bool:
        """Return whether a run with these settings trains on adversarial examples. Raises ValueError if they conflict."""
        if settings.training.adversarial and cls.adversarial == "never":
            raise ValueError(f"training.adversarial = true: {settings.strategy} trains on clean examples only")
        if (
            settings.training.adversarial
            and cls.adversarial == "optional"
            and settings.attack.warmup >= settings.num_rounds
        ):
            raise ValueError(
                f"attack.warmup = {settings.attack.warmup} leaves no adversarial round in num-rounds = {settings.num_rounds}"
            )
        return cls.adversarial == "always" or (cls.adversarial == "optional" and settings.training.adversarial)

    def require_model(self) -> None:  # noqa: B027 (most strategies accept every model)
        """Raise ValueError, which names the layer and the reason, for a model that the strategy cannot train."""

    @property
    def variant(self) -> Variant:
        """The variant of the run's model that the server holds."""
        return Variant()

    @cached_property
    def model(self) -> Blueprint:
        """The server's model. Raises ValueError if the run's model has no such variant."""
        return vary(self.blueprint, self.variant)

    @property
    def swaps(self) -> bool:
        """Whether devices also train parts that exceed their memory, by swapping, which takes more time."""
        return False

    def item(self, atoms: Piece) -> WorkItem:
        """Return the work item that trains these atoms of the server's model with the head that belongs to them."""
        return WorkItem(atoms, variant=self.variant)

    @property
    def whole(self) -> WorkItem:
        """The work item that trains all of the server's model."""
        return self.item(tuple(range(len(self.model.atoms))))

    def bytes(self, item: WorkItem) -> int:
        """Return the memory cost (bytes) of a work item with the step that it names, computed once."""
        if item not in self._bytes:
            self._bytes[item] = self.cost_model.bytes(self.part(item))
        return self._bytes[item]

    def needed(self, item: WorkItem) -> int:
        """Return the fewest bytes with which a device can do a work item, with the smallest step that `memory.fit` allows."""
        return self.bytes(self._fitted(item, 0))

    def costs(self, needed: Mapping[WorkItem, int], allowed: int) -> dict[WorkItem, int]:
        """Return the costs of a task, for a device that may use `allowed` bytes, from the bytes that its items need at least.

        Each item is listed with the cheapest step that fits, and with the smallest one in case a device has less memory.
        """
        if not self.cost_model.ways:
            return dict(needed)
        steps = {step: least for item, least in needed.items() for step in self._steps(item, allowed)}
        return {item: least if item.measured else max(self.bytes(item), least) for item, least in steps.items()}

    def _steps(self, item: WorkItem, allowed: int) -> list[WorkItem]:
        smallest = item if item.measured else self._fitted(item, 0)
        if item.measured or (self.swaps and self.bytes(smallest) > allowed):
            return [item]
        return [self._fitted(item, allowed), smallest]

    def _fitted(self, item: WorkItem, allowed: int) -> WorkItem:
        """Return the item with the step for a device that may use `allowed` bytes: the smallest if none fits."""
        part = self._fitted_part(item, allowed)
        return replace(item, micro_batch=part.micro_batch, recompute=part.recompute)

    def _fitted_part(self, item: WorkItem, allowed: int) -> Part:
        return self.cost_model.fitted(self.part(item), allowed)

    def min_budget(self) -> int:
        """Return the smallest budget (bytes) with which a client can train anything; 0 = any budget."""
        return 0

    def with_smallest(self, budget: int) -> Self:
        """Return this policy for a smallest budget of that many bytes."""
        return type(self)(self.blueprint, self.cost_model, self.settings, budget)

    def fit(self, minimum: int, maximum: int) -> Self:
        """Return the policy that cuts or sizes the model for clients with `minimum` to `maximum` bytes of memory.

        Raises ValueError if no client could train anything.
        """
        return self.with_smallest(minimum)

    @final
    def part(self, item: WorkItem) -> Part:
        """Return the part that a work item trains, with the step that it names: that of `plain_part`, made once."""
        if item not in self._made:
            own = self.plain_part(item.plain)
            self._made[item] = replace(own, micro_batch=item.micro_batch, recompute=item.recompute)
        return self._made[item]

    def plain_part(self, item: WorkItem) -> Part:
        """Return the part that an item with a plain step trains; by default its atoms of the server's model with their head.

        Strategies whose loss, model or head is another one override this method.
        """
        return Part(self.model, item.atoms, item.head)

    @cached_property
    @abstractmethod
    def stages(self) -> list[Stage]:
        """The stages in order, for the smallest budget. Raises ValueError if the model cannot be cut for it."""

    @property
    def stage_count(self) -> int:
        """The number of stages, also for a policy that cuts the model separately for each device."""
        return 1

    def first_places(self) -> list[int]:
        """Return each stage's first place in the schedule of learning rates, if stages are equally long and none ends early."""
        rounds = self.settings.num_rounds // self.stage_count
        return [1 + stage * rounds for stage in range(self.stage_count)]

    @abstractmethod
    def work(self, stage: int, state: DeviceState, slowest: float) -> list[Part]:
        """Return the parts that a device trains in a round of a stage, one after another.

        `slowest` is the smallest FLOP/s among the round's devices. Raises MemoryBudgetExceededError or AtomTooLargeError if the
        device can train nothing.
        """

    def covered(self, part: Part) -> list[str]:
        """Return the units of the run's own model (its atoms and its head) that training a part changes."""
        own = {*(f"atoms.{atom}" for atom in range(len(self.blueprint.atoms))), "head"}
        return [unit for unit in part.learned if unit in own]

    def channels(self, part: Part) -> float:
        """Return the largest fraction of a layer's channels that clients with such parts train over all rounds."""
        return 1.0

    def wire(self, parts: list[Part]) -> tuple[int, int]:
        """Return the bytes of arrays sent down and up per round for a client that trains `parts`; by default their units."""
        units = {unit: part.blueprint for part in parts for unit in part.units}
        size = sum(layer_statistics(blueprint, unit).state_bytes for unit, blueprint in units.items())
        return size, size

    def values(self, parts: list[Part]) -> tuple[float, float]:
        """Return the values sent down and up per round for a client that trains `parts`, for SpaFL's counts (counts.py)."""
        units = {unit: part.blueprint for part in parts for unit in part.units}
        count = sum(entries(blueprint, unit) for unit, blueprint in units.items())
        return count, count

    def excluded(self, parts: list[Part]) -> list[str]:
        """Return the names of the atoms that a client skips because they do not fit; by default none."""
        return []

    def within(self, item: WorkItem, state: DeviceState) -> Part:
        """Return the part of a work item with a step that fits the device. Raises MemoryBudgetExceededError if none does."""
        part = self._fitted_part(item, state.allowed_bytes)
        if (needed := self.cost_model.bytes(part)) > state.allowed_bytes:
            raise MemoryBudgetExceededError(needed, state.budget_bytes, f"training {label(part)}")
        return part


class Swapping(PartitionPolicy):
    """A policy under which every device trains the whole model, and the emulated device swaps if it does not fit.

    Swapping is only simulated, so budgets are not enforced.
    """

    caveat = "swapping is only simulated"

    @property
    def swaps(self) -> bool:
        """True for every run."""
        return True

    def min_budget(self) -> int:
        """Return 0: a device with any budget trains, by swapping."""
        return 0


def require_no_statistics(blueprint: Blueprint, settings: Settings, reason: str) -> None:
    """Raise ValueError, with the `reason`, for a model whose batch norms keep statistics."""
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
    """Return a part's display name: its `name`, or the names of its atoms as `a..c` or `a+b`, and how its step fits."""
    return f"{_name(part)} ({part.step})" if part.step else _name(part)


def _name(part: Part) -> str:
    if part.name:
        return part.name
    if part.whole:
        return "the whole model"
    names = part.names()
    consecutive = list(part.atoms) == list(range(part.atoms[0], part.atoms[-1] + 1))
    return f"{names[0]}..{names[-1]}" if consecutive and len(names) > 2 else "+".join(names)
