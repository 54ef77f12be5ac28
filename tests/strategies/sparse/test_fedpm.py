"""FedPM: frozen weights, masks and their gradient, the posterior's mode, packed bits."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from helpers import TRIO, RecordingGrid, a_training_config, arrays_of, model_of, run_local, same, training
from safetensors.numpy import load_file
from torch import nn

import piecework
from piecework.federation.aggregation import CheckedUpdate
from piecework.models.cascade import initial_state
from piecework.models.supermask import DrawnMask, supermask
from piecework.models.zoo import build_blueprint
from piecework.strategies.method import Received
from piecework.strategies.sparse.fedpm.client import MASK
from piecework.strategies.sparse.fedpm.server import FedPM, coded_bits
from piecework.training.adam import Adam

FEDPM = TRIO | {"strategy": "fedpm", "fleet": "spafl", "training__lr": 0.1, "training__weight_decay": 0.0}


def test_weights_are_one_size_with_signs_by_the_seed() -> None:
    plain = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="batch")
    one, again, other = (supermask(plain, seed).build_unit("atoms.1").get_submodule("conv") for seed in (1, 1, 2))
    frozen = one.get_buffer("frozen_weight")
    assert frozen.abs().unique().tolist() == [pytest.approx(math.e / math.sqrt(16 * 9))]
    assert 0.4 < float((frozen > 0).float().mean()) < 0.6
    assert torch.equal(frozen, again.get_buffer("frozen_weight"))
    assert not torch.equal(frozen, other.get_buffer("frozen_weight"))
    same_signs = supermask(plain, 1).build_unit("atoms.0").get_submodule("conv").get_buffer("frozen_weight")
    assert not torch.equal(frozen[:, :1], same_signs)


def test_the_arrays_are_scores_and_norms_have_none() -> None:
    plain = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="batch")
    names = [name for name, _ in initial_state(supermask(plain, 1), 1)]
    assert names == [name for name, _ in initial_state(plain, 1) if ".bn." not in name]
    scores = torch.cat([value.flatten() for _, value in initial_state(supermask(plain, 1), 1)])
    assert abs(float(scores.mean())) < 0.05
    assert abs(float(scores.std()) - 1) < 0.05


@pytest.mark.parametrize("by_authors", [False, True])
def test_gradients_pass_the_draw(by_authors: bool) -> None:
    """theta (1 - theta) g, and in the authors' code theta times that."""
    scores = torch.tensor([0.0, 2.0, -1.0], requires_grad=True)
    DrawnMask.apply(scores, None, by_authors).backward(torch.tensor([1.0, 2.0, 3.0]))
    assert scores.grad is not None
    theta = 1 / (1 + np.exp(-np.array([0.0, 2.0, -1.0])))
    expected = theta * (1 - theta) * np.array([1, 2, 3]) * (theta if by_authors else 1)
    assert np.allclose(scores.grad, expected, atol=1e-6)


def test_masks_are_redrawn_in_training_and_fixed_in_evaluation() -> None:
    unit = supermask(
        build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8), batch_norm="batch"), 1
    ).build_unit("atoms.0")
    conv: Any = unit.get_submodule("conv")
    masks = []
    for training_mode in (True, True, False, False):
        conv.train(training_mode)
        masks.append(conv.draw()["weight"])
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])


def test_adam_moves_as_torchs_does_also_after_a_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (nn.Parameter(torch.arange(6.0)) for _ in range(2))
    ours, reference = Adam([mine], a_training_config(lr=0.1, weight_decay=0.0)), torch.optim.Adam([theirs], lr=0.1)
    for step in range(5):
        if step == 3:
            ours.save(tmp_path / "adam")
            ours = Adam([mine], ours.training_config)
            ours.load(tmp_path / "adam")
        gradient = torch.randn(6, generator=generator)
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine.detach(), theirs.detach())


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
def test_clients_keep_adams_moments(tmp_path: Path, keep: bool) -> None:
    """Their steps are counted through: 3 after the first round, 6 after the second."""
    run_dir = run_local(
        tmp_path, **FEDPM | {"fedpm__keep_adam": keep, "num_rounds": 2, "training__local_iterations": 3}
    )
    for server_round in (1, 2):
        files = [*(run_dir.path / "clients").glob(f"*/*/state/{server_round}/momentum/*.safetensors")]
        kept = [pair for file in files for pair in load_file(file).items()]
        assert {int(value) for name, value in kept if name.startswith("steps_")} == (
            {3 * server_round} if keep else set()
        )
        assert len(kept) == (3 * 3 * len(model_of(run_dir)) if keep else 0)  # three buffers, three clients


