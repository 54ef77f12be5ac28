"""A variant, sent as values, is built alike everywhere."""

import json
from dataclasses import dataclass, make_dataclass, replace
from typing import Any

import pytest
from helpers import a_blueprint

from piecework.models.basic_layers import BasicLayers
from piecework.models.cascade import Blueprint
from piecework.models.change import Change, Origin
from piecework.models.depth_exits import Exits
from piecework.models.dual_norm import DualNorms
from piecework.models.low_rank import LowRank
from piecework.models.masked import Masks
from piecework.models.mix import Mix
from piecework.models.nested_norms import NestedNorms
from piecework.models.supermask import Supermask
from piecework.models.variant import Variant, register_change, vary
from piecework.models.width import shapes
from piecework.models.work_item import WorkItem
from piecework.models.zoo import build_blueprint, stored_as
from piecework.strategies.cascade.fedepth.mutual import Mutual

BLOCKS = ((0, 1), (2, 3), (4,))


def changed(*changes: Change) -> Variant:
    return Variant(changes=changes)


# Each with what it makes of the demo's model: a few of its arrays and their shapes. None: there is no such array.
MADE: list[tuple[Variant, dict[str, tuple[int, ...] | None]]] = [
    (Variant(), {"atoms.0.conv.weight": (16, 1, 3, 3), "head.fc.weight": (10, 256)}),
    (Variant(width=0.3), {"atoms.0.conv.weight": (4, 1, 3, 3)}),
    (Variant(width=0.3, rounding="up"), {"atoms.0.conv.weight": (5, 1, 3, 3)}),
    (Variant(width=0.5), {"atoms.0.conv.weight": (8, 1, 3, 3), "head.fc.weight": (10, 128)}),
    (Variant(architecture="cnn3", width=0.5), {"head.fc1.weight": (10, 256)}),
    (changed(DualNorms(True)), {"atoms.0.bn.adversarial_running_mean": (16,)}),
    (
        Variant(width=0.25, changes=(Mix((1, 3)),)),
        {"atoms.0.1.conv.weight": (4, 1, 3, 3), "atoms.0.0.conv.weight": None},
    ),
    (changed(LowRank(0.5)), {"atoms.1.conv.v.weight": (8, 16, 3, 3)}),
    (changed(Masks("paper")), {"atoms.0.conv.tau": (16,)}),
    (changed(Supermask("paper", seed=3)), {"atoms.0.conv.weight": (16, 1, 3, 3), "atoms.0.bn.weight": None}),
    (changed(Exits(BLOCKS)), {"atoms.5.fc.weight": (10, 64), "atoms.6.fc.weight": (10, 64)}),
    (changed(BasicLayers(BLOCKS)), {"atoms.5.weight": (32, 16, 3, 3), "atoms.6.weight": (64, 32, 3, 3)}),
    (
        changed(BasicLayers(BLOCKS, basic_norm=True)),
        {
            "atoms.5.conv.weight": (32, 16, 3, 3),
            "atoms.5.bn.weight": (32,),
            "atoms.6.bn.bias": (64,),
            "atoms.6.weight": None,
        },
    ),
    (Variant(statistics=True), {"atoms.0.bn.running_mean": (16,)}),
]


def as_json(variant: Variant) -> Any:
    return json.loads(json.dumps(variant.to_values()))


@pytest.mark.parametrize(("variant", "arrays"), MADE, ids=[next(reversed(as_json(each)), "own") for each, _ in MADE])
def test_values_and_network(variant: Variant, arrays: dict[str, tuple[int, ...] | None]) -> None:
    model = a_blueprint(batch_norm="running" if "dual_norms" in as_json(variant) else "batch")
    assert Variant.from_values(as_json(variant)) == variant
    found = shapes(vary(model, variant))
    assert found == shapes(vary(model, Variant.from_values(as_json(variant))))
    assert {name: found.get(name) for name in arrays} == arrays


