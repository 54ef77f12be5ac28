"""Work items: strategies ask for them, costs are listed by them, and updates name those that were done."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import FailFast, InstanceOf, TypeAdapter

from piecework.models.kinds import Kinds, flat
from piecework.models.partition import Piece
from piecework.models.step import Step, with_step
from piecework.models.variant import Variant

SHARED = ("atoms", "head", "variant", "learns", "measured", *(field.name for field in fields(Step)))


class Mode:
    """How a method trains an item, if it knows several ways; a frozen dataclass that `register_mode` makes known."""


@dataclass(frozen=True)
class WorkItem(Step):
    """Atoms of a network that are held at once with a head; they are trained unless a field says otherwise."""

    atoms: Annotated[Piece, FailFast()]  # without any, the item is the head alone
    head: str = "head"
    variant: Variant = field(default_factory=Variant)  # the network, made of the run's model
    mode: InstanceOf[Mode] | None = None  # the method's own
    learns: Annotated[Piece, FailFast()] = ()  # the atoms that learn while the others are only held; none = all
    measured: bool = False  # nothing is trained: batch norms measure statistics, one atom after another

    @property
    def plain(self) -> "WorkItem":
        """The item with the plain step."""
        return with_step(self, Step())

    def to_values(self) -> dict[str, Any]:
        """Return the atoms, and the other fields that differ from their defaults, as JSON values."""
        variant = {"variant": values} if (values := self.variant.to_values()) else {}
        own = flat(self.mode) if self.mode is not None else {}
        return flat(self, [name for name in SHARED if name != "variant"]) | own | variant

    @classmethod
    def from_values(cls, values: object) -> "WorkItem":
        """Return the item of `to_values`. Raises TypeError for a missing or unknown name, ValueError for a bad value."""
        shared, modes = MODES.read(values)
        if "atoms" not in shared:
            raise TypeError(f"a work item is {values!r:.100}: expected its atoms, and names and values")
        if len(modes) > 1:
            raise ValueError(f"a work item has the modes {modes!r:.100}: expected one at most")
        variant = Variant.from_values(shared.get("variant", {}))
        return ITEM.validate_python({**shared, "variant": variant, "mode": next(iter(modes), None)})


ITEM = TypeAdapter(WorkItem)
MODES = Kinds[Mode]("a work item", SHARED)
register_mode = MODES.register
