"""Every way of `memory.fit` in every strategy: planned, and the plain step bit by bit; or refused by name. Never ignored."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers import tiny_settings
from torch import Tensor, nn
from zoo_helpers import blueprint_of

from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.memory import PeakMemory
from piecework.models.cascade import isolate_rng
from piecework.models.memory_layout import channels_last
from piecework.models.step import Step, with_step
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.cut import Cut
from piecework.planning.part import Part, whole_model
from piecework.planning.step_cost import fake_examples
from piecework.plans.plan import planner_for
from piecework.plans.question import ask
from piecework.server_app.used_settings import require_used
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.loop import PieceModel, start
from piecework.training.methods import METHODS
from piecework.training.settings import Settings
from piecework.training.settings.cases import require_accepted
from piecework.training.settings.shared import WAYS

FAMILY = {"model": "cnn3", "feddf__family": "convnet", "data__public_fraction": 0.1}
NEEDED: dict[str, dict[str, Any]] = {
    "fedepth": {"fedepth__mutual_models": 1},
    "m-fedepth": {"fedepth__mutual_models": 1},
    "feddf": FAMILY,
    "fedet": FAMILY | {"model": "resnet18", "architecture__width": 0.125, "feddf__family": "resnet10"},
}
NEVER = ("cocofl", "fedrbn", "fjord")  # fit no step
EXACT = {
    "step-in-backward": lambda part: Step(in_backward=True),
    "recompute-cheap": lambda part: Step(cheap=True),
    "recompute": lambda part: Step(recompute=((0, len(part.atoms)),)),
}


def settings_of(strategy: str, **changes: Any) -> Settings:
    small = {"clients": 4, "fleet": "unlimited", "training__batch_size": 8, "training__momentum": 0.9}
    return tiny_settings(strategy=strategy, **small | NEEDED.get(strategy, {}) | changes)


@cache
def parts_of(strategy: str) -> tuple[CostModel, list[Part]]:
    """The parts that a device trains, each kind once, and their costs on clean examples."""
    settings = settings_of(strategy)
    planner, _ = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    parts = {part.signature(): part for stage in planner.cut.stages for part in stage.parts}
    return planner.cut.cost_model.unattacked, [*parts.values()]


def why_refused(strategy: str, way: str) -> str:
    """What the settings say to a way that is named; nothing if a run may go it."""
    settings = settings_of(strategy, memory__fit=way)
    try:
        require_used(settings)
        require_accepted(settings, (), strategy)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", METHODS)
def test_a_way_is_planned_or_refused(strategy: str, way: str) -> None:
    said = why_refused(strategy, way)
    if strategy in NEVER:
        assert said.startswith(f"setting memory.fit = '{way}' has no effect here: it belongs to strategy = ")
        return
    costs, parts = parts_of(strategy)
    assert bool(said) == all(way not in part.ways for part in parts)
    if said:
        assert said.startswith(f"memory.fit = '{way}': ")
        assert f"leave {way} out" in said
    for part in parts:
        smallest = costs.having(ways=(way,)).fit_part(part, 0)
        assert smallest.is_plain or way in part.ways
        if way == "page":  # the others may save nothing of so small a part
            assert smallest.is_plain == (way not in part.ways)
    require_accepted(settings_of(strategy, memory__fit="auto"), (), strategy)


class Learning:
    """Two steps of a part on random examples: what the first keeps for its backward pass, what it has moved in it, weights."""

    def __init__(self, costs: CostModel, part: Part, step: Step) -> None:
        config = with_step(replace(costs.training_config, attack=None), step)
        with isolate_rng(3):
            pieces = [
                part.piece_class(part.blueprint, part.atoms, part.head, self.load(part)) for _ in range(part.copies)
            ]
            loss, optimiser = start(pieces, config, part.make_loss)
            z, y = fake_examples(pieces[0], config.batch_size, targets=part.targets)
            z, y = z.normal_(), y.normal_() if part.targets else y.random_(part.blueprint.num_classes)
            memory = PeakMemory()
            for _ in range(2):
                with memory:
                    value = loss(z, y)
                self.kept = memory.live
                value.backward()  # type: ignore[no-untyped-call]
                del value
                self.moved = sum(parameter.grad is None for parameter in optimiser.parameters)
                optimiser.step()
            self.drawn = torch.rand(1)
        self.state: dict[str, Tensor] = {
            f"{number} {unit} {name}": value
            for number, piece in enumerate(pieces)
            for unit, module in piece.units().items()
            for name, value in module.state_dict().items()
        }

    @staticmethod
    def load(part: Part) -> Any:
        def build(unit: str) -> nn.Module:
            return channels_last(part.blueprint.build_unit(unit))

        return build


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("strategy", sorted(METHODS.keys() - set(NEVER)))
def test_a_way_that_is_planned_is_gone_and_exact(strategy: str, way: str) -> None:
    costs, parts = parts_of(strategy)
    able = [part for part in parts if way in part.ways]
    saved = []
    for part in able:
        plain, fitted = Learning(costs, part, Step()), Learning(costs, part, EXACT[way](part))
        for name, value in plain.state.items():
            assert torch.equal(value, fitted.state[name]), (part.atoms, name)
        assert torch.equal(plain.drawn, fitted.drawn)
        saved.append(fitted.moved - plain.moved if way == "step-in-backward" else plain.kept - fitted.kept)
    assert bool(able) == (way not in METHODS[strategy].can.lacks)
    assert max(saved, default=1) > 0
    assert min(saved, default=0) >= 0


class OwnPiece(PieceModel):
    """Cannot run its segments again."""

    ways = ("micro-batch",)


class OwnCut(Cut):
    """Has its own pieces."""

    method = FedAvg

    def plain_part(self, item: WorkItem) -> Part:
        return replace(super().plain_part(item), piece_class=OwnPiece)


@pytest.mark.parametrize("named", ["recompute", "auto", "micro-batch"])
def test_a_way_that_pieces_of_ones_own_lack_is_refused_if_it_is_named(named: str) -> None:
    settings, blueprint = settings_of("fedavg", memory__fit=named), blueprint_of("convnet")
    cut = OwnCut(blueprint, cost_model_for(settings, blueprint, 0), settings)
    if named != "recompute":
        assert cut.needed_bytes(cut.whole) < cut.cost_model.bytes(whole_model(blueprint))
        return
    with pytest.raises(
        ValueError, match=r"memory\.fit = 'recompute': OwnPiece\.ways has no recompute; leave it out, or let"
    ):
        cut.part(cut.whole)
