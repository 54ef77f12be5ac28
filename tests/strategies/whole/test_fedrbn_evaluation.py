"""FedRBN's evaluation: by which set of statistics, what a detector chooses; plans, and settings that make no sense."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedrbn_helpers import SMALL, a_dual_blueprint
from helpers import a_blueprint, clients_of, run_local, tiny_settings
from torch.nn import functional as F

from piecework.federated_data.datasets import default_cache, prepare
from piecework.federation.public_data import public_examples
from piecework.models.dual_norm import is_adversarial, use
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.strategies.whole.fedrbn.detector import DetectingPiece, fit_detector
from piecework.training.attacks import by_backward, pgd
from piecework.training.setup import image_attack, open_dataset


@pytest.mark.slow
def test_the_branch_is_named_and_used(tmp_path: Path) -> None:
    found = {}
    for branch in ("oracle", "clean", "adversarial", "detector"):
        changes = {"fedrbn__evaluation_branch": branch, "data__public_fraction": 0.2}
        run_dir = run_local(tmp_path / branch, **SMALL | changes)
        (record,) = run_dir.rounds()
        final = json.loads((run_dir.path / "final.json").read_text())
        assert record["evaluation_branch"] == final["evaluation_branch"] == branch
        found[branch] = record
    assert found["oracle"]["loss"] == found["clean"]["loss"] != found["adversarial"]["loss"]
    assert found["oracle"]["adversarial_accuracy"] == found["adversarial"]["adversarial_accuracy"]


@pytest.mark.slow
def test_clients_evaluate_by_the_branch_too(tmp_path: Path) -> None:
    found = {}
    for branch in ("oracle", "clean", "adversarial"):
        changes = {"fedrbn__evaluation_branch": branch, "evaluation__mode": "personal"}
        (found[branch],) = run_local(tmp_path / branch, **SMALL | changes).rounds()
    assert found["oracle"]["loss"] == found["clean"]["loss"] != found["adversarial"]["loss"]
    with pytest.raises(ValueError, match=r"evaluation\.mode = 'personal': the detector of fedrbn"):
        run_local(tmp_path / "d", **SMALL | {"fedrbn__evaluation_branch": "detector", "evaluation__mode": "personal"})


def test_before_anybody_met_an_attack_the_clean_set_stands_in(tmp_path: Path) -> None:
    found = {}
    for branch in ("oracle", "clean"):
        changes = {"fedrbn__evaluation_branch": branch, "attack__warmup": 1, "num_rounds": 2}
        found[branch] = run_local(tmp_path / branch, **SMALL | changes).rounds()
    first, second = zip(found["oracle"], found["clean"], strict=True)
    assert first[0]["adversarial_accuracy"] == first[1]["adversarial_accuracy"]
    assert second[0]["accuracy"] == second[1]["accuracy"]


def test_a_detector_chooses_image_by_image() -> None:
    blueprint = a_dual_blueprint()
    torch.manual_seed(0)
    piece = DetectingPiece(blueprint, range(len(blueprint.atoms)), "head", blueprint.build_unit)
    use(piece.units().values(), adversarial=True)
    piece.logits(torch.randn(50, 1, 8, 8) * 4)  # so that the sets differ
    piece.train(False)
    x = torch.rand(3, 1, 8, 8)
    clean, robust = piece.logits_by(x, adversarial=False), piece.logits_by(x, adversarial=True)
    piece.detector = lambda logits: np.array([True, False, True])
    torch.testing.assert_close(piece.logits(x), torch.stack([robust[0], clean[1], robust[2]]))
    assert not torch.allclose(clean, robust)


def test_a_detector_learns_what_attacks_look_like() -> None:
    pytest.importorskip("sklearn")
    settings = tiny_settings(
        **SMALL | {"dataset": "digits", "data__public_fraction": 0.1, "attack__epsilon": 0.5, "attack__steps": 5}
    )
    prepare("digits", data_dir="", cache_dir=default_cache())
    public = public_examples(settings)
    blueprint = a_dual_blueprint()
    torch.manual_seed(0)
    piece = DetectingPiece(blueprint, range(len(blueprint.atoms)), "head", blueprint.build_unit)
    piece.train(False)
    fit_detector(piece, public, settings)
    z = public.read(np.arange(50))
    clean = piece.logits_by(z, adversarial=False)
    gradient = by_backward(lambda x, y: F.cross_entropy(piece.logits_by(x, adversarial=True), y))
    attack = image_attack(settings, open_dataset("digits", ""), 5)
    attacked = piece.logits_by(pgd(gradient, z, clean.argmax(1), attack, torch.Generator()), adversarial=False)
    assert piece.detector is not None
    verdicts = [piece.detector(logits.detach().numpy()).mean() for logits in (clean, attacked)]
    assert verdicts[0] < 0.2 < 0.8 < verdicts[1]


@pytest.mark.slow
def test_clients_evaluate_each_example_by_its_own_set(tmp_path: Path) -> None:
    found = {}
    for branch in ("oracle", "clean", "adversarial"):
        changes = {
            "evaluation__on_clients_every": 1,
            "data__validation_fraction": 0.4,
            "num_rounds": 2,
            "fedrbn__evaluation_branch": branch,
        }
        found[branch] = run_local(tmp_path / branch, **SMALL | changes).rounds()
    keys = "client_accuracy", "client_adversarial_accuracy"
    oracle, clean, robust = ([[r[key] for key in keys] for r in rounds] for rounds in found.values())
    assert [own for own, _ in oracle] == [own for own, _ in clean] != [own for own, _ in robust]
    assert [attacked for _, attacked in oracle] == [attacked for _, attacked in robust]


def test_a_plan_agrees_with_a_run(tmp_path: Path) -> None:
    settings = tiny_settings(**SMALL | {"dataset": "digits"})
    found = make_plan(settings, ask(settings))
    clients = clients_of(run_local(tmp_path, **SMALL | {"dataset": "digits"}))
    (stage,) = found["fleet"]["stages"]
    assert stage["peak_bytes"] == max(client["measured_peak"] for client in clients)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"architecture__batch_norm": "batch"},
            "architecture.batch-norm = 'batch': fedrbn needs running statistics to propagate",
        ),
        ({"model": "cnn-femnist"}, "model 'cnn-femnist' has no batch norm"),
        ({"attack__warmup": 1}, "attack.warmup = 1 leaves no adversarial round in num-rounds = 1"),
        ({"fedrbn__evaluation_branch": "detector"}, "data.public-fraction = 0.0"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        run_local(tmp_path, **SMALL | changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"architecture__batch_norm": "batch"},
            "architecture.batch-norm = 'batch': fedrbn needs running statistics to propagate",
        ),
        ({"model": "cnn-femnist"}, "model 'cnn-femnist' has no batch norm"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(changes: dict[str, Any], told: str) -> None:
    settings = tiny_settings(**SMALL | {"dataset": "digits"} | changes)
    with pytest.raises(ValueError, match=told):
        make_plan(settings, ask(settings))


def test_other_models_have_one_set() -> None:
    units = [a_blueprint(batch_norm=kind).build_unit("atoms.1") for kind in ("running", "batch", "local")]
    assert not any(is_adversarial(name) for unit in units for name in unit.state_dict())
