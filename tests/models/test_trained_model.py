"""A trained model's file needs nothing beside it, and the module scales its inputs itself."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, a_blueprint, digits, fleet_json, run_local
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import piecework
from piecework.models.init_weights import read_pretrained
from piecework.models.model_file import ModelFileError, description
from piecework.models.narrow_convolution import is_pointwise_and_strided
from piecework.models.trained_model import TrainedModel
from piecework.server_app.records import RunDir
from piecework.training.attacks import pgd
from piecework.training.examples import training_examples
from piecework.training.settings import Settings
from piecework.training.setup import image_attack, open_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("trained"), strategy="fedavg", **TRIO | {"training__local_epochs": 2})


@pytest.fixture(scope="module")
def model(run: RunDir) -> TrainedModel:
    return piecework.load(run.path)


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.tensor(digits().test_inputs[:20]).permute(0, 3, 1, 2)


def test_pixels_in_every_form_give_the_same_logits(run: RunDir, model: TrainedModel, pixels: torch.Tensor) -> None:
    inputs = description(run.path / "model.safetensors")["inputs"]
    (mean,), (std,) = inputs["mean"], inputs["std"]
    with torch.no_grad():
        logits, plain = model(pixels), piecework.load(run.path, normalise=False)
        torch.testing.assert_close(model(pixels.float() / 255), logits)
        torch.testing.assert_close(plain((pixels.float() / 255 - mean) / std), logits)
        assert not torch.allclose(plain(pixels.float()), logits)
        with pytest.raises(ValueError, match=r"images are torch\.uint8: with normalise=False they must be floats"):
            plain(pixels)


def test_a_model_of_raw_pixels_takes_the_same_images(tmp_path: Path) -> None:
    """Its file says what the scale was, so users pass pixels in the usual forms; 8/255 is 8 of its pixels' steps."""
    changes: dict[str, Any] = {"data__pixel_scale": "raw", "training__adversarial": True, "attack__steps": 2}
    changes |= {"evaluation__attack_steps": 2, "evaluation__attack_examples": 40, "fleet": fleet_json(rich=2.0)}
    run = run_local(tmp_path, strategy="fedavg", **TRIO | changes)
    (mean,), (std,) = (description(run.path / "model.safetensors")["inputs"][key] for key in ("mean", "std"))
    assert (mean, std) == (0, 1 / 255)
    data, model = open_dataset(str(run.settings()["dataset"]), ""), piecework.load(run.path)
    right = model.predict(data.test_inputs[:]).classes.numpy() == data.test_labels
    assert right.mean() == pytest.approx(run.rounds()[-1]["accuracy"])
    raw = open_dataset("digits", "", "raw")
    x = training_examples(raw, np.arange(4)).read(np.arange(4))
    attack = image_attack(Settings(), raw, 3)
    moved = pgd(lambda z, y: torch.ones_like(z), x, torch.zeros(4), attack, torch.Generator().manual_seed(0))
    assert (moved - x).abs().max().item() == pytest.approx(8, rel=1e-4)


def test_floats_that_are_no_pixels_are_refused(model: TrainedModel, pixels: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"images are torch.float32 from 0 to 255: floats are pixels / 255, in \[0, 1\]"
    ):
        model(pixels.float())
    with pytest.raises(ValueError, match=r"images are torch.float32 from nan to nan"):
        model(pixels.float() * torch.nan)
    with pytest.raises(ValueError, match="there are no images"):
        model.predict(pixels[:0])
    with pytest.raises(ValueError, match=r"images have shape \(20, 8, 8\): this model takes \[B, 1, 8, 8\]"):
        model(pixels[:, 0])


