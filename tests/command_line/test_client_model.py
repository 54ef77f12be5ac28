"""`--client N` of `piecework export` and `evaluate`: a client's own model is the one that the run evaluated."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, run_local
from typer.testing import CliRunner

import piecework
from piecework.cli import app
from piecework.exports.client_model import client_model
from piecework.exports.formats import ExportError, export_run
from piecework.exports.network import ExportedNetwork
from piecework.models.masked import Silent, masked_layers
from piecework.models.model_file import ModelFileError
from piecework.models.trained_model import load_model
from piecework.server_app.records import RunDir

OWN = TRIO | {"fleet": "unlimited", "spafl__sparsity": 0.001, "num_rounds": 2, "training__batch_size": 20}


@pytest.fixture(scope="module", params=["spafl", "local"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("own"), strategy=request.param, **OWN)


def invoke(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"exit": done.exit_code}


def test_scores_are_those_that_the_run_recorded(run: RunDir) -> None:
    """The run's accuracy is the mean over its three clients, each on its own part of the test split.

    (In training's batches of 20: a run does not evaluate a batch of one example.)
    """
    found = [invoke("evaluate", str(run.path), "--client", str(client)) for client in range(3)]
    assert [each["exit"] for each in found] == [0, 0, 0]
    assert np.mean([each["accuracy"] for each in found]) == pytest.approx(run.rounds()[-1]["accuracy"])
    assert sum(each["examples"] for each in found) == 100
    assert found[2]["devices_note"] == "this is the model of client 2 alone on its own test examples"
    assert piecework.Run(run.path).evaluate(client=2).record | {"exit": 0} == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torchscript", "onnx"])
def test_a_clients_model_is_exported(run: RunDir, form: str) -> None:
    """Checked by its runtime as others are; pruned filters are zeros."""
    found = invoke("export", str(run.path), "--format", form, "--client", "1")
    suffix = {"torchscript": "pt", "onnx": "onnx"}[form]
    assert (found["exit"], found["path"]) == (0, str(run.path / f"client-1.{suffix}"))
    assert found["checked_on"].startswith("test examples of ")


def test_pruned_filters_stay_pruned(run: RunDir) -> None:
    """Also where half of them are, and norms have shifts of their own."""
    with client_model(run.path, 0) as file:
        model = load_model(file)
    layers = [layer for _, layer in masked_layers(model.network)]
    with torch.no_grad():
        for layer in layers:
            layer.tau[::2] = 1.0
        for norm in (each for each in model.network.modules() if isinstance(each, Silent) and each.bias is not None):
            norm.bias += 0.3
    assert all(not layer.mask()[::2].any() for layer in layers)
    images = torch.randint(0, 256, (8, *model.input_shape), dtype=torch.uint8)
    exported = ExportedNetwork(model).eval()
    torch.testing.assert_close(exported(images), model(images))
    assert not [layer for _, layer in masked_layers(exported)]


def test_what_is_not_there_is_said(run: RunDir, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    unknown = invoke("evaluate", str(copy), "--client", "7")
    assert unknown["exit"] == 2
    assert unknown["reason"].startswith(f"client 7 of {copy} has no model in {copy / 'clients'}")
    (state,) = (copy / "clients").glob("*/0/state/2")
    (state / "head.safetensors").write_bytes(b"damaged")
    assert "head.safetensors does not match its checksum" in invoke("evaluate", str(copy), "--client", "0")["reason"]
    shutil.rmtree(copy / "clients")
    gone = invoke("export", str(copy), "--format", "torchscript", "--client", "0")
    assert (gone["exit"], "`piecework clean` or another run removed it" in gone["reason"]) == (2, True)
    with pytest.raises(ExportError, match="csv has the records of all clients: leave --client out"):
        export_run(copy, "csv", client=0)


def test_the_one_model_of_all_clients_is_asked_for_without(tmp_path: Path) -> None:
    run = run_local(tmp_path, strategy="fedavg", **TRIO)
    with pytest.raises(ModelFileError, match="is the one model of all clients of this run: leave --client out"):
        export_run(run.path, "torchscript", client=0)
