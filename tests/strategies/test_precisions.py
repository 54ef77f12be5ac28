"""Momentum and stored features in bfloat16, and Adam's averages in 8 bits: the traced bytes, and nearly the same training."""

import math
from pathlib import Path
from typing import Any

import pytest
from helpers import TRIO, fleet_json, run_local
from zoo_helpers import blueprint_of

from piecework.server_app.records import RunDir


def run_of(tmp_path: Path, **changes: Any) -> RunDir:
    settings = TRIO | {"fleet": fleet_json(poor=0.6), "training__momentum": 0.9, "num_rounds": 2}
    return run_local(tmp_path, **settings | changes)


CASCADES: dict[str, dict[str, Any]] = {
    "fedepth": {},
    "fedprophet": {"attack__steps": 2, "evaluation__attack_steps": 2, "fedprophet__stage_rounds": 1},
    "profl": {"profl__stage_rounds": 1, "fleet": "unlimited"},
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASCADES)
def test_rounded_momentum_and_features(tmp_path: Path, strategy: str) -> None:
    settings = {"strategy": strategy} | CASCADES[strategy]
    plain = run_of(tmp_path / "plain", **settings)
    rounded = run_of(
        tmp_path / "rounded", **settings, training__optimiser_state="bfloat16", memory__features="bfloat16"
    )
    for before, after in zip(plain.rounds(), rounded.rounds(), strict=True):
        if before["train_loss"] is not None:  # measuring statistics trains nothing
            assert after["train_loss"] == pytest.approx(before["train_loss"], rel=0.02)
            assert after["train_loss"] != before["train_loss"]
        for client in after["clients"]:
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]


@pytest.mark.slow
def test_adams_averages_in_8_bits(tmp_path: Path) -> None:
    adam = {"training__optimiser": "adamw", "training__lr": 0.002, "fleet": fleet_json(poor=0.8)}
    runs = [run_of(tmp_path / state, **adam, training__optimiser_state=state) for state in ("float32", "8-bit")]
    for before, after in zip(*(run.rounds() for run in runs), strict=True):
        assert after["train_loss"] == pytest.approx(before["train_loss"], rel=0.02)
        assert after["train_loss"] != before["train_loss"]
        for client in after["clients"]:
            assert 0 < client["measured_peak"] == client["predicted_peak"] <= client["budget"]


def test_rounded_features_are_read_in_half_the_time(tmp_path: Path) -> None:
    """FedProphet's second module reads 4 or 2 bytes for each value of its input, from a disk of 10 MB/s."""
    seconds = []
    for kind in ("float32", "bfloat16"):
        run = run_of(tmp_path / kind, strategy="fedprophet", memory__features=kind, **CASCADES["fedprophet"])
        (client, *_) = run.rounds()[1]["clients"]
        assert client["pieces"] == [[3]]
        seconds.append(client["simulated_seconds"])
    values = math.prod(blueprint_of("convnet").shape_before(3))
    saved = 2 * values * client["examples"] / 1e7
    assert seconds[0] - seconds[1] == pytest.approx(saved, abs=2e-6)  # the longer word takes a byte more to send