def test_predictions_of_arrays_tensors_and_one_image(model: TrainedModel, pixels: torch.Tensor) -> None:
    arrays = digits().test_inputs[:20]
    found = model.predict(arrays)
    assert found.classes.shape == (20,)
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(20))
    assert found.names == [str(n) for n in found.classes.tolist()]
    for same in (model.predict(pixels), model.predict(arrays[..., 0])):
        torch.testing.assert_close(same.probabilities, found.probabilities)
    for one in (model.predict(arrays[3]), model.predict(arrays[3, ..., 0]), model.predict(pixels[3])):
        torch.testing.assert_close(one.probabilities, found.probabilities[3:4])


def test_predictions_of_lists_and_of_images_without_a_channel(model: TrainedModel, pixels: torch.Tensor) -> None:
    arrays = digits().test_inputs[:3]
    found = model.predict(arrays).probabilities
    lists = [[*arrays], [image[..., 0] for image in arrays], [*pixels[:3]], [*pixels[:3, 0]], arrays[..., 0].tolist()]
    for same in (*lists, pixels[:3, 0]):
        torch.testing.assert_close(model.predict(same).probabilities, found)
    for one in (arrays[0, ..., 0].tolist(), pixels[0, 0]):
        torch.testing.assert_close(model.predict(one).probabilities, found[:1])
    for ragged in ([arrays[0], arrays[1, 1:]], [pixels[0], pixels[1, :, 1:]]):
        with pytest.raises(ValueError, match="the images of a list must have one shape: "):
            model.predict(ragged)
    with pytest.raises(ValueError, match=r"images have shape|there are no images"):
        model.predict([])


def test_a_model_moves_as_modules_do(model: TrainedModel) -> None:
    assert {buffer.dtype for name, buffer in model.double().named_buffers() if name in ("mean", "std")} == {
        torch.float64
    }
    model.float()


LOADS = """
import sys
import piecework
model = piecework.load(sys.argv[1])
import numpy as np
print(model.predict(np.zeros((1, 8, 8, 1), np.uint8)).probabilities.shape)
print(sorted(name for name in ("flwr", "sklearn", "torchvision", "ray") if name in sys.modules))
"""


def test_a_file_alone_is_enough_and_flower_is_not_imported(run: RunDir, tmp_path: Path) -> None:
    """In another process, without a data set: its cache is an empty folder, and the run's folder is gone."""
    alone = tmp_path / "model.safetensors"
    shutil.copy(run.path / "model.safetensors", alone)
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(alone)],
        env={"PIECEWORK_CACHE": str(tmp_path / "none"), "PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["torch.Size([1, 10])", "[]"]


def test_a_run_outlives_its_data(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    data = digits()
    np.savez(
        file,
        x_train=data.inputs[:90],
        y_train=data.labels[:90],
        x_test=data.test_inputs[:9],
        y_test=data.test_labels[:9],
    )
    run = run_local(tmp_path, strategy="fedavg", **TRIO | {"dataset": f"npz:{file}"})
    file.unlink()
    assert piecework.load(run.path).predict(data.test_inputs[:5]).classes.shape == (5,)


@pytest.mark.slow
def test_a_narrow_residual_model_can_be_trained_further(tmp_path: Path) -> None:
    """On some CPUs, torch would damage memory in the gradients of its shortcuts of 4 channels."""
    changes: dict[str, Any] = {"model": "preresnet20", "architecture__width": 0.25, "num_rounds": 1}
    model = piecework.load(run_local(tmp_path, strategy="fedavg", **TRIO | changes).path)
    shortcuts = [
        each for each in model.modules() if isinstance(each, torch.nn.Conv2d) and is_pointwise_and_strided(each)
    ]
    assert [each.in_channels for each in shortcuts] == [4, 8]
    assert all("_conv_forward" in each.__dict__ for each in shortcuts)
    model.network.train()
    for _ in range(20):
        model(torch.rand(4, 1, 8, 8)).sum().backward()
    assert all(bool(each.weight.grad.isfinite().all()) for each in shortcuts if each.weight.grad is not None)


def test_floats_of_ones_own_keep_their_scale(tmp_path: Path) -> None:
    file = tmp_path / "floats.npz"
    values = digits().inputs[:90].astype(np.float32) - 100
    np.savez(file, x_train=values, y_train=digits().labels[:90])
    model = piecework.load(run_local(tmp_path, strategy="fedavg", **TRIO | {"dataset": f"npz:{file}"}).path)
    assert model.predict(values[:5]).classes.shape == (5,)
    with pytest.raises(ValueError, match="images are uint8: this model was trained on float32 values"):
        model.predict(digits().inputs[:5])


def changed(run: RunDir, folder: Path, **changes: Any) -> Path:
    """A copy of a run's model whose description differs."""
    source, file = run.path / "model.safetensors", folder / "model.safetensors"
    save_file(load_file(source), file, metadata={"piecework": json.dumps(description(source) | changes)})
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "was written by another version of Piecework .format 1, this is 3.: load it with that version"),
        ({"atoms": [0, 99]}, r"cannot be read: ValueError: atoms = \[0, 99\]: convnet has \d+, counted from 0"),
        ({"model": {"name": "convnet"}}, "cannot be read: of its description, model.width is missing"),
        (
            {"model": {"name": "mine"}},
            "was trained with model 'mine', which Piecework does not have: first import the module",
        ),
        ({"personal": True}, "holds thresholds alone"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    run: RunDir, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=f"{tmp_path}/model.safetensors {message}"):
        piecework.load(changed(run, tmp_path, **changes))


WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**12,
    10**400,
    1e308,
    float("nan"),
    "x",
    [],
    [[]],
    [10**9] * 3,
    {},
    {"a": {}},
)


