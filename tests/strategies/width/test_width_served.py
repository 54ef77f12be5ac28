"""Which of a run's sub-models is served, and which ones its model is the mean of."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    FEW,
    RecordingGrid,
    arrays_of,
    few_digits,
    fleet_json,
    model_of,
    run_local,
    same,
    tiny_settings,
    training,
)
from safetensors.numpy import load_file
from torch import nn
from width_helpers import SMALL, conv_of

from piecework import load
from piecework.models.cascade import Blueprint
from piecework.models.channels import channel_axes
from piecework.models.variant import Variant, vary
from piecework.models.width import shapes, sub_indices, take, take_first
from piecework.models.zoo import build_blueprint
from piecework.strategies.width.heterofl.client import input_ratios, scale_up
from piecework.strategies.width.heterofl.server import HeteroFL
from piecework.training.loop import PieceModel

# ---- the model that is served


def test_the_widest_trained_net_is_served(tmp_path: Path) -> None:
    """Half of the channels: 8 of 16 into 8 of 16. A layer of half its inputs computes (W x + b) / 0.5 in training: 2 W, 2 b.

    What is saved computes what the half net computes with its Scaler, and was evaluated. The trained model stays whole.
    """
    changes = SMALL | {"fleet": fleet_json(some=0.6, poor=0.3), "architecture__batch_norm": "batch", "dataset": FEW}
    run_dir = run_local(tmp_path, **changes)
    saved, trained = load_file(run_dir.path / "model.safetensors"), model_of(run_dir)
    assert (conv_of(trained).shape[:2], conv_of(saved).shape[:2]) == ((16, 16), (8, 8))
    np.testing.assert_array_equal(conv_of(saved), 2 * conv_of(trained)[:8, :8])
    np.testing.assert_array_equal(saved["atoms.0.conv.weight"], trained["atoms.0.conv.weight"][:8])  # of whole images
    last = max(name for name, array in saved.items() if name.startswith("head.") and array.ndim == 2)
    np.testing.assert_array_equal(saved[last], trained[last][:, : saved[last].shape[1]])
    full = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="batch")
    half = vary(full, Variant(width=0.5, rounding="up"))
    indices = sub_indices(channel_axes(full), shapes(full), shapes(half), take_first)
    narrow = filled(half, {name: take(trained[name], where) for name, where in indices.items()})
    scale_up(narrow, input_ratios(half, full))
    with np.load(few_digits()) as data, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch norms
        logits, x = load(run_dir.path, normalise=False), torch.tensor(data["x_test"]).permute(0, 3, 1, 2).float()
        torch.testing.assert_close(logits(x), narrow.logits(x), rtol=1e-4, atol=1e-5)
        found = load(run_dir.path).predict(data["x_test"]).classes.numpy()
        assert run_dir.rounds()[-1]["accuracy"] == pytest.approx(float((found == data["y_test"]).mean()))


def filled(model: Blueprint, arrays: dict[str, np.ndarray]) -> PieceModel:
    """The whole model with these arrays."""

    def build(unit: str) -> nn.Module:
        module = model.build_unit(unit)
        module.load_state_dict({key: torch.tensor(arrays[f"{unit}.{key}"]) for key in module.state_dict()})
        return module

    return PieceModel(model, range(len(model.atoms)), "head", build)


@pytest.mark.parametrize("strategy", ["heterofl", "fedrolex", "feddrop"])
def test_the_full_model_is_served_if_it_is_trained(tmp_path: Path, strategy: str) -> None:
    """By one client of HeteroFL; FedRolex and FedDrop train all channels in time."""
    fleet = fleet_json(**({"rich": 1.2} if strategy == "heterofl" else {}), some=0.6, poor=0.3)
    changes = {"strategy": strategy, "architecture__batch_norm": "batch", "num_rounds": 1, "fleet": fleet}
    run_dir = run_local(tmp_path, **SMALL | changes)
    assert same(load_file(run_dir.path / "model.safetensors"), model_of(run_dir))


def test_a_wider_net_is_served_once_it_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the run begins no client is known that trains more than a quarter; then one trains all channels."""
    monkeypatch.setattr(HeteroFL, "fitting_levels", lambda *_: [2])
    run_dir = run_local(tmp_path, **SMALL | {"architecture__batch_norm": "batch", "num_rounds": 1})
    assert same(load_file(run_dir.path / "model.safetensors"), model_of(run_dir))


# ---- sub-models that are left out of the mean


@pytest.mark.slow
def test_sub_models_of_a_ratio_are_left_out_of_the_mean(tmp_path: Path) -> None:
    """FeDepth's Figure 2: all train, and the model is the mean of the others alone; without any left out, of all."""
    for left_out, counted in (("", 3), ("0.25", 2), ("0.5,0.25", 1)):
        grid = type("Recording", (RecordingGrid,), {})
        changes = {"heterofl__left_out": left_out, "heterofl__masked_loss": False, "num_rounds": 1}
        run_dir = run_local(tmp_path / str(counted), grid, **SMALL | changes)
        replies = sorted((arrays_of(m) for m in training(grid.last.received)), key=lambda each: -conv_of(each).size)
        assert len({conv_of(each).shape for each in replies}) == 3
        own = model_of(run_dir)
        name = next(name for name, array in own.items() if array is conv_of(own))
        corner = [each[name][0, 0].astype(np.float64) for each in replies[:counted]]  # which all three have
        np.testing.assert_allclose(own[name][0, 0], np.mean(corner, axis=0), atol=1e-7)
        outside = conv_of(replies[0])[-1, -1]  # which only the widest has
        np.testing.assert_allclose(own[name][-1, -1], outside, atol=1e-7)


@pytest.mark.parametrize(
    ("left_out", "wrong"), [("0.3", "0.3 is not one of the width ratios"), ("1,0.5,0.25", "leave at least one")]
)
def test_what_cannot_be_left_out(left_out: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        tiny_settings(**SMALL | {"heterofl__left_out": left_out})
