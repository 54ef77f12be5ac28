"""FedProx: the loss of Eq. 2 by hand, and what clients train with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TRIO, clients_of, model_of, run_local, same
from zoo_helpers import blueprint_of

from piecework.strategies.whole.fedprox.client import proximal_loss
from piecework.training.loop import PieceModel, load_for_device, single_loss

SETTINGS = TRIO | {"fleet": "unlimited", "num_rounds": 2, "training__local_iterations": 4}


def a_piece() -> PieceModel:
    blueprint = blueprint_of("convnet")
    return PieceModel(
        blueprint, tuple(range(len(blueprint.atoms))), "head", load_for_device(blueprint, lambda *_: None)
    )


def test_the_loss_and_its_gradient_by_hand() -> None:
    """Every weight moves by d = 0.5 from w^t: mu/2 ||w - w^t||^2 = 0.4 / 2 x n / 4, and mu d = 0.2 is added to gradients."""
    piece = a_piece()
    for p in piece.parameters():
        torch.nn.init.constant_(p, 0.0)
    plain, proximal = single_loss([piece]), proximal_loss(0.4)([piece])
    z, y = torch.ones(2, *piece.blueprint.input_shape), torch.tensor([0, 1])
    assert proximal(z, y).item() == plain(z, y).item()
    with torch.no_grad():
        for p in piece.parameters():
            p.add_(0.5)
    count = sum(p.numel() for p in piece.parameters())
    assert proximal(z, y).item() - plain(z, y).item() == pytest.approx(0.05 * count, rel=1e-5)
    gradients = []
    for loss in (plain, proximal):
        loss(z, y).backward()  # type: ignore[no-untyped-call]
        gradients.append([p.grad.clone() for p in piece.parameters() if p.grad is not None])
        for p in piece.parameters():
            p.grad = None
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one + 0.2)


@pytest.mark.slow
def test_without_the_term_it_is_fedavg(tmp_path: Path) -> None:
    plain = run_local(tmp_path / "plain", **SETTINGS | {"strategy": "fedavg"})
    own = run_local(tmp_path / "own", **SETTINGS | {"strategy": "fedprox", "fedprox__mu": 0.0})
    assert same(model_of(own), model_of(plain))


@pytest.mark.slow
def test_clients_stay_nearer_and_hold_a_second_copy(tmp_path: Path) -> None:
    """The copy is that of the parameters; the term of a step may take more for a while."""
    plain = run_local(tmp_path / "plain", **SETTINGS | {"strategy": "fedavg", "num_rounds": 1})
    start = run_local(tmp_path / "start", **SETTINGS | {"strategy": "fedavg", "num_rounds": 1, "training__lr": 1e-30})
    distances = []
    for mu in (0.0, 0.1, 10.0):
        changes = {"strategy": "fedprox", "fedprox__mu": mu, "num_rounds": 1, "training__momentum": 0.0}
        run = run_local(tmp_path / str(mu), **SETTINGS | changes)
        one, other = model_of(start), model_of(run)
        names = [name for name in one if name.endswith(("weight", "bias"))]
        distances.append(sum(float(np.square(one[name] - other[name]).sum()) for name in names))
        for client, theirs in zip(clients_of(run), clients_of(plain), strict=True):
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]
            assert mu == 0.0 or client["predicted_peak"] > theirs["predicted_peak"]
    assert distances == sorted(distances, reverse=True)
    assert distances[2] < 0.5 * distances[0]
