"""SLT from pretraining to the last step, on the in-process grid; its equations by hand."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from helpers import (
    TRIO,
    RecordingGrid,
    a_blueprint,
    arrays_of,
    clients_of,
    digits,
    examples_of,
    few_digits,
    first_arrays,
    fleet_json,
    model_of,
    run_local,
    same,
    tiny_settings,
    training,
)
from safetensors.numpy import load_file
from torch.nn import functional as F

import piecework
from piecework.models.cascade import Blueprint, Cascade, unit_of
from piecework.models.variant import Variant, vary
from piecework.models.wide_prefix import WidePrefix
from piecework.models.width import shapes
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import cost_model_for
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.strategies import find_method
from piecework.strategies.cascade.slt.cut import indices_of
from piecework.strategies.cascade.slt.steps import allot, choose_ratios, round_weights
from piecework.training.examples import normalise

# ---- the steps, by hand


@pytest.mark.parametrize(
    ("most", "chosen"),  # the largest s in 64ths that fits with n full layers, from n = 1
    [
        ([16, 24, 20, 64], [16, 20, 20, 64]),  # none larger than that of the next step
        ([10, 64, 64], [10, 64]),  # the first step with s = 1 is the last one
        ([64, 64], [64]),
        ([16, 24, 32], [16, 24, 32]),  # the head is never full
        ([16, 24, 0], [16, 24]),  # the last layer stays narrow
        ([16, 0, 64], [0, 64]),
        ([0, 0], [0]),
    ],
)
def test_the_head_is_as_wide_as_fits_and_never_loses_channels(most: list[int], chosen: list[int]) -> None:
    assert choose_ratios(len(most), lambda n, s: s <= most[n - 1]) == chosen


def test_rounds_by_hand() -> None:
    added = round_weights("added", sizes=[10, 30, 70, 100], trained=[10, 25, 60, 40], ratio=0.25)
    assert added == [10, 20, 40, 30]
    # One round each, and of 16 more 1.6, 3.2, 6.4 and 4.8, of which the last and the first are rounded up.
    assert allot(added, 20) == [3, 4, 7, 6]
    trained = round_weights("trained", sizes=[10, 30, 70, 100], trained=[10, 30, 60, 30], ratio=0.25)
    assert trained == [0.25, 0.75 * 30 / 120, 0.75 * 60 / 120, 0.75 * 30 / 120]
    assert [round_weights(rule, [100], [100], 1.0) for rule in ("added", "trained")] == [[100], [1]]
    with pytest.raises(ValueError, match="num-rounds = 3 is too few for slt: pretraining and 3 steps need 4"):
        allot(added, 3)


# ---- the networks, by hand


def network(full: Blueprint, atoms: int, ratio: float) -> Blueprint:
    return vary(full, Variant(width=ratio, changes=(WidePrefix(atoms),)))


def filled(blueprint: Blueprint, arrays: dict[str, np.ndarray]) -> Cascade:
    model = Cascade(blueprint)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return model.eval()


def cut_out(full: Blueprint, narrow: Blueprint, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random arrays of the full model, and those of the narrow one in it."""
    rng = np.random.default_rng(seed)
    whole = {name: np.asarray(rng.random(shape), np.float32) for name, shape in shapes(full).items()}
    return whole, {
        name: whole[name][np.ix_(*at)] if at else whole[name] for name, at in indices_of(full, narrow).items()
    }


def test_a_chain_of_convolutions_by_hand() -> None:
    """W_1 is whole, W^{1,s} reads all its channels, and the classifier the first channels of 3 x 3 cells."""
    full = build_blueprint("lenet5", num_classes=10, input_shape=(1, 28, 28), layout="caffe")
    narrow = network(full, 1, 0.25)
    whole, own = cut_out(full, narrow)
    w1, w2, fc1, fc2 = (
        whole["atoms.0.conv.weight"],
        whole["atoms.1.conv.weight"],
        whole["head.fc1.weight"],
        whole["head.fc2.weight"],
    )
    cells = fc1.shape[1] // 50
    by_hand = [w1, w2[:12, :20], fc1[:125, : 12 * cells], fc2[:, :125]]
    assert all(np.array_equal(one, other) for one, other in zip(own.values(), by_hand, strict=True))
    x = torch.rand(2, 1, 28, 28)
    z = F.max_pool2d(F.relu(F.conv2d(x, torch.from_numpy(w1))), 2)
    z = F.max_pool2d(F.relu(F.conv2d(z, torch.from_numpy(w2[:12]))), 2).flatten(1)
    expected = F.relu(z @ torch.from_numpy(by_hand[2]).T) @ torch.from_numpy(fc2[:, :125]).T
    torch.testing.assert_close(filled(narrow, own)(x), expected)


