"""Variants: the networks that methods make of a run's model, described by values and built in one place.

A strategy chooses a `Variant`. Tasks and model files carry it as plain values. Servers, clients, plans and `piecework.load`
build the same network from it with `vary`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, TypeAdapter

from piecework.models.basic_layers import with_basic_layers
from piecework.models.cascade import Blueprint
from piecework.models.depth_exits import with_exits
from piecework.models.layers import narrowed, require_one_of
from piecework.models.low_rank import low_rank
from piecework.models.masked import masked
from piecework.models.mix import MOST_NETS, mixed
from piecework.models.nested_norms import with_nested_norms
from piecework.models.partition import Piece
from piecework.models.static_norms import with_statistics
from piecework.models.supermask import supermask
from piecework.models.zoo import MODELS, build_blueprint, model_options

MOST_RATIOS = 100  # nets within a net, each of which is built
NetNumber = Annotated[int, Field(ge=0, lt=MOST_NETS)]


@dataclass(frozen=True)
class Variant:
    """The changes to a model, applied in the order of the fields; without any the model stays as it is.

    `architecture` is another model of the same width, with those options that it also has (FedDF). `width` is the width ratio,
    and `rounding` says how it rounds channels (HeteroFL). `nested_norms` are the width ratios of nets within this one whose
    batch norms have parameters of their own (FjORD). `dual_norms` gives batch norms two sets of statistics (FedRBN). `nets` are
    the numbers of narrow networks side by side, and `scaler` rescales them (SplitMix). `keep` is the fraction of the rank that
    factorised layers keep, 0 = not factorised, and `channels` says which output channels they compute (PriSM). `thresholds`
    prunes weights below a learned threshold, with this straight-through gradient; `silent` also prunes biases and norms of
    pruned filters, and `clamped` thresholds stay in [0, 1] (SpaFL). `scores` freezes weights drawn from `seed` and masks them
    by trained scores, with this straight-through gradient (FedPM). `exits` adds classifiers after these blocks of atoms
    (DepthFL). `basic_layers` adds a small layer that can stand for each of these blocks, and `basic_norm` a batch norm behind
    its convolution (ProFL). `statistics` gives running statistics to batch norms that are trained without them
    (`architecture.batch-norm = measured`). `pooling` is that of auxiliary heads (FedProphet).
    """

    architecture: str = ""
    width: Annotated[float, Field(gt=0, le=4)] = 1.0
    rounding: Literal["down", "up"] = "down"
    nested_norms: Annotated[tuple[float, ...], Field(max_length=MOST_RATIOS)] = ()
    dual_norms: bool = False
    nets: Annotated[tuple[NetNumber, ...], Field(max_length=MOST_NETS), FailFast()] = ()
    scaler: bool = False
    keep: Annotated[float, Field(ge=0, le=1)] = 0.0
    channels: Literal["first", "random", "all"] = "first"
    thresholds: Literal["", "paper", "flowing", "clipped"] = ""
    silent: bool = True
    clamped: bool = True
    scores: Literal["", "paper", "authors"] = ""
    seed: int = 0
    exits: tuple[Piece, ...] = ()
    basic_layers: tuple[Piece, ...] = ()
    basic_norm: bool = False
    statistics: bool = False
    pooling: Literal["auto", "authors", "none"] = "authors"

    def to_values(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values."""
        return {f.name: plain(value) for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Variant":
        """Return the variant of `to_values`. Raises TypeError for an unknown name, ValueError for a bad value."""
        if not isinstance(values, Mapping):
            raise TypeError(f"a variant is {values!r:.100}: expected names and values")
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise TypeError(f"a variant has no {', '.join(unknown)}")
        return VARIANT.validate_python(dict(values))


VARIANT = TypeAdapter(Variant)


def plain(value: Any) -> Any:
    """Return tuples as lists, as in JSON."""
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def vary(model: Blueprint, variant: Variant) -> Blueprint:
    """Return the network of a variant, or `model` itself without changes. Raises ValueError for an impossible change."""
    given = model
    if variant.architecture or variant.width != 1 or variant.dual_norms:
        model = rebuilt(given, variant)
    if variant.nested_norms:
        nets = {ratio: rebuilt(given, replace(variant, width=ratio)) for ratio in variant.nested_norms}
        model = with_nested_norms(model, variant.width, nets)
    if variant.nets:
        model = mixed(model, variant.nets, variant.width if variant.scaler else 1.0)
    if variant.keep:
        model = low_rank(model, variant.keep, narrow=variant.channels != "all", scattered=variant.channels == "random")
    if variant.thresholds:
        model = masked(model, variant.thresholds, silent=variant.silent, clamped=variant.clamped)
    if variant.scores:
        model = supermask(model, variant.seed, by_authors=variant.scores == "authors")
    if variant.exits:
        model = with_exits(model, variant.exits)
    if variant.basic_layers:
        model = with_basic_layers(model, variant.basic_layers, norm=variant.basic_norm)
    if variant.statistics:
        model = with_statistics(model)
    return model if variant.pooling == model.auxiliary_pool else replace(model, auxiliary_pool=variant.pooling)


def rebuilt(model: Blueprint, variant: Variant) -> Blueprint:
    """Return another model of the zoo, or the same one with other channels or batch norms."""
    if not model.zoo_name:
        raise ValueError(
            f"{model.name} was not built by piecework.models.zoo.build_blueprint: it cannot be built again, as {variant}"
        )
    options = dict(model.options)
    if variant.architecture:
        require_one_of("model", variant.architecture, tuple(MODELS))
        known = model_options(variant.architecture)
        options = {key: value for key, value in options.items() if key in known}
    with narrowed(variant.width if variant.rounding == "up" else 1.0):
        return build_blueprint(
            variant.architecture or model.zoo_name,
            num_classes=model.num_classes,
            input_shape=model.input_shape,
            width=model.width * variant.width,
            batch_norm="dual" if variant.dual_norms else model.batch_norm,
            initialisation=model.initialisation,
            **options,
        )
