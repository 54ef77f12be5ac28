"""FjORD: nets within nets, draws, self-distillation, nested means."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    FEW,
    TRIO,
    a_blueprint,
    arrays_of,
    average,
    fleet_json,
    model_of,
    run_local,
    tiny_settings,
    training,
)
from safetensors.numpy import load_file
from torch.nn import functional as F

from piecework import load
from piecework.device_profiles.fleet import load_fleet
from piecework.models.cascade import isolate_rng
from piecework.models.channels import channel_axes
from piecework.models.nested_norms import NestedNorms
from piecework.models.static_norms import is_statistic
from piecework.models.variant import Variant, vary
from piecework.models.width import shapes, sub_indices, take, take_first
from piecework.models.work_item import WorkItem
from piecework.models.zoo import build_blueprint
from piecework.planning import costs
from piecework.planning.part import whole_model
from piecework.planning.timing import work_seconds
from piecework.plans.plan import client_task, planner_for
from piecework.plans.question import ask
from piecework.strategies.width.fjord.client import NestedLoss
from piecework.strategies.width.fjord.server import FjORD, FjORDCut
from piecework.training.loop import PieceModel

FJORD = TRIO | {"strategy": "fjord", "heterofl__width_ratios": "1,0.5,0.25", "fleet": "spafl"}


@pytest.mark.parametrize("norms", [(1.0, 0.5), ()])
@pytest.mark.parametrize(("name", "shape"), [("convnet", (1, 8, 8)), ("lenet5", (1, 16, 16)), ("resnet18", (3, 8, 8))])
def test_a_narrow_net_is_made_of_the_first_channels(
    name: str, shape: tuple[int, ...], norms: tuple[float, ...]
) -> None:
    """Its logits are those of a model of that width with these weights and its own norms; gradients reach nothing else."""
    model = build_blueprint(name, num_classes=10, input_shape=shape, width=0.25, batch_norm="batch")
    full = vary(model, Variant(rounding="up", changes=(NestedNorms(norms),)))
    half = vary(model, Variant(width=0.5, rounding="up", changes=(NestedNorms(norms[1:]),)))
    with isolate_rng(4):
        piece = PieceModel(full, range(len(full.atoms)), "head", full.build_unit)
        z, y = torch.randn(6, *shape), torch.arange(6)
        for parameter in piece.parameters():  # so that the norms of the two nets differ
            parameter.data += 0.1 * torch.randn_like(parameter)
    indices = sub_indices(channel_axes(full), shapes(full), shapes(half), take_first)
    arrays = {f"{unit}.{k}": v for unit, module in piece.units().items() for k, v in module.state_dict().items()}

    def load(unit: str) -> torch.nn.Module:
        module = half.build_unit(unit)
        state = {
            k: torch.tensor(take(arrays[f"{unit}.{k}"].numpy(), indices[f"{unit}.{k}"])) for k in module.state_dict()
        }
        module.load_state_dict(state)
        return module

    small = PieceModel(half, range(len(half.atoms)), "head", load)
    nested = NestedLoss(piece, [half], distil=False)
    assert nested.level == 0
    torch.testing.assert_close(nested(z, y), F.cross_entropy(piece.logits(z), y))
    nested.level = 1
    torch.testing.assert_close(nested.narrow(z), small.logits(z), rtol=1e-4, atol=1e-5)
    nested(z, y).backward()
    F.cross_entropy(small.logits(z), y).backward()
    for unit, module in piece.units().items():
        for key, parameter in module.named_parameters():
            name_of, gradient = f"{unit}.{key}", parameter.grad
            if name_of not in indices:
                assert norms and gradient is None, "the norms of the full net"
                continue
            assert gradient is not None
            place = np.ix_(*indices[name_of])
            own = dict(small.units()[unit].named_parameters())[key].grad
            torch.testing.assert_close(gradient[place], own, rtol=1e-3, atol=1e-5)
            gradient[place] = 0
            assert not gradient.any()


def test_the_widest_net_teaches_the_others() -> None:
    full, half = (build_blueprint("lenet5", num_classes=10, input_shape=(1, 16, 16), width=w) for w in (0.5, 0.25))
    with isolate_rng(4):
        piece = PieceModel(full, range(2), "head", full.build_unit)
        z, y = torch.randn(6, 1, 16, 16), torch.arange(6)
    nested = NestedLoss(piece, [half], distil=True, level=1)
    with torch.no_grad():
        wide, narrow = piece.logits(z), nested.narrow(z)
        by_hand = F.cross_entropy(wide, y) - (wide.softmax(1) * narrow.log_softmax(1)).sum(1).mean()
        assert float(nested(z, y)) == pytest.approx(float(by_hand), rel=1e-5)


@pytest.mark.slow
def test_entries_are_averaged_over_the_clients_that_had_them(tmp_path: Path, grids: Callable[..., Any]) -> None:
    """Of 16 channels the first 4 from three clients, the next 4 from two, the others from one, weighted by examples."""
    grid = grids()
    fleet = fleet_json({"a": 1.0, "b": 0.5, "c": 0.25}, a=1.5, b=1.5, c=1.5)
    changes = {
        "data__partition": "dirichlet",
        "data__partition_balanced": False,
        "data__partition_alpha": 0.5,
        "fleet": fleet,
    }
    run_dir = run_local(tmp_path, grid, **FJORD | changes)
    name = "atoms.0.conv.weight"
    replies = {len(arrays_of(m)[name]): m for m in training(grid.last.received)}
    assert sorted(replies) == [4, 8, 16]
    counts = {size: m.content.metric_records["metrics"]["num-examples"] for size, m in replies.items()}
    assert len(set(counts.values())) > 1
    got = model_of(run_dir)[name]
    for channel in range(16):
        having = [size for size in replies if size > channel]
        weighted = sum(counts[s] * arrays_of(replies[s])[name][channel].astype(np.float64) for s in having)
        assert np.allclose(got[channel], weighted / sum(counts[s] for s in having), atol=1e-7)


@pytest.mark.slow
def test_norms_are_averaged_over_the_clients_that_trained_their_net(tmp_path: Path, grids: Callable[..., Any]) -> None:
    """The clients of ratios 1, 0.5 and 0.25 have the norms of these nets and of those within them."""
    grid = grids()
    run_dir = run_local(
        tmp_path, grid, **FJORD | {"fleet": fleet_json({"a": 1.0, "b": 0.5, "c": 0.25}, a=1.5, b=1.5, c=1.5)}
    )
    replies = {len(arrays_of(m)["atoms.0.conv.weight"]): m for m in training(grid.last.received)}
    model = model_of(run_dir)
    for norm, size, clients in (("weight", 16, [16]), ("weight_0_5", 8, [16, 8]), ("weight_0_25", 4, [16, 8, 4])):
        name = f"atoms.0.bn.{norm}"
        assert [
            channels for channels in sorted(replies, reverse=True) if name in arrays_of(replies[channels])
        ] == clients
        assert model[name].shape == (size,)
        assert np.allclose(model[name], average([replies[c] for c in clients], name), atol=1e-7)
    assert not np.array_equal(model["atoms.0.bn.weight"][:4], model["atoms.0.bn.weight_0_25"])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"fjord__norms": "shared"}, {"model": "lenet5", "dataset": "digits32"}])
def test_the_widest_trained_net_is_served(tmp_path: Path, changes: dict[str, Any]) -> None:
    """No client can train more than half of the channels. LeNet has no norms, and shared ones are those of the widest net."""
    fleet = fleet_json({"b": 0.5, "c": 0.25}, b=2.5, c=2.5)
    changes = FJORD | {"fleet": fleet, "training__local_iterations": 1} | changes
    run_dir = run_local(tmp_path, **changes)
    saved, trained = load_file(run_dir.path / "model.safetensors"), model_of(run_dir)
    name, shape = changes.get("model", "convnet"), (1, 8, 8) if changes["dataset"] == FEW else (1, 32, 32)
    model = build_blueprint(name, num_classes=10, input_shape=shape, batch_norm="batch")
    half = shapes(vary(model, Variant(width=0.5, rounding="up")))
    indices = sub_indices(channel_axes(model), shapes(model), half, take_first)
    own = {name.replace("_0_5", ""): name for name in trained if name.endswith("_0_5")}
    assert bool(own) == (name == "convnet" and "fjord__norms" not in changes)
    assert half.keys() == {name for name in saved if not is_statistic(name)}
    for array in half:
        expected = trained[own[array]] if array in own else take(trained[array], indices[array])
        np.testing.assert_array_equal(saved[array], expected)
    assert load(run_dir.path)(torch.zeros(2, *model.input_shape)).shape == (2, 10)


def test_shared_norms_are_an_option(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **FJORD | {"fjord__norms": "shared"})
    assert not [name for name in model_of(run_dir) if "weight_0_" in name]


@pytest.mark.slow
def test_a_ratio_is_drawn_for_every_client_and_round(tmp_path: Path) -> None:
    records = run_local(tmp_path / "a", **FJORD | {"fjord__sampling": "round", "num_rounds": 8}).rounds()
    drawn = [ratio for record in records for ratio in record["width_ratios"].values()]
    assert set(drawn) == {1.0, 0.5, 0.25}
    again = run_local(tmp_path / "b", **FJORD | {"fjord__sampling": "round", "num_rounds": 2}).rounds()
    assert [record["width_ratios"] for record in again] == [record["width_ratios"] for record in records[:2]]


@pytest.mark.slow
def test_a_ratio_is_drawn_for_every_batch_of_those_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[tuple[int, int]] = []
    original = NestedLoss.__call__

    def noted(self: NestedLoss, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if z.device.type == "cpu" and type(z) is torch.Tensor:
            levels.append((len(self.nets), self.level))
        return original(self, z, y)

    monkeypatch.setattr(NestedLoss, "__call__", noted)
    fleet = fleet_json({"a": 1.0, "b": 0.5, "c": 0.25}, a=1.5, b=1.5, c=1.5)
    run_local(tmp_path, **FJORD | {"fleet": fleet, "training__local_iterations": 12})
    assert {level for nets, level in levels if nets == 2} == {0, 1, 2}
    assert {level for nets, level in levels if nets == 1} == {0, 1}
    assert {level for nets, level in levels if nets == 0} == {0}


@pytest.mark.parametrize("distil", [False, True])
def test_a_plan_expects_the_mean_over_the_nets_that_batches_draw(distil: bool) -> None:
    """Of three nets, two behind a client of ratio 1 and none behind one of 0.25, whose batches all train the same."""
    changes = {
        "fleet": fleet_json(rich=3.0, poor=0.2),
        "clients": 2,
        "fjord__distillation": distil,
        "dataset": "digits",
    }
    settings = tiny_settings(**FJORD | changes | {"training__batch_size": 8, "training__local_iterations": 3})
    planner, states = planner_for(load_fleet(settings.fleet), settings, ask(settings))
    (rich, poor), cut = states[0], planner.cut
    (own,) = planner.parts(0, rich, 0.0, 1, 0)
    flops = [cut.cost_model.trace(cut.step(0, drawn)).flops for drawn in range(3)]
    assert (flops[0] > flops[1] > flops[2]) is not distil, "with distillation a narrow net runs beside the widest"
    task = client_task(planner, 0, 0, rich, 0.0, 100)
    assert task.flops == pytest.approx(3 * sum(flops) / 3)
    certain = client_task(planner, 0, 1, poor, 0.0, 100)
    assert certain.flops == 3 * cut.cost_model.trace(cut.step(2, 0)).flops
    widest = work_seconds(cut, cut.cost_model, (own,), [24], 100, rich, task.message_bytes)
    assert widest - task.seconds == pytest.approx((3 * flops[0] - sum(flops)) / rich.flops_per_second)
    assert cut.bytes(WorkItem(own.atoms, variant=cut.variant_of(0))) == max(
        cut.cost_model.bytes(cut.step(0, drawn)) for drawn in range(3)
    )


@pytest.mark.slow
@pytest.mark.parametrize("distil", [False, True])
@pytest.mark.parametrize(("model", "data"), [("convnet", "digits"), ("lenet5", "digits32")])
def test_prices_are_what_the_step_takes_that_takes_most(tmp_path: Path, model: str, data: str, distil: bool) -> None:
    """Of LeNet's, at a small batch, that is a narrow net's: it holds copies of parts of large arrays."""
    changes = {"model": model, "dataset": data, "training__batch_size": 4, "heterofl__width_ratios": "1,0.95,0.5"}
    changes |= {"fjord__distillation": distil, "training__local_iterations": 12, "fleet": fleet_json(rich=3.0)}
    (record,) = run_local(tmp_path, **FJORD | changes).rounds()
    assert all(c["measured_peak"] == c["predicted_peak"] for c in record["clients"])
    whole = [c["flops"] for c in record["clients"]]
    assert len(set(whole)) > 1, "nets are drawn, and what they execute is counted"


def test_nested_norms_keep_no_running_statistics() -> None:
    model = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="running")
    with pytest.raises(ValueError, match="batch_norm = 'running': nested nets have different statistics"):
        vary(model, Variant(width=0.5, changes=(NestedNorms((0.5,)),)))


def test_running_statistics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"architecture\.batch-norm = 'running': fjord's nets have different statistics, use measured"
    ):
        run_local(tmp_path, **FJORD | {"architecture__batch_norm": "running"})


def test_following_the_channels_is_no_part_of_a_steps_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest net's step is that of its model alone, whether or not the channels were followed before."""
    monkeypatch.setattr(costs, "_TRACED", {})
    settings = tiny_settings(strategy="fjord", heterofl__width_ratios="1,0.5")
    blueprint = a_blueprint()
    cut = FjORDCut(blueprint, costs.cost_model_for(settings, blueprint), settings, method=FjORD)
    channel_axes.cache_clear()
    nested, alone = (cut.cost_model.trace(part).flops for part in (cut.step(0, 0), whole_model(blueprint)))
    again = cut.cost_model.trace(cut.step(0, 1)).flops
    channel_axes.cache_clear()
    costs._TRACED.clear()
    assert (nested, cut.cost_model.trace(cut.step(0, 1)).flops) == (alone, again)