@pytest.mark.parametrize("name", ["preresnet20", "resnet18"])
def test_a_shortcut_passes_on_the_first_channels(name: str) -> None:
    """The block behind the stem: an identity, whose input has all channels and whose output has a quarter."""
    full = build_blueprint(name, num_classes=10, input_shape=(3, 32, 32), batch_norm="frozen")
    narrow = network(full, 1, 0.25)
    _, own = cut_out(full, narrow)
    block = filled(narrow, own).atoms[1]
    channels = full.atoms[0].shape[0]
    x = torch.randn(2, channels, 8, 8)
    given = x.clone()
    with torch.no_grad():
        found = block(x)
        if name == "resnet18":
            z = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
            expected = F.relu(z + x[:, : channels // 4])
        else:
            expected = block.conv2(F.relu(block.bn2(block.conv1(F.relu(block.bn1(x)))))) + x[:, : channels // 4]
    torch.testing.assert_close(found, expected)
    assert torch.equal(x, given)


def test_an_lstm_has_the_first_units_of_each_gate() -> None:
    full = build_blueprint("lstm-imdb", num_classes=2, input_shape=(20,))
    narrow = network(full, 1, 0.5)
    indices = indices_of(full, narrow)["atoms.1.lstm.weight_ih_l0"]
    assert indices[0].tolist() == [256 * gate + unit for gate in range(4) for unit in range(128)]
    assert indices[1].tolist() == list(range(64))
    assert Cascade(narrow)(torch.zeros(2, 20, dtype=torch.int64)).shape == (2, 1)


def test_behind_all_atoms_the_head_alone_is_narrow() -> None:
    full = build_blueprint("vgg11", num_classes=10, input_shape=(3, 32, 32), width=0.25)
    found, whole = shapes(network(full, 8, 0.5)), shapes(full)
    assert [name for name in whole if found[name] != whole[name]] == [
        f"head.fc{n}.{kind}" for n in (1, 2, 3) for kind in ("weight", "bias") if (n, kind) != (3, "bias")
    ]
    assert found["head.fc1.weight"] == (64, 128)
    assert found["head.fc3.weight"] == (10, 64)


@pytest.mark.parametrize("atoms", [0, 6])
def test_a_message_may_ask_for_no_other_network(atoms: int) -> None:
    with pytest.raises(ValueError, match="full_atoms"):
        vary(a_blueprint(), Variant.from_values({"width": 0.5, "full_atoms": atoms}))


def test_what_passes_its_input_on_is_refused() -> None:
    settings = tiny_settings(strategy="slt", model="vit", num_rounds=20)
    full = build_blueprint("vit", num_classes=10, input_shape=(3, 32, 32))
    cut = find_method("slt").make_cut(full, cost_model_for(settings, full), settings)
    with pytest.raises(
        ValueError,
        match="vit cannot be narrowed behind full atoms: atom 'encoder1' passes on the channels of its input",
    ):
        cut.require_model()


# ---- runs

SMALL: dict[str, Any] = TRIO | {
    "strategy": "slt",
    "num_rounds": 10,
    "training__local_iterations": 2,
    "architecture__batch_norm": "running",
}
POOR = fleet_json(poor=0.6)
MIXED = fleet_json(rich=1.2, some=0.75, poor=0.6)
STAGES = ["pretraining", *(f"step {n}" for n in range(1, 6))]


def recorded(folder: Path, **settings: Any) -> tuple[RunDir, RecordingGrid]:
    run = run_local(folder, RecordingGrid, **SMALL | settings)
    return run, RecordingGrid.last


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RecordingGrid]:
    return recorded(tmp_path_factory.mktemp("alike"), fleet=POOR, evaluation__on_clients_every=1)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RecordingGrid]:
    return recorded(tmp_path_factory.mktemp("mixed"), fleet=MIXED)


def of_round(messages: list[Any], number: int) -> list[dict[str, np.ndarray]]:
    return [arrays_of(m) for m in training(messages) if m.metadata.group_id == str(number)]


@pytest.mark.slow
def test_steps_follow_one_another_within_the_budget(alike: tuple[RunDir, RecordingGrid]) -> None:
    records = alike[0].rounds()
    assert list(dict.fromkeys(record["stage"] for record in records)) == STAGES
    ratios = [next(group)["width"] for _, group in groupby(records, key=lambda record: record["stage"])]
    assert ratios[0] == ratios[1] < ratios[-1] == 1
    assert ratios == sorted(ratios)
    for record in records:
        n = STAGES.index(record["stage"])
        assert (record["full_atoms"], record["steps"]) == (n, 5)
        assert set(record["frozen_atoms"].values()) == {max(0, n - 1)}
        for client in record["clients"]:
            assert client["status"] == "ok"
            assert client["pieces"] == [list(range(max(0, n - 1), 5))]
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
            assert 0 < client["evaluation_peak"] <= client["evaluation_predicted"] <= client["budget"]


def test_no_larger_head_fits(alike: tuple[RunDir, RecordingGrid]) -> None:
    """Of each step; or the next step's is as large."""
    budget = clients_of(alike[0])[0]["budget"]
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}"})
    model = a_blueprint(batch_norm="running")
    cut = find_method("slt").make_cut(model, cost_model_for(settings, model), settings).fit(budget, budget)
    chosen = [*cut.chosen]
    assert (
        chosen == [r["width"] for _, g in groupby(alike[0].rounds(), key=lambda r: r["stage"]) for r in [next(g)]][1:]
    )
    for n, (ratio, following) in enumerate(zip(chosen, [*chosen[1:], 1.0], strict=True), start=1):
        assert cut.needed_of(n, ratio) <= budget
        assert ratio == following or cut.needed_of(n, ratio + 1 / 64) > budget


