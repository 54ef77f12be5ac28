"""`architecture.norm`: norms for which micro-batches are whole batches, in every system that takes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, fleet_json, model_of, run_local
from safetensors.numpy import load_file

import piecework
from piecework.server_app.records import RunDir
from piecework.training.methods import METHODS
from piecework.training.settings import SettingsError

FURTHER: dict[str, dict[str, Any]] = {
    "feddf": {"model": "cnn3", "feddf__family": "convnet", "data__public_fraction": 0.1, "feddf__server_iterations": 2},
    "fedet": {
        "model": "resnet18",
        "architecture__width": 0.125,
        "feddf__family": "resnet10",
        "data__public_fraction": 0.1,
        "feddf__server_iterations": 2,
    },
    "fedprophet": {"attack__steps": 2, "evaluation__attack_steps": 2, "fedprophet__stage_rounds": 1},
    "jfat": {"attack__steps": 2, "evaluation__attack_steps": 2},
    "profl": {"profl__stage_rounds": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name, entry in METHODS.items() if entry.can.other_norms])
def test_every_system_trains_group_norms(tmp_path: Path, strategy: str) -> None:
    settings = TRIO | {"strategy": strategy, "fleet": "unlimited", "architecture__norm": "group"}
    run = run_local(tmp_path, **settings | FURTHER.get(strategy, {}), num_rounds=2)
    for record in run.rounds():
        assert record["batch_norm"] == "none"
        for client in record["clients"]:
            assert client["status"] == "ok"
            assert client["measured_peak"] <= client["predicted_peak"]
            # FjORD may draw narrower nets only
            assert strategy == "fjord" or client["measured_peak"] == client["predicted_peak"]
    model = piecework.load(run.path)
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.GroupNorm)]
    assert norms
    # OrigDrop serves the widest trained net, whose layers may have odd numbers of channels: they are one group.
    assert all(layer.num_groups == 2 - layer.num_channels % 2 for layer in norms)
    assert strategy == "origdrop" or all(layer.num_groups == 2 for layer in norms)
    assert not model.depends_on_batch


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("pretrained"), **TRIO | {"strategy": "fedavg", "fleet": "unlimited"})


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_micro_batches_train_the_same_model(tmp_path: Path, pretrained: RunDir, norm: str) -> None:
    settings = TRIO | {"strategy": "fedavg", "architecture__norm": norm, "num_rounds": 2}
    if norm == "frozen":
        settings |= {"training__init_weights": str(pretrained.path / "model.safetensors")}
    rich = run_local(tmp_path / "rich", **settings, fleet="unlimited")
    poor = run_local(tmp_path / "poor", **settings, fleet=fleet_json(poor=0.8), memory__fit="micro-batch")
    assert {client["step"] for client in poor.rounds()[0]["clients"]} == {"micro-batches of 4"}
    assert (poor.coverage() or {})["says"] == ""
    for name, array in model_of(poor).items():
        np.testing.assert_allclose(array, model_of(rich)[name], rtol=0, atol=1e-5)


def test_frozen_norms_keep_their_statistics(tmp_path: Path, pretrained: RunDir) -> None:
    before = load_file(pretrained.path / "model.safetensors")
    settings = TRIO | {"strategy": "fedepth", "fleet": fleet_json(poor=0.6), "architecture__norm": "frozen"}
    run = run_local(tmp_path, **settings, training__init_weights=str(pretrained.path / "model.safetensors"))
    after = load_file(run.path / "model.safetensors")
    statistics = {name for name in before if name.endswith(("running_mean", "running_var"))}
    assert len(statistics) == 10
    for name in before:
        assert np.array_equal(before[name], after[name]) == (name in statistics or name.endswith("batches_tracked"))
    assert run.rounds()[0]["batch_norm"] == "frozen"
    assert not piecework.load(run.path).depends_on_batch
    with pytest.raises(SettingsError, match=r"architecture.norm = 'frozen' keeps .*: set training\.init-weights"):
        run_local(tmp_path, **settings)
