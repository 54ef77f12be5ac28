"""A cascade that a client runs piece by piece is the whole one: logits, gradient, accuracies."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fedprophet_helpers import cascade, seasoned
from helpers import a_blueprint
from torch.nn import functional as F

from piecework.client_app import validation
from piecework.client_app.validation import StreamedCascade, held_bytes, piece_bytes, validate
from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.models.zoo import build_blueprint
from piecework.planning.step_cost import piece_cost
from piecework.training.setup import image_attack

MODULES: list[Piece] = [(0, 1), (2, 3), (4,)]


def resnet(batch_norm: str) -> Blueprint:
    return build_blueprint("resnet10", num_classes=10, input_shape=(1, 8, 8), width=0.125, batch_norm=batch_norm)


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
@pytest.mark.parametrize("model", ["convnet", "resnet"])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("pieces", [MODULES, [(0, 1, 2, 3, 4)], [(0,), (1,), (2,), (3,), (4,)]])
def test_pieces_have_the_gradient_of_the_whole(
    tmp_path: Path, batch_norm: str, model: str, held: bool, pieces: list[Piece]
) -> None:
    blueprint = a_blueprint(batch_norm=batch_norm) if model == "convnet" else resnet(batch_norm)
    client = seasoned(tmp_path, blueprint, architecture__batch_norm=batch_norm)
    whole, streamed = cascade(client), StreamedCascade(client, pieces, "head", held=held)
    for positions in (np.arange(12), np.arange(12, 19)):
        x, y = client.local_data(0).read(positions), client.local_data(0).targets(positions)
        before = x.clone()
        torch.testing.assert_close(streamed.logits(x), whole(x), rtol=1e-5, atol=1e-6)
        x.requires_grad_()
        (expected,) = torch.autograd.grad(F.cross_entropy(whole(x), y), x)
        x = x.detach()
        for _ in range(2):  # nothing is left of the first time
            gradient = streamed.gradient(x, y)
            assert float((gradient - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        assert torch.equal(x, before)
    stored = sorted(path.name for path in client.store.task.glob("input-*"))
    assert stored == ([] if held else [f"input-{number}.npy" for number in range(len(pieces) - 1)])


def test_accuracies_are_those_of_the_whole(tmp_path: Path) -> None:
    client = seasoned(tmp_path)
    attack = image_attack(client.settings, client.data, 3)
    by_pieces = [validate(client, MODULES, "head", attack, held=held) for held in (True, False)]
    whole = validate(client, [(0, 1, 2, 3, 4)], "head", attack, held=True)
    assert by_pieces[0] == by_pieces[1]
    assert by_pieces[0] == pytest.approx(whole, rel=1e-5, abs=0.051)  # one image of 20 may lie on a border
    x, y = client.validation.read(np.arange(20)), client.validation.targets(np.arange(20))
    with torch.no_grad():
        logits = cascade(client)(x)
    assert whole["val-examples"] == 20
    assert whole["val-accuracy"] == float((logits.argmax(1) == y).sum()) / 20
    assert whole["val-loss"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    nothing = replace(attack, epsilon=1e-9, step=1e-9)
    assert validate(client, MODULES, "head", nothing, held=False)["val-adversarial-accuracy"] == whole["val-accuracy"]
    nobody = replace(client, validation=replace(client.validation, labels=client.validation.labels[:0]))
    assert validate(nobody, MODULES, "head", attack, held=True) == {}


def test_what_holding_all_pieces_takes(tmp_path: Path) -> None:
    """The files of their weights; for a batch of 16, images of 64 values, maps of 16 x 64 and of 32 x 16."""
    client = seasoned(tmp_path)
    files = sum((client.store.model / f"atoms.{atom}.safetensors").stat().st_size for atom in range(5))
    assert held_bytes(client, MODULES) == files + 4 * 16 * (64 + 16 * 64 + 32 * 16)


@pytest.mark.parametrize("model", ["convnet", "resnet"])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_what_validating_a_piece_takes(tmp_path: Path, model: str, count: int) -> None:
    """Twice the weights, and of the rest of a training step the share of a batch of 16; it does take no more."""
    client = seasoned(tmp_path, a_blueprint(batch_norm="running") if model == "convnet" else resnet("running"))
    client = replace(client, validation=replace(client.validation, labels=client.validation.labels[:count]))
    whole = tuple(range(len(client.blueprint.atoms)))
    files = sum((client.store.model / f"atoms.{atom}.safetensors").stat().st_size for atom in whole)
    batch = {1: 1, 5: 5, 20: 16}[count]
    assert piece_bytes(client, whole, files + 1600) == min(files + 1600, 2 * files + 100 * batch)
    assert piece_bytes(client, whole, files + 16 * files) == min(17 * files, (2 + batch) * files)
    assert held_bytes(client, [whole]) == files + 4 * batch * 64

    attack = image_attack(client.settings, client.data, 2)
    cost = piece_cost(client.blueprint, whole, "head", replace(client.training_config, attack=attack)).peak_bytes
    validate(client, [whole], "head", attack, held=True)
    assert 0 < client.cap.peak_bytes <= piece_bytes(client, whole, cost)


@pytest.mark.parametrize("held", [True, False])
def test_one_attack_step_is_counted_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    peaks, found = [], []
    for counted in ("once", "always"):
        client = seasoned(tmp_path / counted, resnet("running"))
        if counted == "always":
            monkeypatch.setattr(validation, "counted_once", lambda gradient: gradient)
        pieces: list[Piece] = [(0, 1), (2, 3), (4,)]
        found.append(validate(client, pieces, "head", image_attack(client.settings, client.data, 4), held=held))
        peaks.append(client.cap.peak_bytes)
    assert peaks[0] == peaks[1] > 0
    assert found[0] == found[1]