def places(value: Any, way: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The ways to all fields of a description but the run's settings, which nothing is built from."""
    inner = [place for key in value for place in places(value[key], (*way, key))] if isinstance(value, dict) else []
    return [*([way] if way else []), *(place for place in inner if place[0] != "settings")]


def test_whatever_a_description_says_is_one_error_that_names_file_and_field(run: RunDir, tmp_path: Path) -> None:
    """180 files by hand: each field missing, and with values of other types and sizes; nothing large is allocated."""
    source, file, told = run.path / "model.safetensors", tmp_path / "model.safetensors", 0
    arrays, text = load_file(source), json.dumps(description(source))
    for way in places(json.loads(text)):
        for wrong in (*WRONG, KeyError):
            described = json.loads(text)
            table = described
            for key in way[:-1]:
                table = table[key]
            table.pop(way[-1]) if wrong is KeyError else table.update({way[-1]: wrong})
            save_file(arrays, file, metadata={"piecework": json.dumps(described)})
            try:
                assert isinstance(piecework.load(file), TrainedModel)
            except ModelFileError as error:
                told += 1
                assert str(file) in str(error)
                assert way[-1] in str(error) or "was written by another version" in str(error) or wrong in (10**12, "x")
                assert len(str(error)) < 600
    assert told > 150


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "it has no description"),
        ({"other": "{}"}, "it has no description"),
        ({"piecework": "[" * 100_000}, "nested too deeply"),
        ({"piecework": "[]"}, r"its description is \[\], not a table"),
        ({"piecework": "{"}, "Expecting property name"),
    ],
)
def test_a_description_that_is_none(tmp_path: Path, metadata: dict[str, str] | None, message: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, file, metadata=metadata)
    with pytest.raises(ModelFileError, match=f"{file} cannot be read: .*{message}"):
        piecework.load(file)


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        ({"nets": list(range(10**5))}, "variant.nets.100 = 100: Input should be less than 100"),
        ({"nets": [0, 10**9]}, "variant.nets.1 = 1000000000: Input should be less than 100"),
        ({"keep": "x"}, "variant.keep = 'x'"),
        ({"nonsense": 1}, "a variant has no nonsense"),
        ({"width": 1e300}, "variant.width = 1e+300: Input should be less than or equal to 4"),
        ({"keep": 0.5}, "does not contain tensor atoms.1.conv.v.weight"),
    ],
)
def test_variants_that_cannot_be(run: RunDir, tmp_path: Path, variant: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        piecework.load(changed(run, tmp_path, variant=variant))
    assert says in str(caught.value)


def test_an_array_of_another_shape_is_named(run: RunDir, tmp_path: Path) -> None:
    """Some shapes would be broadcast without a word: one row of weights for all ten classes, one number for a layer."""
    source, file = run.path / "model.safetensors", tmp_path / "model.safetensors"
    arrays = load_file(source)
    (name,) = (n for n in arrays if n.startswith("head.") and arrays[n].ndim == 2)
    whole = tuple(arrays[name].shape)
    for found, array in (((1, whole[1]), arrays[name][:1]), ((1,), arrays[name][0, :1])):
        save_file(arrays | {name: array.clone()}, file, metadata={"piecework": json.dumps(description(source))})
        with pytest.raises(ModelFileError) as caught:
            piecework.load(file)
        assert f"array {name} has shape {found}, but the model's has {whole}" in str(caught.value)


def test_an_array_of_another_kind_is_named(run: RunDir, tmp_path: Path) -> None:
    """Whole numbers in place of weights would be cast without a word."""
    source, file = run.path / "model.safetensors", tmp_path / "model.safetensors"
    arrays = load_file(source)
    (name,) = (n for n in arrays if n.startswith("head.") and arrays[n].ndim == 2)
    save_file(
        arrays | {name: arrays[name].to(torch.int8)}, file, metadata={"piecework": json.dumps(description(source))}
    )
    with pytest.raises(ModelFileError, match=rf"array {name} is torch.int8, but the model's is torch.float32"):
        piecework.load(file)


@pytest.mark.parametrize("where", ["weights", "scale"])
def test_a_byte_that_was_changed_on_the_disk_is_noticed(run: RunDir, tmp_path: Path, where: str) -> None:
    """Of a weight, and of the description: both would only predict something else. So would another run's first weights."""
    file = Path(shutil.copy(run.path / "model.safetensors", tmp_path))
    content = bytearray(file.read_bytes())
    place = len(content) - 2 if where == "weights" else content.index(b"0.", content.index(b"mean")) + 3
    content[place] = ord("7") if content[place] != ord("7") else ord("6")
    file.write_bytes(content)
    says = f"{file} is damaged: it does not match its checksum"
    with pytest.raises(ModelFileError, match=re.escape(says)):
        piecework.load(file)
    with pytest.raises(ValueError, match=re.escape(f"training.init-weights = {says}")):
        read_pretrained(file, a_blueprint())


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"{tmp_path} holds no model.safetensors: has the run completed?"):
        piecework.load(tmp_path)


