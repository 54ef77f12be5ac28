"""The model, the data, the method's loss, and a round of a run."""

import json
from pathlib import Path

import pytest
import torch
from piecework.cli import main
from piecework.models.zoo import build_blueprint
from piecework.training.loop import PieceModel

from my_app.data import read
from my_app.method import proximal_loss
from my_app.model import make


def test_the_model_reads_the_data() -> None:
    data = read(Path(), False)
    images = torch.from_numpy(data.inputs[:5]).permute(0, 3, 1, 2).float()
    assert make(data.num_classes, tuple(images.shape[1:]))(images).shape == (5, data.num_classes)


def test_the_loss_grows_with_the_distance() -> None:
    model = build_blueprint("my-app", num_classes=2, input_shape=(1, 8, 8))
    piece = PieceModel(model, range(len(model.atoms)), "head", model.build_unit)
    piece.train(False)
    loss, x, y = proximal_loss(mu=0.5)([piece]), torch.zeros(1, 1, 8, 8), torch.tensor([0])
    near = loss(x, y)
    with torch.no_grad():
        piece.parameters()[-1].add_(2.0)  # the biases of both classes, which changes no probability
    assert (loss(x, y) - near).item() == pytest.approx(0.5 / 2 * (2.0**2 + 2.0**2))


def test_a_round_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    few = ["--set", "num-rounds=1", "--set", "workers=1", "--set", "run-name=run", "--output-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["run", *few])
    assert ended.value.code == 0
    (line,) = (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    assert {client["status"] for client in json.loads(line)["clients"]} == {"ok"}
