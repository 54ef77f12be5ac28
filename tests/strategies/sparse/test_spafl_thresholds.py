"""SpaFL's thresholds: their regulariser's weight, which of them the server rejects, and settings that do not go together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import few_digits, model_of, run_local, tiny_settings
from spafl_helpers import SPAFL

from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.server_app.rounds import Run
from piecework.strategies.sparse.spafl.client import THRESHOLDS
from piecework.strategies.sparse.spafl.forms import SparseModel
from piecework.strategies.sparse.spafl.server import SpaFL


def test_the_regularisers_weight(tmp_path: Path) -> None:
    """c(t) of the authors' code, and alpha that falls to 0 within 0.1 above the target."""

    def strategy(**changes: Any) -> SpaFL:
        settings = tiny_settings(**SPAFL | {"dataset": f"npz:{few_digits()}", "output_dir": str(tmp_path)} | changes)
        with LocalGrid(3, settings.to_run_config(), 1) as grid:
            found = Run(grid, settings, RunDir(tmp_path / "none")).server.method
        assert isinstance(found, SpaFL)
        return found

    plain = strategy()
    assert [plain.alpha(n) for n in (1, 5)] == [0.05, 0.05]
    ramped = strategy(spafl__sparsity_ramp=True)
    assert [ramped.alpha(n) for n in (1, 2, 200)] == pytest.approx(
        [0.05 / (1 + np.exp(5)), 0.05 / (1 + np.exp(-5)), 0.05]
    )
    aimed = strategy(spafl__target_density=0.4)
    for density, alpha in ((1.0, 0.05), (0.5, 0.05), (0.45, 0.025), (0.4, 0.0), (0.3, 0.0)):
        aimed.state.density = density
        assert aimed.alpha(1) == pytest.approx(alpha)


@pytest.mark.slow
def test_alpha_follows_the_reported_density(tmp_path: Path) -> None:
    changes = SPAFL | {"num_rounds": 3, "training__batch_size": 8, "spafl__target_density": 0.4, "evaluation__every": 0}
    first, second, third = run_local(tmp_path, **changes).rounds()
    assert first["alpha"] == 0.05
    for before, record in ((first, second), (second, third)):
        density = np.mean([layer["density"] for layer in before["filters"].values()])
        assert record["alpha"] == pytest.approx(0.05 * min(1, max(0, (density - 0.4) / 0.1)))


def test_what_a_rejected_client_says_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds of 7 and a mask of nothing: neither reaches the density that alpha follows."""
    original = SparseModel.thresholds

    def spoilt(self: SparseModel) -> np.ndarray:
        found = original(self)
        if not calls:
            found[:] = 7.0
        calls.append(1)
        return found

    calls: list[int] = []
    monkeypatch.setattr(SparseModel, "thresholds", spoilt)
    monkeypatch.setattr(SparseModel, "mask", lambda self: np.full(160, bool(calls)))  # told before thresholds are
    (record,) = run_local(tmp_path, **SPAFL).rounds()
    assert [c["status"] for c in record["clients"]] == ["rejected", "ok", "ok"]
    assert [layer["density"] for layer in record["filters"].values()] == [1.0] * 5


def test_thresholds_below_0_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseModel, "thresholds", lambda self: np.full(160, -0.1, dtype=np.float32))
    with pytest.raises(Exception, match=r"thresholds from -0\.1 to -0\.1: they must be from 0 to 1"):
        run_local(tmp_path, **SPAFL)


# The authors' code on Fashion-MNIST, as the preset's header has it.
AUTHORS = {
    "spafl__straight_through": "flowing",
    "spafl__importance_update": "authors",
    "spafl__sparsity_ramp": True,
    "spafl__client_momentum": True,
    "spafl__clamp_thresholds": False,
    "data__pixel_scale": "raw",
}


@pytest.mark.slow
def test_thresholds_that_are_not_clamped_are_accepted(tmp_path: Path) -> None:
    """They leave [0, 1], and alpha's ramp moves them much more in round 2 than in round 1."""
    small = {"model": "lenet5", "dataset": "digits32", "clients": 60, "clients_per_round": 3, "training__batch_size": 8}
    weak = {"training__lr": 0.005, "spafl__sparsity": 0.002, "evaluation__every": 0, "num_rounds": 2}
    run_dir = run_local(tmp_path, **SPAFL | AUTHORS | small | weak)
    assert [c["status"] for record in run_dir.rounds() for c in record["clients"]] == ["ok"] * 6
    tau = model_of(run_dir)[THRESHOLDS]
    assert tau.min() < 0
    assert tau.max() > 1


def test_a_threshold_far_from_the_others_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If thresholds are not clamped, a client's movement is compared with that of the others."""
    original, calls = SparseModel.thresholds, list[int]()

    def spoilt(self: SparseModel) -> np.ndarray:
        found = original(self)
        calls.append(1)
        return found + 1e6 * (len(calls) == 1)

    monkeypatch.setattr(SparseModel, "thresholds", spoilt)
    (record,) = run_local(tmp_path, **SPAFL | {"spafl__clamp_thresholds": False, "evaluation__every": 0}).rounds()
    assert [c["status"] for c in record["clients"]] == ["rejected", "ok", "ok"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation.mode": "central"}, "evaluation.mode = 'central': spafl has only the clients' personal models"),
        (
            {"architecture__batch_norm": "local"},
            "architecture.batch-norm = 'local': spafl always keeps batch norms on the clients",
        ),
        (
            {"spafl__client_momentum": True, "training__momentum": 0.0},
            "spafl.client-momentum = true: it keeps the clients' momentum, but training.momentum is",
        ),
        (
            {"evaluation__on_clients_every": 2},
            "evaluation.on-clients-every = 2: spafl has only",
        ),
        (
            {"spafl__masked_every": 2, "spafl__silent_norms": False},
            "spafl.masked-every = 2: with spafl.silent-norms = false",
        ),
        (
            {"spafl__masked_every": 0, "spafl__frozen_weights": True},
            "spafl.masked-every = 0: with spafl.frozen-weights = true",
        ),
        (
            {"training__optimiser_state": "8-bit"},
            "training.optimiser-state = '8-bit': spafl moves momentum between forms",
        ),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_local(tmp_path, **SPAFL | changes)
