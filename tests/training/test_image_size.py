"""Images that are resized as they are read (`data.image-size`): what they look like, what this holds, and who agrees on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, clients_of, digits, few_digits, fleet_json, run_local, tiny_settings

import piecework
from piecework.device_profiles.memory import PeakMemory
from piecework.federated_data.datasets import ArrayDataset, DatasetError
from piecework.federation.public_data import public_examples
from piecework.models.cascade import fit_features
from piecework.models.model_file import description
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import cost_model_for
from piecework.planning.part import Part, whole_model
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.server_app.records import RunDir
from piecework.strategies import find_method
from piecework.training.examples import Augmentation, as_inputs, training_examples
from piecework.training.setup import blueprint_of_shape, open_dataset, resize_images


def images_of(shape: tuple[int, int, int], dtype: type[np.generic] = np.uint8, size: int = 0) -> ArrayDataset:
    """Six random images [h, w, C]."""
    inputs = np.random.default_rng(0).integers(0, 256, (6, *shape)).astype(dtype)
    mean, std = (0.4, 0.5, 0.6)[: shape[2]], (0.2, 0.3, 0.1)[: shape[2]]
    return ArrayDataset("mine", inputs, np.arange(6), 6, mean, std, inputs, np.arange(6), image_size=size)


# ---- what is read


def test_an_image_by_hand() -> None:
    """Pixel i of four lies at (i + 1/2) / 2 - 1/2 of two: at -1/4, which is the edge's, 1/4, 3/4 and 5/4."""
    image = np.array([[0, 100], [40, 200]], np.uint8)[None, :, :, None]
    data = ArrayDataset("mine", image, np.arange(1), 1, (0.0,), (1 / 255,), image, np.arange(1), image_size=4)
    row = np.array([0, 25, 75, 100])
    below = np.array([40, 80, 160, 200])
    expected = [row, 0.75 * row + 0.25 * below, 0.25 * row + 0.75 * below, below]
    x = training_examples(data, np.arange(1)).read(np.array([0]))
    np.testing.assert_allclose(x[0, 0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(("shape", "size"), [((8, 8, 1), 13), ((9, 12, 3), 32), ((40, 30, 3), 11), ((16, 40, 3), 16)])
def test_images_are_those_of_torchvision(shape, size, dtype) -> None:
    resize = pytest.importorskip("torchvision.transforms.v2.functional").resize
    data = images_of(shape, dtype, size)
    rows, positions = np.array([4, 1, 5, 0]), np.array([3, 1])
    x = training_examples(data, rows).read(positions)
    plain = training_examples(replace(data, image_size=0), rows).read(positions)
    assert x.shape == (2, shape[2], size, size)
    assert data.input_shape == x.shape[1:]
    assert x.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(x, resize(plain, [size, size], antialias=True), atol=2e-5 * plain.abs().max(), rtol=0)
    assert x.equal(as_inputs(data.test_inputs[rows[positions]], data))


def test_images_are_augmented_before_they_are_resized() -> None:
    data, rows = images_of((8, 8, 3), size=20), np.arange(6)
    drawn = Augmentation.draw(6, np.random.default_rng(1))
    moved = drawn.read(data.inputs, rows, rows)
    again = replace(data, inputs=moved)
    assert training_examples(data, rows, drawn).read(rows).equal(training_examples(again, rows).read(rows))


def test_the_own_size_changes_nothing() -> None:
    data, rows = images_of((8, 8, 3)), np.arange(6)
    own = resize_images(data, 8)
    assert training_examples(own, rows).read(rows).equal(training_examples(data, rows).read(rows))
    settings = tiny_settings(model="convnet", data__image_size=8)
    assert blueprint_of_shape(settings, (3, 8, 8), 10).stored_shape == ()


def test_only_images_are_resized() -> None:
    tokens = np.zeros((2, 4), np.uint16)
    data = ArrayDataset("mine", tokens, np.arange(2), 2, (), (), tokens, np.arange(2), vocabulary=1)
    expected = r"data\.image-size = 16: examples of shape \(4,\) are no images and cannot be resized; set it to 0"
    with pytest.raises(DatasetError, match=expected):
        resize_images(data, 16)
    assert resize_images(data, 0).input_shape == (4,)
    settings = tiny_settings(model="lstm-imdb", dataset="imdb", data__image_size=16)
    with pytest.raises(DatasetError, match=r"examples of shape \(500,\) are no images"):
        make_plan(settings, ask(settings))


# ---- what reading holds


def one_image(stored: tuple[int, int, int], size: int) -> int:
    """Bytes while an image [h, w, C] is resized: its bytes, its floats, and those of the new size.

    Beside them the operator holds the image with its new width and old height, and the weights of one edge.
    """
    height, width, channels = stored
    spread = [2 * max(1, -(-edge // size)) + 1 for edge in (height, width) if edge != size]
    between = 4 * height * size * channels if len(spread) == 2 else 0
    weights = max(size * (4 * 8 + 4 * taken) for taken in spread)
    return 5 * height * width * channels + 4 * size**2 * channels + between + weights


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize(("shape", "size"), [((8, 8, 1), 13), ((9, 12, 3), 32), ((40, 30, 3), 11), ((16, 40, 3), 16)])
def test_one_image_at_a_time_is_held_beside_the_batch(shape, size, augmented) -> None:
    data = images_of(shape, size=size)
    drawn = Augmentation.draw(6, np.random.default_rng(1)) if augmented else None
    examples, memory = training_examples(data, np.arange(6), drawn), PeakMemory()
    with memory:
        x = examples.read(np.array([0, 5, 2]))
    assert memory.peak == 4 * x.numel() + one_image(shape, size)


@pytest.mark.parametrize("shape", [(3, 12, 12), (8, 6, 6), (4, 4, 3), (5, 12, 5)])
def test_images_enter_a_later_atom_as_fit_features_has_them_and_are_never_held_whole(shape) -> None:
    data = images_of((9, 8, 3), size=12)
    examples, positions, memory = training_examples(data, np.arange(6)), np.array([5, 2, 3, 0]), PeakMemory()
    with memory:
        x = examples.entering(shape).read(positions)
    assert x.equal(fit_features(examples.read(positions), shape))
    assert memory.peak == 4 * x.numel() + one_image((9, 8, 3), 12)


# ---- what a step takes


def test_a_step_that_reads_far_larger_images_takes_its_traced_bytes(tmp_path: Path) -> None:
    """Here reading takes more than the step, so that a cost without it would be too small."""
    file = tmp_path / "large.npz"
    rng = np.random.default_rng(0)
    sets = {f"x_{part}": rng.integers(0, 256, (12, 128, 96, 3), np.uint8) for part in ("train", "test")}
    np.savez(file, y_train=np.arange(12) % 3, y_test=np.arange(12) % 3, **sets)
    small = {"dataset": f"npz:{file}", "clients": 1, "data__validation_fraction": 0.34, "training__batch_size": 4}
    small |= {"model": "convnet", "architecture__width": 0.125, "architecture__batch_norm": "running"}
    small |= {"data__image_size": 8, "evaluation__on_clients_every": 1}
    for strategy in ("fedavg", "fedepth"):
        settings = tiny_settings(strategy=strategy, **small)
        blueprint = blueprint_of_shape(settings, (3, 128, 96), 3)
        costs = cost_model_for(settings, blueprint)
        cut = find_method(strategy).make_cut(blueprint, costs, settings)
        whole = costs.bytes(whole_model(blueprint))
        assert whole > costs.bytes(whole_model(replace(blueprint, stored_shape=()))) + 10**5
        budget = whole if strategy == "fedavg" else cut.min_budget()
        run = run_local(tmp_path / strategy, strategy=strategy, **small | {"fleet": fleet_json(board=budget)})
        (client,) = clients_of(run)
        assert (client["status"], client["reason"]) == ("ok", "")
        assert client["measured_peak"] == client["predicted_peak"] == budget


def test_a_part_that_is_given_images_has_room_to_resize_them() -> None:
    """Without the first atoms, FeDepth gives images to a later one."""
    blueprint = build_blueprint("convnet", num_classes=10, input_shape=(1, 16, 16), width=0.125, batch_norm="running")
    settings = tiny_settings(model="convnet", training__batch_size=2)
    resized = replace(blueprint, stored_shape=(1, 300, 300))
    costs = cost_model_for(settings, blueprint)
    for part, larger in ((Part(blueprint, (2,)), True), (Part(blueprint, ()), False)):
        more = costs.bytes(replace(part, blueprint=resized)) - costs.bytes(part)
        assert (more > 300 * 300) == larger


# ---- runs


SIZED: dict[str, Any] = TRIO | {"data__image_size": 16, "architecture__batch_norm": "running"}


def accuracy(run: RunDir) -> float:
    found = run.rounds()[-1]["accuracy"]
    assert isinstance(found, float)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "fedepth", "fedprophet", "spafl"])
def test_plan_peaks_evaluation_and_the_saved_model_agree(strategy: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"strategy": strategy, "evaluation__on_clients_every": 1, "num_rounds": 2} | SIZED
    if strategy == "fedprophet":
        changes |= {"attack__steps": 2, "evaluation__attack_steps": 2, "evaluation__attack_examples": 40}
        changes |= {"fedprophet__stage_rounds": 1}
    if strategy == "spafl":
        changes |= {"evaluation__mode": "personal", "evaluation__on_clients_every": 0}
    fleet = fleet_json(rich=0.8, poor=0.55) if strategy == "fedepth" else fleet_json(rich=1.5)
    run = run_local(tmp_path, **changes | {"fleet": fleet})
    for client in (client for record in run.rounds() for client in record["clients"]):
        assert (client["status"], client["reason"]) == ("ok", "")
        assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
    settings = tiny_settings(**changes | {"fleet": fleet, "dataset": f"npz:{few_digits()}"})
    plan = make_plan(settings, ask(settings))
    assert plan["input_shape"] == [1, 16, 16]
    predicted = {client["predicted_peak"] for client in clients_of(run, 1)}
    assert min(predicted) in {module["memory_bytes"] for module in plan["modules"]} | {plan["full_memory_bytes"]}
    if strategy == "spafl":
        return
    found = description(run.path / "model.safetensors")
    assert (found["model"]["input_shape"], found["inputs"]["resized_from"]) == ([1, 16, 16], [1, 8, 8])
    data, model = open_dataset(f"npz:{few_digits()}", "", image_size=16), piecework.load(run.path)
    right = model.predict(data.test_inputs[:]).classes.numpy() == data.test_labels
    assert right.mean() == pytest.approx(accuracy(run))
    whole = piecework.load(run.path, normalise=False)
    sized = whole(as_inputs(data.test_inputs[:20], data))
    small = torch.tensor(data.test_inputs[:20])[..., 0]
    with torch.no_grad():
        torch.testing.assert_close(model(small.unsqueeze(1)), sized)
        torch.testing.assert_close(model(small.unsqueeze(1).float() / 255), sized)
        for images in (small[0], small[0].numpy(), small[:1].unsqueeze(1)):
            torch.testing.assert_close(model.predict(images).probabilities, sized[:1].softmax(1))
    with pytest.raises(ValueError, match=r"this model takes \[B, 1, 16, 16\] or \[B, 1, 8, 8\]"):
        model(torch.zeros(2, 1, 12, 12))


def test_public_examples_of_another_size(tmp_path: Path) -> None:
    data, file = digits(), tmp_path / "public.npz"
    np.savez(
        file,
        x_train=np.zeros((8, 5, 7), np.uint8),
        y_train=np.arange(8) % 2,
        x_test=np.zeros((2, 5, 7), np.uint8),
        y_test=np.arange(2),
    )
    settings = tiny_settings(dataset="digits", data__public=f"npz:{file}", data__image_size=12)
    assert public_examples(settings).read(np.arange(3)).shape == (3, 1, 12, 12)
    with pytest.raises(ValueError, match="type and shape must be equal"):
        public_examples(tiny_settings(dataset="digits", data__public=f"npz:{file}"))
    assert data.image_size == 0
