"""`piecework export`: what a file computes is what the model computes, for each kind of model, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TRIO, few_digits, run_local
from torch import Tensor, nn
from typer.testing import CliRunner

import piecework
from piecework.cli import app
from piecework.exports import torchscript_model
from piecework.exports.formats import ExportError, export_run
from piecework.server_app.records import RunDir
from piecework.training.setup import open_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("exported"), strategy="fedavg", **TRIO)


def command(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["export", *words, "--json"])
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"exit": done.exit_code}


def test_a_torchscript_file_is_all_that_a_device_needs(run: RunDir, tmp_path: Path) -> None:
    """Any number of raw images, and the names of the classes, with torch alone."""
    target = tmp_path / "board.pt"
    found = command(str(run.path), "--format", "torchscript", "--out", str(target))
    data = open_dataset(str(run.settings()["dataset"]), "")
    images = torch.tensor(data.test_inputs[:]).movedim(-1, 1)
    names = {"class_names": "", "input": ""}
    with torchscript_model.deprecated():
        loaded = torch.jit.load(str(target), _extra_files=names)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loaded(images), piecework.load(run.path)(images), rtol=1e-4, atol=1e-4)
    assert json.loads(names["class_names"]) == [str(digit) for digit in range(10)]
    assert names["input"] == b"images: uint8 [B, 1, 8, 8], pixels from 0 to 255, channels first; scaled inside"  # type: ignore[comparison-overlap]
    assert (found["exit"], found["format"], found["path"]) == (0, "torchscript", str(target))
    assert found["examples"] == 16
    assert found["checked_on"] == f"test examples of {run.settings()['dataset']}"
    assert 0 <= found["max_difference"] <= found["allowed_difference"]
    assert found["bytes"] == target.stat().st_size
    assert found["metadata"]["strategy"] == "fedavg"


class Wrong(nn.Module):
    """Other logits than those of a model."""

    def __init__(self, network: nn.Module, offset: float) -> None:
        super().__init__()
        self.network, self.offset = network, offset

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x)
        return logits.flip(1) if self.offset == 0 else logits + self.offset


@pytest.mark.parametrize("offset", [0.0, 0.5, float("nan")])
def test_a_file_that_computes_something_else_is_not_kept(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: float
) -> None:
    """And the file of before stays."""
    write, target = torchscript_model.write, tmp_path / "model.pt"
    target.write_text("of before")
    monkeypatch.setattr(torchscript_model, "write", lambda network, *rest: write(Wrong(network, offset), *rest))  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"torchscript: the file computes something else than the model: .*not kept"):
        export_run(run.path, "torchscript", target)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert target.read_text() == "of before"


def test_what_cannot_be_exported_is_said(run: RunDir, tmp_path: Path) -> None:
    unknown = command(str(run.path), "--format", "onyx")
    assert unknown["exit"] == 2
    assert unknown["reason"].startswith("unknown format 'onyx'; known: onnx, torchscript, executorch")
    assert unknown["reason"].endswith("did you mean 'onnx'?")
    nowhere = command(str(tmp_path / "none" / "run"), "--format", "onnx")
    assert nowhere["reason"] == f"{tmp_path / 'none' / 'run'} holds no model.safetensors: has the run completed?"
    empty = command(str(tmp_path), "--format", "torchscript")
    assert empty["reason"] == f"{tmp_path} holds no model.safetensors: has the run completed?"
    other = command(str(run.path), "--format", "torchscript", "--model", "my_net.py:make")
    assert "was trained with the model 'convnet', not with 'my_net.py:make'" in other["reason"]


def test_a_model_of_batches_is_refused(tmp_path: Path) -> None:
    run = run_local(tmp_path, strategy="fedavg", architecture__batch_norm="batch", **TRIO)
    with pytest.raises(ExportError, match=r"architecture\.batch-norm = batch: what it says of an example depends on"):
        export_run(run.path, "torchscript")


def test_personal_models_are_refused(tmp_path: Path) -> None:
    run = run_local(tmp_path, strategy="spafl", evaluation__mode="personal", **TRIO | {"fleet": "unlimited"})
    with pytest.raises(ValueError, match="holds thresholds alone: every client has a model of its own"):
        export_run(run.path, "torchscript")


def test_without_its_data_a_file_is_checked_on_random_examples(tmp_path: Path) -> None:
    """As from a copy of the model's file alone, on another machine."""
    file, alone = tmp_path / "mine.npz", tmp_path / "copy" / "model.safetensors"
    shutil.copy(few_digits(), file)
    run = run_local(tmp_path, strategy="fedavg", **TRIO | {"dataset": f"npz:{file}"})
    file.unlink()
    alone.parent.mkdir()
    shutil.copy(run.path / "model.safetensors", alone)
    found = export_run(alone, "torchscript")
    assert found.path == alone.with_name("model.pt")
    assert found.record["checked_on"].startswith("random examples, because the run's data are not at hand (")