def test_a_network_is_made_once() -> None:
    """Caches know blueprints by identity: what a run asks for again and again is the same object."""
    narrow = Variant(width=0.5, changes=(NestedNorms((0.5, 0.25)),))
    one, other = a_blueprint(batch_norm="batch"), a_blueprint(batch_norm="batch")
    assert one is other
    assert one is not a_blueprint(batch_norm="running")
    assert vary(one, narrow) is vary(other, narrow)
    assert vary(one, narrow) is not vary(one, Variant(width=0.5))
    stored = stored_as(one, (1, 16, 16))
    assert stored is stored_as(other, (1, 16, 16))
    assert vary(stored, narrow).stored_shape == (1, 16, 16)
    assert vary(replace(one, build_head=one.build_head), narrow) is not vary(one, narrow)


def test_nothing_to_do_gives_the_very_same_model() -> None:
    model = a_blueprint()
    assert vary(model, Variant()) is model


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(TypeError, match="depth"):
        Variant.from_values({"depth": 3})
    for values, message in (([], r"a variant is \[\]"), (None, "a variant is None")):
        with pytest.raises(TypeError, match=message):
            Variant.from_values(values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="furst"):
        Variant.from_values({"keep": 0.5, "channels": "furst"})
    with pytest.raises(ValueError, match="keep"):
        Variant.from_values({"keep": "x"})
    with pytest.raises(ValueError, match="'cnn9'"):
        vary(a_blueprint(), Variant(architecture="cnn9"))
    unknown = replace(a_blueprint(), zoo_name="")
    with pytest.raises(ValueError, match="convnet was not built by"):
        vary(unknown, Variant(width=0.5))


def test_options_go_with_the_model_and_to_others_that_have_them() -> None:
    vgg = build_blueprint("vgg16", num_classes=10, input_shape=(1, 32, 32), width=0.1, classifier="fedprophet")
    narrow = vary(vgg, Variant(width=0.5))
    assert (narrow.width, dict(narrow.options)) == (0.05, {"classifier": "fedprophet"})
    assert dict(vary(vgg, Variant(architecture="vgg11")).options) == {"classifier": "fedprophet"}
    assert vary(vgg, Variant(architecture="cnn3")).options == ()


@register_change
@dataclass(frozen=True)
class Without(Change):
    """A change that the repository does not have."""

    without: int

    def apply(self, model: Blueprint, origin: Origin) -> Blueprint:
        return replace(model, atoms=model.atoms[: -self.without])


def test_a_change_of_ones_own() -> None:
    variant = Variant(width=0.5, changes=(Without(2), LowRank(0.5)))
    assert variant.to_values() == {"width": 0.5, "without": 2, "keep": 0.5}
    assert Variant.from_values(as_json(variant)) == variant
    assert len(vary(a_blueprint(), variant).atoms) == 3
    assert variant.find(LowRank).keep == 0.5
    with pytest.raises(ValueError, match="Exits is missing"):
        variant.find(Exits)
    with pytest.raises(ValueError, match="without"):
        Variant.from_values({"without": "x"})
    for name in ("width", "keep"):
        taken = make_dataclass("Taken", [(name, float)], bases=(Change,), frozen=True)
        with pytest.raises(ValueError, match=f"Taken.{name}: a variant has this name already"):
            register_change(taken)


def test_only_registered_kinds_are_built() -> None:
    for name in ("changes", "os:system", "Without"):
        with pytest.raises(TypeError, match=f"a variant has no {name}"):
            Variant.from_values({name: [{"without": 1}]})


def test_a_work_item_holds_one_mode() -> None:
    item = WorkItem((0, 1), variant=Variant(width=0.5), mode=Mutual(2))
    assert item.to_values() == {"atoms": [0, 1], "copies": 2, "variant": {"width": 0.5}}
    assert WorkItem.from_values(json.loads(json.dumps(item.to_values()))) == item
    for values in (
        {"atoms": [0], "copies": 1},
        {"atoms": [0], "copies": 2, "taught": True},
        {"atoms": [0], "taught": False},
    ):
        with pytest.raises(ValueError, match=r"copies|taught|the modes"):
            WorkItem.from_values(values)
    with pytest.raises(TypeError, match="a work item has no mode"):
        WorkItem.from_values({"atoms": [0], "mode": "Mutual"})