def test_what_travels(alike: tuple[RunDir, RecordingGrid]) -> None:
    """Frozen atoms are not sent for training; full atoms have all channels, and the head its first ones."""
    run, grid = alike
    full = shapes(a_blueprint(batch_norm="running"))
    for record in run.rounds():
        n, ratio = STAGES.index(record["stage"]), record["width"]
        expected = {f"atoms.{atom}" for atom in range(max(0, n - 1), 5)} | {"head"}
        channels = [16, 16, 32, 32, 64]
        kept = [c if atom < n else max(1, int(c * ratio)) for atom, c in enumerate(channels)]
        for down, up in zip(
            of_round(grid.sent, record["round"]), of_round(grid.received, record["round"]), strict=True
        ):
            assert {unit_of(name) for name in down} == {unit_of(name) for name in up} == expected
            for atom in range(max(0, n - 1), 5):
                inputs = kept[atom - 1] if atom else 1
                for arrays in (down, up):
                    assert arrays[f"atoms.{atom}.conv.weight"].shape == (kept[atom], inputs, 3, 3)
                    assert arrays[f"atoms.{atom}.bn.running_mean"].shape == (kept[atom],)
            assert up["head.fc.weight"].shape == (10, 4 * kept[4])
            assert full["head.fc.weight"] == (10, 4 * 64)


