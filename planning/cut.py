"""How a method cuts a model for devices: the parts of each stage, their memory costs, and the bytes and values sent.

Each method's cut is in the file of the method or next to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, final

from piecework.device_profiles.profile import allowance
from piecework.models.cascade import Blueprint, has_statistics
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import Piece
from piecework.models.step import with_step
from piecework.models.variant import Variant, vary
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel
from piecework.planning.counts import entries
from piecework.planning.evaluation_cost import evaluation_steps
from piecework.planning.page_plan import BOARD, Speed
from piecework.planning.part import Part
from piecework.training.capabilities import Capabilities
from piecework.training.loop import PieceModel, single_loss
from piecework.training.methods import find_entry
from piecework.training.settings import Settings
from piecework.training.settings.cases import is_true


@dataclass(frozen=True)
class Stage:
    """A phase of a run that always trains the same parts. `parts` are those of a device with the smallest budget."""

    name: str
    parts: tuple[Part, ...]
    key: Any = 0  # by which the method knows the stage
    place: int = 1  # of its first round in the schedule of learning rates, if no stage ends early


@dataclass(frozen=True)
class Traffic:
    """What a client receives and sends in a round: bytes of arrays, and values in them, as SpaFL counts (counts.py)."""

    bytes: tuple[int, int]
    values: tuple[float, float]


class Cut:
    """How a method cuts one model for one fleet.

    `smallest` is the smallest budget (bytes) that a client will have, and `allowed` the bytes that such a client may use. A
    cut is immutable: `fit` and `with_smallest` return another one.

    `method` is the method's class, and `can` what it can do. `own` are values that are chosen for the run, such as a width.
    """

    method: Any = None
    reserves: str = ""  # the budget that the settings name for the cut, as 60MB; empty = the fleet's minimum

    def __init__(
        self, blueprint: Blueprint, cost_model: CostModel, settings: Settings, smallest: int = 0, **own: Any
    ) -> None:
        self.blueprint, self.cost_model, self.settings, self.smallest = blueprint, cost_model, settings, smallest
        self.allowed = allowance(smallest, settings.memory.excess)
        self._own = own
        for name, value in own.items():
            setattr(self, name, value)
        self._bytes: dict[WorkItem, int] = {}
        self._made: dict[WorkItem, Part] = {}

    @property
    def can(self) -> Capabilities:
        """What the method can do."""
        found: Capabilities = self.method.can
        return found

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute once, because `stages` and costs are computed from it and cached. Raises AttributeError later."""
        if name in self.__dict__:
            raise AttributeError(f"{name} of a cut is set already: `fit` and `with_smallest` return another one")
        super().__setattr__(name, value)

    def require_model(self) -> None:
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
        return self.can.swaps or self.settings.memory.model == self.can.swaps_with

    def item(self, atoms: Piece) -> WorkItem:
        """Return the work item that trains these atoms of the server's model with the head that belongs to them."""
        return WorkItem(atoms, variant=self.variant)

    @property
    def whole(self) -> WorkItem:
        """The work item that trains all of the server's model."""
        return self.item(tuple(range(len(self.model.atoms))))

    def bytes(self, item: WorkItem) -> int:
        """Return the memory cost (bytes) of a work item with the step that it names, computed once.

        Where batches draw their net, it is that of the net that takes most: a narrow one may copy parts of the arrays.
        """
        if item not in self._bytes:
            part = self.part(item)
            self._bytes[item] = max(self.cost_model.bytes(step) for step in (part, *part.nested))
        return self._bytes[item]

    def needs(self, *items: WorkItem) -> dict[WorkItem, int]:
        """Return the fewest bytes with which a device can do each of these items."""
        return {item: self.needed_bytes(item) for item in items}

    def needed_bytes(self, item: WorkItem) -> int:
        """Return the fewest bytes with which a device can do a work item, with the smallest step that `memory.fit` allows."""
        return self.bytes(self._fit_item(item, 0))

    def costs(self, needed: Mapping[WorkItem, int], allowed: int, speed: Speed = BOARD) -> dict[WorkItem, int]:
        """Return the costs of a task, for a device that may use `allowed` bytes, from the bytes that its items need at least.

        Each item is listed with the cheapest step that fits, and with the smallest one in case a device has less memory.
        """
        if not self.cost_model.ways:
            return dict(needed)
        steps = {step: least for item, least in needed.items() for step in self._steps(item, allowed, speed)}
        return {item: least if item.measured else max(self.bytes(item), least) for item, least in steps.items()}

    def _steps(self, item: WorkItem, allowed: int, speed: Speed = BOARD) -> list[WorkItem]:
        smallest = item if item.measured else self._fit_item(item, 0)
        if item.measured or (self.swaps and self.bytes(smallest) > allowed):
            return [item]
        return [self._fit_item(item, allowed, speed), smallest]

    def _fit_item(self, item: WorkItem, allowed: int, speed: Speed = BOARD) -> WorkItem:
        """Return the item with the step for a device that may use `allowed` bytes: the smallest if none fits."""
        return with_step(item, self._fit_part(item, allowed, speed))

    def _fit_part(self, item: WorkItem, allowed: int, speed: Speed = BOARD) -> Part:
        return self.cost_model.fit_part(self.part(item), allowed, speed)

    def min_budget(self) -> int:
        """Return the smallest budget (bytes) with which a client can train anything; 0 = any budget."""
        return 0

    def with_smallest(self, budget: int) -> Self:
        """Return this cut for a smallest budget of that many bytes."""
        return type(self)(self.blueprint, self.cost_model, self.settings, budget, **self._own)

    def having(self, **own: Any) -> Self:
        """Return this cut with other values that the method's class chooses for the run."""
        return type(self)(self.blueprint, self.cost_model, self.settings, self.smallest, **self._own | own)

    def fit(self, minimum: int, maximum: int) -> Self:
        """Return the cut that cuts or sizes the model for clients with `minimum` to `maximum` bytes of memory.

        Raises ValueError if no client could train anything.
        """
        return self.with_smallest(minimum)

    @final
    def part(self, item: WorkItem) -> Part:
        """Return the part that a work item trains, with the step that it names: that of `plain_part`, made once."""
        if item not in self._made:
            own = self.plain_part(item.plain)
            self._require_ways(own)
            self._made[item] = replace(with_step(own, item), pageable=self._can_page(own))
        return self._made[item]

    def _require_ways(self, part: Part) -> None:
        """Raise ValueError if `memory.fit` names a way that the part's class cannot go, although the method does not say so."""
        named = self.settings.memory.named_ways
        if unsaid := [way for way in named if way not in (*part.piece_class.ways, *self.can.lacks)]:
            raise ValueError(
                f"memory.fit = {self.settings.memory.fit!r}: {part.piece_class.__name__}.ways has no {unsaid[0]}; leave it "
                "out, or let the method's `can` name it in `lacks`, with the reason, if none of its steps can go this way"
            )

    def _can_page(self, part: Part) -> bool:
        usual = part.make_loss is single_loss and part.piece_class is PieceModel and not (part.targets or part.learns)
        pages = find_entry(
            self.settings.strategy
        ).can.pages  # of one's own class, whether its clients' step is the usual one
        return is_true(pages, self.settings) and part.whole and usual

    def plain_part(self, item: WorkItem) -> Part:
        """Return the part that an item with a plain step trains; by default its atoms of the server's model with their head.

        Methods whose loss, model or head is another one override this method.
        """
        return Part(self.model, item.atoms, item.head)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages in order, for the smallest budget; by default one, with the whole model.

        Raises ValueError if the model cannot be cut for it.
        """
        return [Stage("training", (self.part(self.whole),))]

    @property
    def stage_count(self) -> int:
        """The number of stages, also for a cut that is made separately for each device."""
        return len(self.stages) if self.can.stages else 1

    def traffic(self, parts: list[Part]) -> Traffic:
        """Return what a client that trains `parts` receives and sends in a round; by default their units."""
        units = {unit: part.blueprint for part in parts for unit in part.units}
        size = sum(layer_statistics(blueprint, unit).state_bytes for unit, blueprint in units.items())
        count = sum(entries(blueprint, unit) for unit, blueprint in units.items())
        return Traffic((size, size), (count, count))

    def evaluation_bytes(self, examples: int) -> int:
        """Return the fewest bytes with which a client evaluates the model, 0 if it needs less than what it trains.

        It needs more where clients skip atoms that they then have to run in an evaluation on so many `examples`.
        """
        asked = self.settings.evaluation.on_clients_every or self.settings.evaluation.mode == "personal"
        if not (self.can.single_atoms and asked):
            return 0
        atoms = tuple(range(len(self.model.atoms)))
        return evaluation_steps(self, self.model, atoms, "head", 0, examples)[0].bytes

    def find_excluded(self, parts: list[Part]) -> list[str]:
        """Return the names of the atoms that a client skips because they do not fit even alone."""
        trained = {unit for part in parts for unit in part.learned}
        atoms = enumerate(self.blueprint.atoms) if self.can.single_atoms else ()
        return [atom.name for number, atom in atoms if f"atoms.{number}" not in trained]

    def fitting_part(self, item: WorkItem, allowed: int, speed: Speed = BOARD) -> Part:
        """Return the part of an item with the cheapest step of at most `allowed` bytes, else the one to fall back to."""
        return self.part(self._steps(item, allowed, speed)[0]) if self.cost_model.ways else self.part(item)


def trains_adversarially(can: Capabilities, settings: Settings) -> bool:
    """Return whether a run with these settings trains on adversarial examples. Raises ValueError if they conflict."""
    if settings.training.adversarial and can.attack == "never":
        raise ValueError(f"training.adversarial = true: {settings.strategy} trains on clean examples only")
    if can.attack == "optional" and settings.training.adversarial and settings.attack.warmup >= settings.num_rounds:
        raise ValueError(
            f"attack.warmup = {settings.attack.warmup} leaves no adversarial round in num-rounds = {settings.num_rounds}"
        )
    return can.attack == "always" or (can.attack == "optional" and settings.training.adversarial)


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
