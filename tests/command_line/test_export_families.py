"""Each kind of trained model in the formats of devices: the file has the classes and logits of the model.

`export` itself compares them, and keeps no file that differs; here its own comparison is made again for ONNX, by hand.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, run_local

import piecework
from piecework.exports.formats import export_run
from piecework.models.imported.source import find_make
from piecework.models.resizing import resize, resize_matrix
from piecework.server_app.records import RunDir

NET = """
from torch import nn

def make(num_classes, input_shape):
    features = nn.Sequential(nn.Conv2d(input_shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""
FAMILIES: dict[str, dict[str, Any]] = {
    "running-norms": {"strategy": "fedavg"},
    "patches": {"strategy": "fedavg", "model": "vit", "architecture__options": "patch=2,depth=2"},
    "tokens": {"strategy": "fedavg", "model": "lstm-imdb", "dataset": "tokens"},
    "features": {"strategy": "fedavg", "model": "mlp", "dataset": "features"},
    "resized": {"strategy": "fedavg", "data__image_size": 12},
    "own-module": {"strategy": "fedavg", "model": "own"},
    "low-rank": {"strategy": "prism"},
    "modules": {"strategy": "fedprophet"},
    "stages": {"strategy": "profl", "profl__shrinking": False, "profl__stage_rounds": 2},  # ends in the first one
    "exits": {"strategy": "depthfl"},
    "base-nets": {"strategy": "splitmix"},
    "two-sets-of-norms": {"strategy": "fedrbn"},
    "drawn-masks": {"strategy": "fedpm"},
}
PROGRAMS = ("running-norms", "patches", "features", "low-rank", "drawn-masks")  # also written for ExecuTorch


def trained(family: str, folder: Path) -> RunDir:
    """A run of the family, on digits, random tokens of two classes or random features of three."""
    changes, rng = TRIO | {"fleet": "unlimited"} | FAMILIES[family], np.random.default_rng(0)
    if changes["dataset"] == "tokens":
        np.savez(folder / "t.npz", x_train=rng.integers(0, 50, (200, 6)), y_train=rng.integers(0, 2, 200))
        changes["dataset"] = f"npz:{folder / 't.npz'}"
    if changes["dataset"] == "features":
        x = rng.normal(3, 7, (200, 5)).astype(np.float32)
        np.savez(folder / "f.npz", x_train=x, y_train=rng.integers(0, 3, 200))
        changes["dataset"] = f"npz:{folder / 'f.npz'}"
    if changes.get("model") == "own":
        (folder / "my_net.py").write_text(NET)
        changes["model"] = f"{folder / 'my_net.py'}:make"
    return run_local(folder, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_each_format(family: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = trained(family, tmp_path)
    found = export_run(run.path, "onnx")
    session = runtime.InferenceSession(found.path)
    (given,) = session.get_inputs()
    model = piecework.load(run.path)
    shape = model.resized_from or model.input_shape
    assert given.shape[1:] == [*shape]
    x = examples(given.type, (3, *shape))
    (logits,) = session.run(None, {given.name: x})
    expected = model.predict(torch.tensor(x))
    assert logits.argmax(1).tolist() == expected.classes.tolist()
    np.testing.assert_allclose(torch.tensor(logits).softmax(1), expected.probabilities, atol=1e-4)
    told: Mapping[str, str] = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(told["class_names"])) == model.class_names
    assert export_run(run.path, "torchscript").record["max_difference"] < 1e-3


def examples(kind: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random examples of an input's type, tokens below 50 or pixels."""
    rng = np.random.default_rng(1)
    if kind == "tensor(float)":
        return rng.normal(3, 7, shape).astype(np.float32)
    return rng.integers(0, 50, shape).astype({"tensor(int64)": np.int64, "tensor(uint8)": np.uint8}[kind])


@pytest.mark.parametrize("family", PROGRAMS)
def test_a_family_as_a_program_for_boards(family: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("executorch.runtime", reason="needs piecework[executorch]")
    run = trained(family, tmp_path)
    found = export_run(run.path, "executorch")
    program = runtime.Runtime.get().load_program(found.path)
    (names,) = program.load_method("class_names").execute([])
    model = piecework.load(run.path)
    assert tuple(json.loads(names)) == model.class_names
    kind = "tensor(float)" if model.pixels == "float32" else "tensor(uint8)"
    x = torch.tensor(examples(kind, (1, *model.input_shape)))
    (logits,) = program.load_method("forward").execute([x])
    torch.testing.assert_close(logits.softmax(1), model.predict(x).probabilities, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_code_of_ones_own_is_run_again_only_where_it_is_named(tmp_path: Path) -> None:
    """In a process that has not imported it: a run's folder does not have its code run."""
    run = trained("own-module", tmp_path)
    name = str(run.settings()["model"])
    assert find_make(name)  # here it has been imported by the run
    command = [sys.executable, "-m", "piecework", "export", str(run.path), "--format", "torchscript"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "no file can have code run" in " ".join(refused.stderr.split())
    done = subprocess.run([*command, "--model", name], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str(run.path / "model.pt")
    assert done.stderr == ""


@pytest.mark.parametrize(("have", "want"), [((8, 6), (12, 7)), ((9, 12), (4, 5)), ((8, 8), (8, 3))])
def test_a_resized_image_is_a_product_of_matrices(have: tuple[int, int], want: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *have, generator=torch.Generator().manual_seed(0))
    found = resize_matrix(have[0], want[0]) @ x @ resize_matrix(have[1], want[1]).T
    torch.testing.assert_close(found, resize(x, want))
