"""SplitMix: ensembles of narrow nets, on the in-process grid and by hand."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    TRIO,
    arrays_of,
    average,
    clients_of,
    digits,
    fleet_json,
    model_of,
    numpy_of,
    run_local,
    same,
    training,
)
from torch.nn import functional as F

from piecework import load
from piecework.models.cascade import Cascade, initial_state
from piecework.models.mix import mix_nets, net_of
from piecework.models.zoo import build_blueprint
from piecework.server_app.records import read_checkpoint
from piecework.strategies.width.splitmix.client import mixed_loss
from piecework.training.examples import normalise
from piecework.training.loop import PieceModel

# Four nets of a quarter of the channels; clients train three, two and one of them.
SMALL: dict[str, Any] = TRIO | {
    "strategy": "splitmix",
    "splitmix__width_ratio": 0.25,
    "training__local_iterations": 2,
    "fleet": fleet_json(rich=0.85, some=0.65, poor=0.45),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [("convnet", (1, 8, 8)), ("resnet18", (3, 32, 32)), ("deit-tiny", (3, 32, 32)), ("lstm-imdb", (5,))],
)
def test_a_mix_is_the_mean_of_its_nets(name: str, shape: tuple[int, ...]) -> None:
    base = build_blueprint(name, num_classes=10, input_shape=shape, width=0.25, batch_norm="batch")
    whole = Cascade(mix_nets(base, [4, 7])).eval()
    x = torch.randint(1000, (3, *shape)) if base.vocabulary else torch.rand(3, *shape)
    found = []
    for net in (4, 7):
        one = Cascade(base).eval()
        state = {n: v for n, v in whole.state_dict().items() if net_of(n.removeprefix("module.")) == net}
        one.load_state_dict({n.replace(f".{net}.", ".", 1): v for n, v in state.items()})
        found.append(one(x))
    torch.testing.assert_close(whole(x), (found[0] + found[1]) / 2)
    assert (found[0] - found[1]).abs().max() > 1e-3  # they start differently


def test_a_scaler_begins_with_small_weights_and_divides_outputs() -> None:
    """LeNet-5 at a = 1/4 has no norms: two convolutions and two linear layers, of which the first begins as without."""
    base = build_blueprint("lenet5", num_classes=10, input_shape=(1, 32, 32), width=0.25)
    plain, scaled = (dict(initial_state(mix_nets(base, [0], ratio), 1)) for ratio in (1.0, 0.25))
    first, last = "atoms.0.0.conv.weight", "head.0.fc2.weight"
    assert [*plain] == [first, "atoms.1.0.conv.weight", "head.0.fc1.weight", last]
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value if name == first else value / 2)
    by_hand = Cascade(mix_nets(base, [0]))
    by_hand.load_state_dict({name: value if name == last else value / 0.25 for name, value in scaled.items()})
    whole = Cascade(mix_nets(base, [0], 0.25))
    whole.load_state_dict(scaled)
    x = torch.rand(3, 1, 32, 32)
    torch.testing.assert_close(whole(x), by_hand(x))
    torch.testing.assert_close(whole.eval()(x), by_hand(x))


@pytest.mark.slow
def test_nets_of_a_run_are_rescaled_unless_the_scaler_is_off(tmp_path: Path) -> None:
    """A net that no client trained has the weights with which it began."""
    fleet = {"fleet": fleet_json(poor=0.45), "clients_per_round": 1}
    runs = [run_local(tmp_path / str(on), **SMALL | fleet | {"splitmix__scaler": on}) for on in (True, False)]
    (trained,) = runs[0].rounds()[0]["nets"].values()
    scaled, plain = map(model_of, runs)
    other = next(net for net in range(4) if net not in trained)
    np.testing.assert_allclose(scaled[f"atoms.1.{other}.conv.weight"], plain[f"atoms.1.{other}.conv.weight"] / 2)
    assert np.array_equal(scaled[f"atoms.0.{other}.conv.weight"], plain[f"atoms.0.{other}.conv.weight"])


def test_one_step_is_a_step_of_each() -> None:
    base = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), width=0.25, batch_norm="batch")
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6)
    blueprint = mix_nets(base, [0, 1])
    state = dict(initial_state(blueprint, 3))

    def load_unit(unit: str) -> torch.nn.Module:
        module = blueprint.build_unit(unit)
        module.load_state_dict({n[len(unit) + 1 :]: v for n, v in state.items() if n.startswith(f"{unit}.")})
        return module

    piece = PieceModel(blueprint, range(5), "head", load_unit)
    value = mixed_loss([piece])(x, y)
    value.backward()
    by_net = 0.0
    for net in (0, 1):
        one = Cascade(base)
        one.load_state_dict({n.replace(f".{net}.", ".", 1): v for n, v in state.items() if net_of(n) == net})
        loss = F.cross_entropy(one(x), y)
        loss.backward()
        by_net += float(loss.detach())
        for name, parameter in one.named_parameters():
            unit, rest = name.split(".", 1) if name.startswith("head") else (name[:7], name[8:])
            mine = piece.units()[unit].get_parameter(f"{net}.{rest}").grad
            torch.testing.assert_close(mine, parameter.grad)
    assert float(value.detach()) == pytest.approx(by_net)


@pytest.mark.slow
def test_clients_train_as_many_nets_as_fit(tmp_path: Path, grids: Callable[..., Any]) -> None:
    grid = grids()
    run_dir = run_local(tmp_path, grid, **SMALL)
    (record,) = run_dir.rounds()
    assert [len(nets) for nets in record["nets"].values()] == [3, 2, 1]
    for client in clients_of(run_dir):
        assert client["status"] == "ok"
        assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
    assert 1.5 < record["train_loss"] < 3  # of a net, not of all together
    after, replies = model_of(run_dir), training(grid.last.received)
    for reply, nets in zip(replies, record["nets"].values(), strict=True):
        assert {net_of(name) for name in arrays_of(reply)} == set(nets)
    trained = {net for nets in record["nets"].values() for net in nets}
    for name, array in after.items():
        if net_of(name) in trained:
            np.testing.assert_allclose(array, average(replies, name), rtol=1e-6)


def test_a_fleet_may_say_how_many_nets_each_device_gets(tmp_path: Path) -> None:
    """Nets are quarters: of a half there are two, of a hundredth there is one."""
    fleet = fleet_json({"half": 0.5, "minimum": 0.01, "all": 1.0}, half=9.0, minimum=9.0, all=9.0)
    run_dir = run_local(tmp_path, **SMALL | {"fleet": fleet})
    assert [len(nets) for nets in run_dir.rounds()[0]["nets"].values()] == [2, 1, 4]


def test_all_nets_get_their_turn(tmp_path: Path) -> None:
    poor = SMALL | {"fleet": fleet_json(poor=0.45), "num_rounds": 4}
    rounds = run_local(tmp_path, **poor).rounds()
    counts = Counter(net for record in rounds for nets in record["nets"].values() for net in nets)
    assert counts == {0: 3, 1: 3, 2: 3, 3: 3}


def test_networks_that_no_client_trained_stay_as_they_were(tmp_path: Path) -> None:
    two = run_local(tmp_path, **SMALL | {"fleet": fleet_json(poor=0.45), "num_rounds": 2})
    second = {nets[0] for nets in two.rounds()[1]["nets"].values()}
    still = set(range(4)) - second
    assert still
    before, after = numpy_of(read_checkpoint(two.checkpoint_paths()[0]).arrays), model_of(two)
    assert same(before, after, [name for name in before if net_of(name) in still])
    assert not same(before, after, [name for name in before if net_of(name) in second])


def test_the_model_of_a_run_can_be_used(tmp_path: Path) -> None:
    run = run_local(tmp_path, **SMALL, evaluation__on_clients_every=1)
    assert run.rounds()[-1]["clients_evaluated"] == 3
    data = digits()
    model = load(run.path, normalise=False)
    with torch.no_grad():
        assert model(normalise(data.test_inputs[:5], data)).shape == (5, 10)


def test_local_norms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"architecture\.batch-norm = 'local': it does not work with splitmix"):
        run_local(tmp_path, **SMALL, architecture__batch_norm="local")
