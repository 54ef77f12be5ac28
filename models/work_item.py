"""Work items: strategies ask for them, costs are listed by them, and updates name those that were done."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from pydantic import FailFast, TypeAdapter

from piecework.models.kinds import plain
from piecework.models.partition import Piece
from piecework.models.variant import Variant


@dataclass(frozen=True)
class WorkItem:
    """Atoms of a network that are held at once with a head; they are trained unless a field says otherwise.

    `variant` is the network, made of the run's model. Without atoms, the item is the head alone. `copies` of the atoms teach
    each other (FeDepth's mutual distillation). `learns` are the atoms that learn while the others are only held (FeDepth's
    sub-problems in the whole network). `taught` atoms learn from the logits of another model besides labels (FeDepth). `clean`
    items use clean examples even if others train on adversarial ones (FedRBN). With `measured`, nothing is trained, and batch
    norms measure statistics, one atom after another. A step computes `micro_batch` > 0 examples at once, and runs the segments
    of atoms in `recompute` again in its backward pass; these are positions [first, last) in `atoms`.
    """

    atoms: Annotated[Piece, FailFast()]
    head: str = "head"
    variant: Variant = field(default_factory=Variant)
    copies: int = 1
    learns: Annotated[Piece, FailFast()] = ()
    taught: bool = False
    clean: bool = False
    measured: bool = False
    micro_batch: int = 0
    recompute: Annotated[tuple[tuple[int, int], ...], FailFast()] = ()

    @property
    def step(self) -> str:
        """How a step fits, in words; empty for the plain step."""
        sliced = [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        count = sum(last - first for first, last in self.recompute)
        again = [f"recomputes {count} atom{'s' if count > 1 else ''}"] if count else []
        return ", ".join(sliced + again)

    @property
    def plain(self) -> "WorkItem":
        """The item with the plain step."""
        return replace(self, micro_batch=0, recompute=())

    def to_values(self) -> dict[str, Any]:
        """Return the atoms, and the other fields that differ from their defaults, as JSON values."""
        values = {name: plain(value) for name in OTHERS if (value := getattr(self, name)) != getattr(PLAIN, name)}
        variant = {"variant": self.variant.to_values()} if self.variant != PLAIN.variant else {}
        return {"atoms": list(self.atoms), **values, **variant}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "WorkItem":
        """Return the item of `to_values`. Raises TypeError for a missing or unknown name, ValueError for a bad value."""
        if not isinstance(values, Mapping) or "atoms" not in values:
            raise TypeError(f"a work item is {values!r:.100}: expected its atoms, and names and values")
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise TypeError(f"a work item has no {', '.join(unknown)}")
        variant = Variant.from_values(values.get("variant", {}))
        return ITEM.validate_python({**values, "variant": variant})


PLAIN = WorkItem(())
OTHERS = ("head", "copies", "learns", "taught", "clean", "measured", "micro_batch", "recompute")
ITEM = TypeAdapter(WorkItem)