@pytest.mark.slow
def test_scores_are_of_the_posteriors_mode(tmp_path: Path) -> None:
    """logit(0.01 + 0.98 sum m / 3), each client alike; up go bits, 32 times fewer bytes."""
    grid = RecordingGrid
    run_dir = run_local(tmp_path, grid, **FEDPM | {"num_rounds": 2})
    up, down = training(grid.last.received), training(grid.last.sent)
    masks = [np.unpackbits(arrays_of(m)[MASK], bitorder="little") for m in up[3:]]
    scores = np.concatenate([array.ravel() for _, array in sorted(model_of(run_dir).items())])
    theta = 0.01 + 0.98 * np.sum(masks, axis=0)[: len(scores)] / 3
    assert np.allclose(scores, np.log(theta / (1 - theta)), atol=1e-6)
    assert {round(float(each), 4) for each in scores} == {-4.5951, -0.6782, 0.6782, 4.5951}
    assert same(arrays_of(down[3]), arrays_of(down[4]))
    sizes = [sum(array.nbytes for array in arrays_of(m).values()) for m in (down[0], up[0])]
    assert sizes[1] == math.ceil(sizes[0] / 32)
    (first, second) = run_dir.rounds()
    assert first["ones"] == pytest.approx(0.5, abs=0.05)
    for client in second["clients"]:
        coded = second["coded_bits"][str(client["client"])]
        assert 0.5 * len(scores) < coded <= len(scores)
        assert client["counted_bits"] == pytest.approx(32 * len(scores) + coded)


@pytest.mark.parametrize(("mask", "size"), [([0] * 8, 0), ([1] * 8, 0), ([1, 0, 1, 0], 4), ([1, 0, 0, 0], 3.245)])
def test_what_a_coder_leaves_of_a_mask(mask: list[int], size: float) -> None:
    assert coded_bits(np.array(mask)) == pytest.approx(size, abs=1e-3)


@pytest.mark.slow
def test_it_learns_and_the_model_can_be_loaded(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **FEDPM | {"dataset": "digits", "num_rounds": 2, "training__local_epochs": 4})
    assert run_dir.rounds()[-1]["accuracy"] > 0.5
    model = piecework.load(run_dir.path)
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    for client in run_dir.rounds()[-1]["clients"]:
        assert client["measured_peak"] <= client["predicted_peak"]


def test_bits_behind_the_end_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FedPM.check

    def spoilt(self: FedPM, received: Received) -> CheckedUpdate:
        mask = received.arrays[MASK].numpy().copy()
        mask[-1] |= 0x80
        return original(self, replace(received, arrays=ArrayRecord({MASK: Array(mask)})))

    monkeypatch.setattr(FedPM, "check", spoilt)
    with pytest.raises(RuntimeError, match=r"the mask of [0-9]+ scores has bits set after its end"):
        run_local(tmp_path, **FEDPM | {"model": "lenet5", "dataset": "digits32", "architecture__width": 0.15})


def test_layers_without_masks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"deit-tiny has a [A-Za-z]+: masks are for convolutions and linear layers"):
        supermask(build_blueprint("deit-tiny", num_classes=10, input_shape=(3, 32, 32)), 1)


@pytest.mark.parametrize("batch_norm", ["running", "local"])
def test_statistics_are_refused(tmp_path: Path, batch_norm: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"architecture.batch-norm = '{batch_norm}': fedpm sends masks, which cannot contain statistics, use",
    ):
        run_local(tmp_path, **FEDPM | {"architecture__batch_norm": batch_norm})