def test_class_names_come_from_the_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    data = digits()
    for label, name in ((3, "three"), (7, "seven")):
        folder = tmp_path / "pictures" / name
        folder.mkdir(parents=True)
        for n, row in enumerate(np.flatnonzero(data.labels == label)[:40]):
            image.fromarray(data.inputs[row, ..., 0]).save(folder / f"{n}.png")
    settings = TRIO | {"dataset": f"folder:{tmp_path / 'pictures'}", "data.partition": "iid"}
    model = piecework.load(run_local(tmp_path, strategy="fedavg", **settings).path)
    assert model.class_names == ("seven", "three")
    assert set(model.predict(data.inputs[:10]).names) <= {"seven", "three"}


def test_python_m_piecework_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "piecework", "--help"], capture_output=True, text=True, check=True)
    assert "Train one model across devices" in done.stdout


def test_the_description_holds_what_is_needed(run: RunDir) -> None:
    with safe_open(run.path / "model.safetensors", framework="np") as file:
        described = json.loads(file.metadata()["piecework"])
    assert described["model"] == {
        "name": "convnet",
        "width": 1.0,
        "options": {},
        "batch_norm": "running",
        "input_shape": [1, 8, 8],
        "num_classes": 10,
    }
    assert described["inputs"]["dtype"] == "uint8"
    assert described["inputs"]["dataset"] == "npz:few-digits.npz"
