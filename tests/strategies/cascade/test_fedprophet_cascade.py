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
from piecework.client_app.validation import cascade_of, validate
from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.models.zoo import build_blueprint
from piecework.strategies.cascade.fedprophet.client import ATOM, MODULE, MODULES, WHOLE, pieces_held
from piecework.strategies.cascade.fedprophet.evaluation import validation_cost
from piecework.training.memory_cap import MemoryCap
from piecework.training.setup import image_attack

THREE: list[Piece] = [(0, 1), (2, 3), (4,)]


def resnet(batch_norm: str) -> Blueprint:
    return build_blueprint("resnet10", num_classes=10, input_shape=(1, 8, 8), width=0.125, batch_norm=batch_norm)


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
@pytest.mark.parametrize("model", ["convnet", "resnet"])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("pieces", [THREE, [(0, 1, 2, 3, 4)], [(0,), (1,), (2,), (3,), (4,)]])
def test_pieces_have_the_gradient_of_the_whole(
    tmp_path: Path, batch_norm: str, model: str, held: bool, pieces: list[Piece]
) -> None:
    blueprint = a_blueprint(batch_norm=batch_norm) if model == "convnet" else resnet(batch_norm)
    client = seasoned(tmp_path, blueprint, architecture__batch_norm=batch_norm)
    whole, streamed = cascade(client), cascade_of(client, pieces, "head", held=held)
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
    assert stored == ([] if held else [f"input-{number}.page" for number in range(len(pieces) - 1)])


def test_accuracies_are_those_of_the_whole(tmp_path: Path) -> None:
    client = seasoned(tmp_path)
    attack = image_attack(client.settings, client.data, 3)
    by_pieces = [validate(client, cascade_of(client, THREE, "head", held=held), attack) for held in (True, False)]
    whole = validate(client, cascade_of(client, [(0, 1, 2, 3, 4)], "head", held=True), attack)
    assert validate(client, cascade_of(client, THREE, "head", held=True), attack, 3) == pytest.approx(
        by_pieces[0], rel=1e-5
    )
    assert by_pieces[0] == by_pieces[1]
    assert by_pieces[0] == pytest.approx(whole, rel=1e-5, abs=0.051)  # one image of 20 may lie on a border
    x, y = client.validation.read(np.arange(20)), client.validation.targets(np.arange(20))
    with torch.no_grad():
        logits = cascade(client)(x)
    assert whole["val-examples"] == 20
    assert whole["val-accuracy"] == float((logits.argmax(1) == y).sum()) / 20
    assert whole["val-loss"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    nothing = replace(attack, epsilon=1e-9, step=1e-9)
    streamed = cascade_of(client, THREE, "head", held=False)
    assert validate(client, streamed, nothing)["val-adversarial-accuracy"] == whole["val-accuracy"]
    nobody = replace(client, validation=replace(client.validation, labels=client.validation.labels[:0]))
    assert validate(nobody, cascade_of(nobody, THREE, "head", held=True), attack) == {}


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["running", "batch"])
@pytest.mark.parametrize("model", ["convnet", "resnet"])
def test_what_validation_takes(tmp_path: Path, model: str, batch_norm: str) -> None:
    """As it is traced, in each way and for any number of examples; each way takes less than the one before."""
    client = seasoned(tmp_path, a_blueprint(batch_norm=batch_norm) if model == "convnet" else resnet(batch_norm))
    attack, peaks = image_attack(client.settings, client.data, 2), []
    for way in (WHOLE, MODULES, MODULE, ATOM):
        pieces, held = pieces_held(THREE, way)
        for count in (16, 5, 2):
            cap = MemoryCap(10**9, enforced=True)
            few = replace(
                client, validation=replace(client.validation, labels=client.validation.labels[:count]), cap=cap
            )
            config = replace(client.training_config, batch_size=count)
            validate(few, cascade_of(few, pieces, "head", held=held), attack)
            predicted = validation_cost(client.blueprint, pieces, config, attack, held=held)
            assert 0.97 * predicted <= cap.peak_bytes <= predicted
            peaks.append(cap.peak_bytes)
    assert sorted(peaks[::3], reverse=True) == peaks[::3]


@pytest.mark.parametrize("held", [True, False])
def test_one_attack_step_is_counted_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    peaks, found = [], []
    for counted in ("once", "always"):
        client = seasoned(tmp_path / counted, resnet("running"))
        if counted == "always":
            monkeypatch.setattr(validation, "count_once", lambda gradient: gradient)
        attack = image_attack(client.settings, client.data, 4)
        found.append(validate(client, cascade_of(client, THREE, "head", held=held), attack))
        peaks.append(client.cap.peak_bytes)
    assert peaks[0] == peaks[1] > 0
    assert found[0] == found[1]
