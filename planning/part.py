"""A part: the atoms of a model and the head that a device holds at once while it trains, and statistics of it."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from piecework.models.cascade import Blueprint
from piecework.models.layer_statistics import input_of, layer_statistics, unit_signature
from piecework.models.partition import Piece
from piecework.models.step import Step, step_of
from piecework.training.loop import MakeLoss, PieceModel, single_loss

OUTPUT_LAYER_NAME = "the output layer"  # of a part without atoms


@dataclass(frozen=True)
class Part(Step):
    """The atoms of a model, or none, and the head that a device holds at once while it trains."""

    blueprint: Blueprint
    atoms: Piece
    head: str = "head"
    copies: int = 1  # of all this, which learn together
    make_loss: MakeLoss = single_loss
    name: str = ""  # to show in place of the atoms' names
    targets: bool = False  # it learns logits instead of labels
    piece_class: type[PieceModel] = PieceModel  # runs the part
    clean: bool = False  # it trains on clean examples even if the run's step is adversarial
    learns: tuple[str, ...] = ()  # the units that learn; none = all
    channels: float = 1.0  # over all rounds, clients with such parts train at most this fraction of a layer's channels
    pageable: bool = False  # the method trains the whole model by itself, with the usual loss
    covers: tuple[str, ...] | None = (
        None  # units of the run's own model that training changes, if not the `learned` ones
    )
    nested: tuple["Part", ...] = ()  # steps of nets within it: each batch draws one of these and its own

    @property
    def covered(self) -> list[str]:
        """The units of the run's own model that training the part changes."""
        if self.covers is not None:
            return list(self.covers)
        return self.learned

    @property
    def learned(self) -> list[str]:
        """The units that a step changes."""
        return list(self.learns) or self.units

    @property
    def units(self) -> list[str]:
        """The units of one copy, the head last."""
        return [*(f"atoms.{atom}" for atom in self.atoms), self.head]

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways of `memory.fit` that compute the same step of this part."""
        one = self.copies == 1 and len(self.atoms) > 0
        absent = {"page"} if not self.pageable else set()
        absent |= set() if one else {"recompute", "recompute-cheap", "page"}
        return tuple(way for way in self.piece_class.ways if way not in absent)

    @property
    def whole(self) -> bool:
        """Whether the part has all atoms of the model."""
        return len(self.atoms) == len(self.blueprint.atoms)

    @property
    def parameters(self) -> int:
        """Trainable parameters of one copy."""
        return sum(layer_statistics(self.blueprint, unit).parameters for unit in self.units)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and buffers of one copy."""
        return sum(layer_statistics(self.blueprint, unit).state_bytes for unit in self.units)

    @property
    def input_bytes(self) -> int:
        """Bytes of one example at the part's input: 4 per value of an image or of stored features, 8 per token."""
        if not self.atoms:
            return 4 * prod(self.blueprint.feature_shape)
        return (8 if self.at_input and self.blueprint.vocabulary else 4) * prod(
            self.blueprint.shape_before(self.atoms[0])
        )

    @property
    def at_input(self) -> bool:
        """Whether the part begins with the model's first atom."""
        return self.atoms[:1] == (0,)

    @cached_property
    def forward_flops(self) -> int:
        """FLOPs of one example's forward pass through atoms and head of all copies, 2 per multiply-accumulate."""
        return self.copies * sum(layer_statistics(self.blueprint, unit).flops for unit in self.units)

    @property
    def features(self) -> int:
        """Values per example that the backward pass needs, as FedProphet's authors count: inputs of layers with weights.

        An auxiliary head counts its un-pooled input and its logits. A 1 x 1 shortcut shares its input with the block.
        """
        values = 0
        for unit in self.units:
            if unit.startswith("aux."):
                values += prod(input_of(self.blueprint, unit)) + self.blueprint.num_classes
            else:
                layers = layer_statistics(self.blueprint, unit).layers
                counted = [x for x in layers if x.parameters and not (x.kind == "Conv2d" and x.on_shortcut)]
                values += sum(layer.inputs for layer in counted)
        return values

    def names(self) -> list[str]:
        """Return the names of the atoms."""
        return [self.blueprint.atoms[atom].name for atom in self.atoms]

    def signature(self) -> Hashable:
        """Return a key that is equal for parts of the same construction and input shape, which have equal costs."""
        units = tuple(unit_signature(self.blueprint, unit) for unit in self.units)
        step = self.make_loss, self.targets, self.piece_class, self.clean, step_of(self)
        return units, self.copies, *step


def whole_model(blueprint: Blueprint, name: str = "the whole model") -> Part:
    """Return the part with all atoms and the head, as FedAvg trains them."""
    return Part(blueprint, tuple(range(len(blueprint.atoms))), name=name)
