"""Variants: the networks that methods make of a run's model, described by values and built in one place.

A method chooses a `Variant`. Tasks and model files carry it as plain values. Servers, clients, plans and `piecework.load` build
the same network from it with `vary`. What only one method changes is a `Change`, which lies beside the code that builds it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, InstanceOf, TypeAdapter

from piecework.models.auxiliary_pooling import AuxiliaryPooling
from piecework.models.basic_layers import BasicLayers
from piecework.models.cascade import Blueprint
from piecework.models.change import Change, Origin
from piecework.models.depth_exits import Exits
from piecework.models.dual_norm import DualNorms
from piecework.models.kinds import Kinds, flat
from piecework.models.layers import narrow_models, require_one_of
from piecework.models.low_rank import LowRank
from piecework.models.masked import Masks
from piecework.models.mix import Mix
from piecework.models.nested_norms import NestedNorms
from piecework.models.static_norms import with_statistics
from piecework.models.supermask import Supermask
from piecework.models.wide_prefix import WidePrefix
from piecework.models.zoo import build_blueprint, known_models, model_options, stored_as

Kind = TypeVar("Kind", bound=Change)
SHARED = ("architecture", "width", "rounding", "statistics")


@dataclass(frozen=True)
class Variant:
    """What a network is made from, besides the run's model; without any changes it is that model."""

    architecture: str = ""  # another model of the same width, with those options that it also has
    width: Annotated[float, Field(gt=0, le=4)] = 1.0  # the width ratio, a fraction of the channels
    rounding: Literal["down", "up"] = "down"  # of channels
    changes: tuple[InstanceOf[Change], ...] = ()  # methods' own, applied in this order
    statistics: bool = (
        False  # running statistics for batch norms that are trained without (architecture.batch-norm = measured)
    )

    def find(self, kind: type[Kind]) -> Kind:
        """Return the change of this kind. Raises ValueError if there is none."""
        for change in self.changes:
            if isinstance(change, kind):
                return change
        raise ValueError(f"{kind.__name__} is missing in the variant {self}")

    def to_values(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, and those of the changes, as JSON values."""
        values = flat(self, SHARED)
        for change in self.changes:
            values |= flat(change)
        return values

    @classmethod
    def from_values(cls, values: object) -> "Variant":
        """Return the variant of `to_values`. Raises TypeError for an unknown name, ValueError for a bad value."""
        shared, changes = CHANGES.read(values)
        return VARIANT.validate_python({**shared, "changes": changes})


VARIANT = TypeAdapter(Variant)
CHANGES = Kinds[Change]("a variant", SHARED)
register_change = CHANGES.register
for kind in (AuxiliaryPooling, BasicLayers, DualNorms, Exits, LowRank, Masks, Mix, NestedNorms, Supermask, WidePrefix):
    register_change(kind)


def vary(model: Blueprint, variant: Variant) -> Blueprint:
    """Return the network of a variant, or `model` itself without changes. Raises ValueError for an impossible change."""
    return model if variant == Variant() else _varied(model, variant)


@lru_cache(maxsize=256)  # the same object each time: what is kept of a network is found again
def _varied(model: Blueprint, variant: Variant) -> Blueprint:
    found = model
    if variant.architecture or variant.width != 1:
        found = rebuild(model, variant)
    origin = Origin(variant.width, lambda width: rebuild(model, replace(variant, width=width)))
    for change in variant.changes:
        found = change.apply(found, origin)
    return with_statistics(found) if variant.statistics else found


def rebuild(model: Blueprint, variant: Variant) -> Blueprint:
    """Return another model of the zoo, or the same one with other channels."""
    if not model.zoo_name:
        raise ValueError(
            f"{model.name} was not built by piecework.models.zoo.build_blueprint: it cannot be built again, as {variant}"
        )
    options = dict(model.options)
    if variant.architecture:
        # A message names it: no module is imported for it but one that an installed package registers.
        require_one_of("model", variant.architecture, known_models())
        known = model_options(variant.architecture)
        options = {key: value for key, value in options.items() if key in known}
    with narrow_models(variant.width if variant.rounding == "up" else 1.0):
        found = build_blueprint(
            variant.architecture or model.zoo_name,
            num_classes=model.num_classes,
            input_shape=model.input_shape,
            width=model.width * variant.width,
            batch_norm=model.batch_norm,
            initialisation=model.initialisation,
            **options,
        )
    return stored_as(found, model.stored_shape)
