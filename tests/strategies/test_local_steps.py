"""The local steps of every system: gradients are bounded, and the optimiser is the one that the settings name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FEW, RecordingGrid, arrays_of, clients_of, run_local, training
from safetensors.numpy import load_file

from piecework.training.methods import METHODS

BY_TRAINER = {
    METHODS[name].client: name for name in METHODS if name != "local"
}  # one system of each trainer; local sends nothing
STEPS: dict[str, Any] = {
    "clients": 1,
    "dataset": FEW,
    "fleet": "unlimited",
    "training__lr": 1.0,
    "training__clip_norm": 1e-10,
    "training__momentum": 0.0,
    "training__weight_decay": 0.0,
    "training__local_iterations": 2,
    "attack__steps": 1,
    "evaluation__attack_examples": 10,
}
FAMILY = {"model": "resnet10", "architecture__width": 0.125, "feddf__family": "cnn3", "data__public_fraction": 0.2}
MORE: dict[str, dict[str, Any]] = {"fedet": FAMILY, "profl": {"profl__stage_rounds": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(set(BY_TRAINER.values()) - {"fedpm"}))
def test_a_tiny_bound_holds_all_parameters(tmp_path: Path, strategy: str) -> None:
    """A step of rate 1 without it moves some parameter by more than a thousandth."""
    run_local(tmp_path, RecordingGrid, **STEPS | MORE.get(strategy, {}) | {"strategy": strategy})
    (sent,), (received,) = training(RecordingGrid.last.sent), training(RecordingGrid.last.received)
    before, after = arrays_of(sent), arrays_of(received)
    names = [name for name in after if name in before and not name.endswith(("running_mean", "running_var", "tracked"))]
    assert names
    for name in names:
        assert np.abs(after[name] - before[name]).max() < 1e-7, name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(set(BY_TRAINER.values()) - {"fedpm"}))
def test_adams_first_step_is_as_long_as_the_rate(tmp_path: Path, strategy: str) -> None:
    """m / sqrt(v) is g / |g| then, whatever the gradient's size."""
    rate = {"training__lr": 0.01, "training__clip_norm": 0.0, "training__local_iterations": 1}
    settings = STEPS | rate | MORE.get(strategy, {}) | {"strategy": strategy, "training__optimiser": "adamw"}
    run_dir = run_local(tmp_path, RecordingGrid, **settings)
    (sent,), (received,) = training(RecordingGrid.last.sent), training(RecordingGrid.last.received)
    before, after = arrays_of(sent), arrays_of(received)
    names = [name for name in after if name in before and not name.endswith(("running_mean", "running_var", "tracked"))]
    moved = [float(np.abs(after[name] - before[name]).max()) for name in names]
    assert max(moved) == pytest.approx(0.01, rel=0.01)
    (client,) = clients_of(run_dir)
    assert 0 < client["measured_peak"] <= client["predicted_peak"] <= client["budget"]
    if strategy != "fjord":  # of whose nets the batch drew a narrow one
        assert client["measured_peak"] == client["predicted_peak"]


def test_fedpms_adam_sees_bounded_gradients(tmp_path: Path) -> None:
    """Adam divides by the gradient's size, and masks are bits: the averages of gradients show the bound."""
    run_dir = run_local(tmp_path, **STEPS | {"strategy": "fedpm"})
    files = [load_file(file) for file in (run_dir.path / "clients").rglob("momentum/average_*.safetensors")]
    assert files
    assert max(float(np.abs(array).max()) for file in files for array in file.values()) <= 1e-10
