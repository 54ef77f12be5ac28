"""DepthFL: its loss and FedDyn's terms by hand, exits of all models, runs of clients of different depth."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SPEEDS, TRIO, clients_of, digits, first_arrays, fleet_json, model_of, run_local, tiny_settings
from safetensors.numpy import load_file
from settings_helpers import settings_with

from piecework import load
from piecework.commands.options import read_preset
from piecework.models.basic_layers import blocks_of
from piecework.models.cascade import num_logits, unit_of
from piecework.models.depth_exits import ExitCascade, Exits, exits_of, with_exits
from piecework.models.variant import Variant
from piecework.models.zoo import MODELS, build_blueprint
from piecework.planning.costs import cost_model_for
from piecework.plans.plan import make_plan
from piecework.plans.question import PlanQuestion, ask
from piecework.server_app.local_grid import LocalGrid
from piecework.strategies.cascade.depthfl.client import (
    add_dynamic_terms,
    distillation_weight,
    exits_loss,
    item_of_depth,
)
from piecework.strategies.cascade.depthfl.server import DepthFL, DepthFLCut
from piecework.training.examples import normalise
from piecework.training.settings import Settings

# The convnet has the blocks (0, 1), (2, 3) and (4,), with the exits 5 and 6 behind atoms 1 and 3.
SMALL: dict[str, Any] = TRIO | {
    "strategy": "depthfl",
    "training__local_iterations": 2,
    "num_rounds": 2,
    "fleet": fleet_json(rich=1.8, some=1.45, poor=1.2),
}


def test_the_weight_of_distillation_rises() -> None:
    assert distillation_weight(150, 300) == pytest.approx(math.exp(-1.25))
    assert distillation_weight(1, 10) == pytest.approx(math.exp(-4.05))
    assert distillation_weight(300, 300) == distillation_weight(900, 300) == 1.0


def test_the_loss_of_two_exits_by_hand() -> None:
    """p = (1/2, 1/2) and q = (3/4, 1/4), class 0: ln 2 - ln 3/4, and half of KL(q || p) + KL(p || q)."""
    logits = [torch.zeros(1, 2), torch.tensor([[math.log(3), 0.0]])]
    plain = math.log(2) - math.log(3 / 4)
    q_p = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    p_q = 1 / 2 * math.log(2 / 3) + 1 / 2 * math.log(2)
    y = torch.tensor([0])
    assert exits_loss(logits, y, 0.5).item() == pytest.approx(plain + 0.5 * (q_p + p_q), rel=1e-6)
    assert exits_loss(logits, y, 0.0).item() == pytest.approx(plain, rel=1e-6)
    assert exits_loss(logits[:1], y, 0.5).item() == pytest.approx(math.log(2), rel=1e-6)


def test_three_exits_learn_from_the_mean_of_the_others() -> None:
    """Of the third, the same as the first: each pair counts half, and what is taught is a constant."""
    a, b = torch.zeros(1, 2, requires_grad=True), torch.tensor([[math.log(3), 0.0]], requires_grad=True)
    exits_loss([a, b, torch.zeros(1, 2)], torch.tensor([0]), 1.0).backward()  # type: ignore[no-untyped-call]
    # d/da: CE gives p - y = (-1/2, 1/2); KL(q || p) gives p - q = (-1/4, 1/4), half of it; the third agrees
    torch.testing.assert_close(a.grad, torch.tensor([[-0.5 - 0.125, 0.5 + 0.125]]))
    # d/db: CE gives (-1/4, 1/4); KL of the two others, (1/4, -1/4) each, half of it
    torch.testing.assert_close(b.grad, torch.tensor([[0.0, 0.0]]), rtol=0, atol=1e-7)


def test_feddyns_gradient_by_hand() -> None:
    """0.5 + 0.1 x 2 - 0.3 = 0.4."""
    found = add_dynamic_terms(torch.tensor([2.0]), torch.tensor([-0.3]), 0.1, torch.tensor([0.5]))
    torch.testing.assert_close(found, torch.tensor([0.4]))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_exits(name: str) -> None:
    shapes = {"vit": (1, 32, 32), "cnn4": (3, 56, 56), "cnn3": (3, 16, 16), "lstm-imdb": (12,), "convnet": (1, 8, 8)}
    blueprint = build_blueprint(name, num_classes=7, input_shape=shapes.get(name, (1, 32, 32)), width=0.125)
    blocks = blocks_of(blueprint)
    model = with_exits(blueprint, blocks)
    assert list(exits_of(model)) == [block[-1] for block in blocks[:-1]]
    tokens = torch.int64 if model.vocabulary else torch.float32
    with torch.no_grad():
        assert ExitCascade(model).eval()(torch.ones(2, *model.input_shape).to(tokens)).shape == (2, 7)


def test_exits_of_resnet18() -> None:
    """Behind 64 channels: attention, and three steps to 512; 10 classes."""
    model = with_exits(
        resnet := build_blueprint("resnet18", num_classes=10, input_shape=(3, 32, 32)), blocks_of(resnet)
    )

    def separable(a: int, b: int) -> int:
        return 9 * a + a * a + 2 * a + 9 * a + a * b + 2 * b

    first = separable(64, 64) + 2 * 64 + separable(64, 128) + separable(128, 256) + separable(256, 512) + 5130
    built = model.build_unit(f"atoms.{len(resnet.atoms)}")
    assert sum(p.numel() for p in built.parameters()) == first
    assert [
        item_of_depth(model, Variant(changes=(Exits(tuple(blocks_of(resnet))),)), d).head for d in (1, 2, 3, 4)
    ] == [
        *(f"atoms.{len(resnet.atoms) + n}" for n in range(3)),
        "head",
    ]


@pytest.mark.slow
def test_clients_train_as_deep_as_they_can(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL)
    for record in run_dir.rounds():
        assert record["depths"] == {"0": 3, "1": 2, "2": 1}
        assert [client["pieces"] for client in record["clients"]] == [
            [[0, 1, 2, 3, 4, 5, 6]],
            [[0, 1, 2, 3, 5]],
            [[0, 1]],
        ]
        for client in record["clients"]:
            assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
        assert record["clients"][0]["bytes_up"] > record["clients"][1]["bytes_up"] > record["clients"][2]["bytes_up"]


def test_parameters_that_no_client_trains_stay_as_they_are(tmp_path: Path) -> None:
    poor = SMALL | {"fleet": fleet_json(poor=1.2)}
    run_dir = run_local(tmp_path, **poor | {"num_rounds": 1})
    before = model_of(run_dir)
    after = model_of(run_local(tmp_path, **poor | {"resume_from": str(run_dir.path)}))
    moved = {unit_of(name) for name, array in before.items() if not np.array_equal(array, after[name])}
    assert moved == {"atoms.0", "atoms.1", "atoms.5"}


def test_the_model_predicts_by_the_mean_of_its_exits(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"dataset": "digits", "architecture__batch_norm": "running"})
    model = load(run_dir.path, normalise=False)
    assert isinstance(model.network, ExitCascade)
    data = digits()
    with torch.no_grad():
        predicted = model(normalise(data.test_inputs, data)).argmax(1).numpy()
    assert float((predicted == data.test_labels).mean()) == run_dir.rounds()[-1]["accuracy"]


def test_clients_evaluate_their_depth(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"evaluation__on_clients_every": 1, "num_rounds": 1})
    for client in clients_of(run_dir):
        assert 0 < client["evaluation_peak"] <= client["budget"]


def test_feddyn_on_both_sides(tmp_path: Path) -> None:
    """One client of one: h of the server is h_k, - a (theta_k - theta_0), and theta_1 = theta_k - h / a."""
    alone = SMALL | {"clients": 1, "depthfl__feddyn_alpha": 0.1, "fleet": fleet_json(rich=2.5), "num_rounds": 1}
    run_dir = run_local(tmp_path, **alone)
    checkpoint = run_dir.load_checkpoint()
    assert checkpoint is not None
    (folder,) = (run_dir.path / "clients").glob("*/0/state/1/feddyn")
    before, after = first_arrays(tiny_settings(**alone | {"dataset": "digits"})), model_of(run_dir)
    held = {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}
    assert {unit_of(name) for name in held} == {*(f"atoms.{n}" for n in range(7)), "head"}
    for name in [name for name in held if name.startswith(("atoms.0", "atoms.1", "atoms.4"))]:
        h = checkpoint.kept[f"h/{name}"].numpy()
        np.testing.assert_allclose(h, held[name], rtol=1e-4, atol=1e-7)
        trained = after[name] + h / 0.1
        np.testing.assert_allclose(h, -0.1 * (trained - before[name]), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "share"), [("depthfl", 0.47), ("exclusivefl", 0.08)])
def test_participation_of_the_papers_devices(strategy: str, share: float) -> None:
    """ProFL's Table 1, of its 100 devices by its authors' memory."""
    settings = settings_with(
        strategy=strategy, model="resnet18", memory__model="profl", fleet="profl", training__batch_size=64, clients=100
    )
    found = make_plan(settings, PlanQuestion(input_shape=(3, 32, 32), num_classes=10, examples=500))
    assert found["fleet"]["participation"] == share


def test_who_cannot_train_a_block_is_not_asked(tmp_path: Path) -> None:
    fleet = fleet_json(rich=1.8, some=1.45, none=0.3)
    run_dir = run_local(tmp_path, **SMALL | {"fleet": fleet, "num_rounds": 1})
    assert [(client["client"], client["status"]) for client in clients_of(run_dir)] == [(0, "ok"), (1, "ok")]
    settings = tiny_settings(**SMALL | {"dataset": "digits", "fleet": fleet})
    assert make_plan(settings, ask(settings))["fleet"]["participation"] == pytest.approx(2 / 3)
    with pytest.raises(
        ValueError, match=r"depthfl: Training the first block with its exit needs [\d,]+ bytes, and the richest"
    ):
        run_local(tmp_path / "none", **SMALL | {"fleet": fleet_json(none=0.3)})


def test_no_batch_norm_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"architecture\.batch-norm = 'local': the server would have no model to predict with"
    ):
        run_local(tmp_path, **SMALL | {"architecture__batch_norm": "local"})


def test_untrained_exits_do_not_count_in_the_ensemble(tmp_path: Path) -> None:
    changes = {
        "fleet": fleet_json(some=1.45, poor=1.2),
        "num_rounds": 1,
        "architecture__batch_norm": "running",
        "dataset": "digits",
    }
    run_dir = run_local(tmp_path, **SMALL | changes)
    model, data = load(run_dir.path, normalise=False), digits()
    assert len(model.network.atoms) == 5  # two blocks and the first one's exit; the second's is the head
    with torch.no_grad():
        predicted = model(normalise(data.test_inputs, data)).argmax(1).numpy()
    assert float((predicted == data.test_labels).mean()) == run_dir.rounds()[-1]["accuracy"]


def test_two_classes_of_one_logit() -> None:
    """sigma(0) = 1/2 and sigma(ln 3) = 3/4: the same as of two logits."""
    single = [torch.zeros(1, 1), torch.tensor([[math.log(3)]])]
    both = [torch.zeros(1, 2), torch.tensor([[0.0, math.log(3)]])]
    one, other = exits_loss(single, torch.tensor([1]), 0.5), exits_loss(both, torch.tensor([1]), 0.5)
    torch.testing.assert_close(one, other)
    lstm = build_blueprint("lstm-imdb", num_classes=2, input_shape=(12,), width=0.125)
    model = ExitCascade(with_exits(lstm, blocks_of(lstm)))
    assert {layer.out_features for name, layer in model.named_modules() if name.endswith("fc")} == {num_logits(lstm)}


@pytest.mark.parametrize(("depth", "megabytes"), [(1, 478), (2, 688), (3, 792), (4, 840)])
def test_the_papers_memory_counts_no_classifiers(depth: int, megabytes: int) -> None:
    resnet = build_blueprint("resnet18", num_classes=10, input_shape=(3, 32, 32))
    settings = settings_with(model="resnet18", memory__model="profl", training__batch_size=64)
    cut = DepthFLCut(resnet, cost_model_for(settings, resnet), settings, method=DepthFL)
    assert cut.bytes(cut.depth(depth)) == megabytes * 10**6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shares"), [("resnet34", (0.0, 0.31)), ("vgg11", (0.36, 0.43)), ("vgg16", (0.0, 0.37))]
)
def test_participation_in_the_presets(model: str, shares: tuple[float, float]) -> None:
    """Of ExclusiveFL and DepthFL, by the fitted formula; Table 1 has 0 and 34 %, 24 and 43 %, 0 and 37 %."""
    preset = read_preset(f"profl-{model}-cifar10")
    question = PlanQuestion(input_shape=(3, 32, 32), num_classes=10, examples=500)
    found = []
    for strategy in ("exclusivefl", "depthfl"):
        settings = Settings.from_run_config(preset | {"strategy": strategy})
        found.append(make_plan(settings, question)["fleet"]["participation"])
    assert tuple(found) == shares


@pytest.mark.parametrize(("fit", "recomputes"), [("", [False] * 3), ("recompute-cheap", [False, True, True])])
def test_the_time_of_a_task_is_that_of_the_work_it_begins_with(
    tmp_path: Path, fit: str, recomputes: list[bool]
) -> None:
    """A task also lists smaller depths and steps, for a device with less memory than it has said: these are alternatives."""
    expected: list[dict[int, float]] = []

    class Expecting(LocalGrid):
        in_flight = 0

        def expect(self, seconds: Mapping[int, float]) -> None:
            expected.append(dict(seconds))

    run = run_local(tmp_path, Expecting, **SMALL | {"num_rounds": 1, "memory__fit": fit})
    training, *_ = [each for each in expected if any(each.values())]
    clients = clients_of(run)
    assert [bool(client["step"]) for client in clients] == recomputes
    assert clients[0]["flops"] > clients[2]["flops"]
    seconds = [training[node] for node in sorted(training)]
    assert seconds == pytest.approx([client["flops"] / SPEEDS["flops"] for client in clients])