def means_by_hand(
    before: dict[str, np.ndarray], replies: list[Any], number: int
) -> tuple[dict[str, np.ndarray], set[str]]:
    """The full model after a round: of each entry the mean over the clients that sent it, by their examples."""
    answers = [m for m in training(replies) if m.metadata.group_id == str(number)]
    after, trained = {name: array.copy() for name, array in before.items()}, set[str]()
    sums: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    for message in answers:
        for name, array in arrays_of(message).items():
            if array.dtype != np.float32:
                continue
            trained.add(name)
            total = sums.setdefault(name, np.zeros(before[name].shape))
            weight = weights.setdefault(name, np.zeros(before[name].shape))
            if name == "head.fc.weight":  # 4 cells of each of 64 channels, the channels outermost
                place: Any = (slice(None), slice(array.shape[1]))
            else:
                place = tuple(slice(size) for size in array.shape)
            total[place] += examples_of(message) * array.astype(np.float64)
            weight[place] += examples_of(message)
    for name, total in sums.items():
        sent = weights[name] > 0
        after[name][sent] = (total[sent] / weights[name][sent]).astype(np.float32)
    return after, trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_the_models_of_a_run_by_hand(kind: str, request: pytest.FixtureRequest) -> None:
    """From the initial model to the last one: what a round did not train stays as it is."""
    run, grid = request.getfixturevalue(kind)
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}"})
    model = first_arrays(settings)
    for record in run.rounds():
        for down in of_round(grid.sent, record["round"]):
            for name in [name for name in down if not name.endswith("tracked")]:
                array = down[name]
                np.testing.assert_allclose(array, model[name][tuple(map(slice, array.shape))], rtol=0, atol=1e-6)
        model, trained = means_by_hand(model, grid.received, record["round"])
        frozen = min(record["frozen_atoms"].values())
        assert {unit_of(name) for name in trained} == {*(f"atoms.{atom}" for atom in range(frozen, 5)), "head"}
    last = model_of(run)
    for name in [name for name in model if not name.endswith("tracked")]:
        np.testing.assert_allclose(last[name], model[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_who_has_more_memory_trains_more_layers(mixed: tuple[RunDir, RecordingGrid], tmp_path: Path) -> None:
    run, _ = mixed
    frozen = {record["stage"]: record["frozen_atoms"] for record in run.rounds()}
    assert [each["2"] for each in frozen.values()] == [0, 0, 1, 2, 3, 4]  # the poorest
    assert all(each["0"] <= each["1"] <= each["2"] for each in frozen.values())
    assert any(each["0"] < each["1"] < each["2"] for each in frozen.values())
    for record in run.rounds():
        for client in record["clients"]:
            first = record["frozen_atoms"][str(client["client"])]
            assert client["pieces"] == [list(range(first, 5))]
            assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
    one = run_local(tmp_path, **SMALL | {"fleet": MIXED, "slt__depth": "one"})
    assert [record["width"] for record in one.rounds()] == [record["width"] for record in run.rounds()]
    for record in one.rounds():
        assert set(record["frozen_atoms"].values()) == {max(0, STAGES.index(record["stage"]) - 1)}


class Stops(LocalGrid):
    """A grid that fails when a round begins."""

    at: ClassVar[int]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if any(m.metadata.group_id == str(self.at) for m in training(messages)):
            raise RuntimeError("the server is gone")
        return super().push_messages(messages)


def stopped(folder: Path, at: int, **settings: Any) -> RunDir:
    """A run that ends before a round."""
    Stops.at = at
    with pytest.raises(RuntimeError, match="the server is gone"):
        run_local(folder, Stops, **settings)
    return RunDir(folder / "run")


def test_the_network_of_the_step_is_evaluated(alike: tuple[RunDir, RecordingGrid], tmp_path: Path) -> None:
    """After the first round of a step, and at the end of the run, when all channels are trained."""
    records, data, full = alike[0].rounds(), digits(), a_blueprint(batch_norm="running")
    number = next(record["round"] for record in records if record["stage"] == "step 2")
    part = stopped(tmp_path, number + 1, **SMALL | {"fleet": POOR})
    ratio = records[number - 1]["width"]
    assert 0 < ratio < 1
    narrow, arrays, initial = (
        network(full, 2, ratio),
        model_of(part),
        first_arrays(tiny_settings(**SMALL | {"dataset": "digits"})),
    )
    assert same(
        arrays, model_of(alike[0]), [name for name in arrays if name.startswith("atoms.0.")]
    )  # frozen since then
    untouched = int(64 * ratio)
    assert np.array_equal(arrays["atoms.4.conv.weight"][untouched:], initial["atoms.4.conv.weight"][untouched:])
    assert not np.array_equal(arrays["atoms.4.conv.weight"][:untouched], initial["atoms.4.conv.weight"][:untouched])
    own = {name: arrays[name][np.ix_(*at)] if at else arrays[name] for name, at in indices_of(full, narrow).items()}
    images = normalise(data.test_inputs[:100], data)
    with torch.no_grad():
        right = filled(narrow, own)(images).argmax(1).numpy() == data.test_labels[:100]
    assert right.mean() == pytest.approx(records[number - 1]["accuracy"])
    found = piecework.load(alike[0].path).predict(data.test_inputs[:100]).classes.numpy()
    assert (found == data.test_labels[:100]).mean() == pytest.approx(records[-1]["accuracy"])


MEASURED: dict[str, Any] = SMALL | {"fleet": MIXED, "architecture__batch_norm": "measured"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("whole"), **MEASURED)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["pretraining", "step 1", "step 5"])
def test_a_run_goes_on_as_if_it_had_not_stopped(at: str, whole: RunDir, tmp_path: Path) -> None:
    """Stopped before the last round of a step, which may be its first."""
    part = stopped(tmp_path, max(r["round"] for r in whole.rounds() if r["stage"] == at), **MEASURED)
    resumed = run_local(tmp_path, **MEASURED, resume_from=str(part.path))
    assert [r["accuracy"] for r in resumed.rounds()] == [r["accuracy"] for r in whole.rounds()]
    assert same(model_of(resumed), model_of(whole))
    assert same(load_file(resumed.path / "model.safetensors"), load_file(whole.path / "model.safetensors"))


def test_the_whole_network_is_trained_if_that_fits_everyone(tmp_path: Path) -> None:
    settings = TRIO | {"fleet": "unlimited", "architecture__batch_norm": "running"}
    run = run_local(tmp_path, strategy="slt", **settings)
    (record,) = run.rounds()
    assert (record["stage"], record["width"], record["steps"]) == ("pretraining", 1, 0)
    fedavg = run_local(tmp_path / "fedavg", strategy="fedavg", **settings)
    for one, other in zip(clients_of(run), clients_of(fedavg), strict=True):
        assert one["measured_peak"] == one["predicted_peak"] == other["measured_peak"]
        assert one["flops"] == other["flops"]


@pytest.mark.slow
def test_more_fits_with_memory_fit(alike: tuple[RunDir, RecordingGrid], tmp_path: Path) -> None:
    fitted = run_local(tmp_path, **SMALL | {"fleet": POOR, "memory__fit": "micro-batch,recompute"})
    first = fitted.rounds()[0]
    assert first["width"] > alike[0].rounds()[0]["width"]
    for record in fitted.rounds():
        for client in record["clients"]:
            assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
    assert {client["step"] for record in fitted.rounds() for client in record["clients"]} != {""}


@pytest.mark.slow
def test_a_plan_agrees_with_a_run(mixed: tuple[RunDir, RecordingGrid]) -> None:
    run, _ = mixed
    settings = tiny_settings(**SMALL | {"dataset": f"npz:{few_digits()}", "fleet": MIXED})
    found = make_plan(settings, ask(settings))
    assert [stage["stage"] for stage in found["fleet"]["stages"]] == STAGES
    assert found["coverage"]["says"] == ""
    names = [module["name"] for module in found["modules"]]
    assert names[0].endswith("of the channels")
    assert names[2].startswith("conv2, then ")
    for stage in found["fleet"]["stages"]:
        of_stage = [record for record in run.rounds() if record["stage"] == stage["stage"]]
        peaks = [client["measured_peak"] for record in of_stage for client in record["clients"]]
        assert (stage["peak_bytes"], stage["participation"]) == (max(peaks), 1)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"slt: training conv1 with 1/64 of the channels behind it needs [\d,]+ bytes, and the poorest"
    ):
        run_local(tmp_path, **SMALL | {"fleet": fleet_json(rich=1.5, poor=30_000)})
    with pytest.raises(ValueError, match="num-rounds = 5 is too few for slt: pretraining and 5 steps need 6"):
        run_local(tmp_path, **SMALL | {"fleet": POOR, "num_rounds": 5})
    with pytest.raises(ValueError, match="slt averages layers of all clients"):
        run_local(tmp_path, **SMALL | {"fleet": POOR, "architecture__batch_norm": "local"})