@pytest.mark.slow
def test_a_uniform_draw(tmp_path: Path, grids: Callable[..., Any]) -> None:
    """U(0.4, 0.6), in 32 equal parts: the 16 channels of a convnet become ceil(16 p), which is 7 to 10."""
    changes = {"fjord__sampling": "uniform", "heterofl__width_ratios": "0.6,0.4"}
    cut = FjORDCut.__new__(FjORDCut)
    cut.settings = tiny_settings(**FJORD | changes)
    assert len(cut.ratios) == 32
    assert np.allclose(np.diff(cut.ratios), -0.2 / 32)
    assert (max(cut.ratios), min(cut.ratios)) == (pytest.approx(0.6 - 0.1 / 32), pytest.approx(0.4 + 0.1 / 32))
    grid = grids()
    records = run_local(tmp_path, grid, **FJORD | changes | {"num_rounds": 6, "training__local_iterations": 1}).rounds()
    drawn = [ratio for record in records for ratio in record["width_ratios"].values()]
    assert len(set(drawn)) > 12
    sent = [len(arrays_of(m)["atoms.0.conv.weight"]) for m in training(grid.last.sent)]
    assert set(sent) == {7, 8, 9, 10}
    assert sorted(sent) == sorted(int(np.ceil(16 * ratio)) for ratio in drawn)
    for record in records:
        assert all(each["measured_peak"] == each["predicted_peak"] for each in record["clients"])
