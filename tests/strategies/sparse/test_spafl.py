"""SpaFL end to end on the in-process grid: thresholds travel, weights stay, stores, resume, what is recorded."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from helpers import arrays_of, few_digits, model_of, run_local, same, tiny_settings, training
from safetensors.numpy import load_file
from spafl_helpers import SPAFL

import piecework
from piecework.models.cascade import Blueprint, initial_state
from piecework.models.masked import mask_model
from piecework.models.model_file import ModelFileError
from piecework.server_app.records import RunDir
from piecework.strategies.sparse.spafl.client import CHANGE, THRESHOLDS, from_words, initial_model, to_words
from piecework.strategies.sparse.spafl.forms import SparseModel
from piecework.strategies.sparse.spafl.server import SpaFL
from piecework.strategies.sparse.spafl.settings import SpaFLSettings
from piecework.training.loop import load_for_device
from piecework.training.settings import Settings
from piecework.training.setup import blueprint_for, open_dataset


def masked_model(settings: Settings) -> Blueprint:
    """The run's model with thresholds."""
    plain = blueprint_for(settings, open_dataset(settings.dataset, ""))
    return mask_model(
        plain, settings.of(SpaFLSettings).straight_through, silent=settings.of(SpaFLSettings).silent_norms
    )


def stores(run_dir: RunDir) -> Path:
    """The clients' folders of a run."""
    (folder,) = (run_dir.path / "clients").glob("*")
    return folder


def kept(run_dir: RunDir, client: int) -> dict[int, dict[str, np.ndarray]]:
    """A client's models by round."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for folder in (stores(run_dir) / str(client) / "state").iterdir():
        files = folder.rglob("*.safetensors")
        found[int(folder.name)] = {name: array for file in files for name, array in load_file(file).items()}
    return found


def test_masks_as_words() -> None:
    mask = np.zeros(70, dtype=bool)
    mask[[0, 33, 69]] = True
    assert to_words(mask) == [1, 2, 32]
    assert np.array_equal(from_words([1, 2, 32], 70), mask)
    with pytest.raises(ValueError, match="a mask of 70 filters has 3 words, not 2"):
        from_words([1, 2], 70)
    for word in (-1, 2**32):
        with pytest.raises(OverflowError):
            from_words([word, 0, 0], 70)


@pytest.mark.slow
def test_thresholds_alone_travel_and_their_mean_is_plain(tmp_path: Path, grids: Callable[..., Any]) -> None:
    """Eq. 7: each client counts alike, whatever its number of examples."""
    grid = grids()
    changes = {
        "num_rounds": 2,
        "data__partition": "dirichlet",
        "data__partition_balanced": False,
        "data__partition_alpha": 0.5,
    }
    run_dir = run_local(tmp_path, grid, **SPAFL | changes)
    down, up = training(grid.last.sent), training(grid.last.received)
    assert [sorted(arrays_of(m)) for m in down] == 3 * [[THRESHOLDS]] + 3 * [[CHANGE, THRESHOLDS]]
    assert [sorted(arrays_of(m)) for m in up] == 6 * [[THRESHOLDS]]
    first = np.mean([arrays_of(m)[THRESHOLDS].astype(np.float64) for m in up[:3]], axis=0).astype(np.float32)
    assert arrays_of(down[3])[THRESHOLDS].tobytes() == first.tobytes()
    assert arrays_of(down[3])[CHANGE].tobytes() == (first - 0).tobytes()
    second = np.mean([arrays_of(m)[THRESHOLDS].astype(np.float64) for m in up[3:]], axis=0).astype(np.float32)
    assert model_of(run_dir)[THRESHOLDS].tobytes() == second.tobytes()
    assert len({m.content.metric_records["metrics"]["num-examples"] for m in up}) > 1
    for message in grid.last.sent:
        if message.metadata.message_type == "evaluate":
            assert not message.content.array_records["arrays"]


def test_a_client_goes_on_from_its_own_model(tmp_path: Path, grids: Callable[..., Any]) -> None:
    """With its weights, moved by Eq. 13, and the server's thresholds: a rate of almost 0 leaves it at that."""
    grid = grids()
    run_local(tmp_path / "a", grid, **SPAFL | {"num_rounds": 2, "training__lr": 1e-12, "spafl__sparsity": 0.0})
    settings = tiny_settings(**SPAFL | {"dataset": f"npz:{few_digits()}"})
    model = masked_model(settings)
    initial = {name: value.numpy() for name, value in initial_state(model, settings.seed)}
    own = kept(RunDir(tmp_path / "a" / "run"), 1)
    assert sorted(own) == [1, 2]
    weights = [name for name in initial if name.endswith("conv.weight")]
    assert same(own[1], initial, weights)
    change = arrays_of(training(grid.last.sent)[4])[CHANGE]
    assert np.abs(change).max() < 1e-6
    assert same(own[2], initial, weights)


@pytest.mark.slow
def test_importance_moves_the_weights_at_the_start_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, runs = SpaFL.with_change, {}
    monkeypatch.setattr(SpaFL, "with_change", lambda self, arrays: changed(original(self, arrays)))
    for how in ("paper", "authors", "off"):
        changes = SPAFL | {
            "num_rounds": 2,
            "training__lr": 1e-12,
            "spafl__sparsity": 0.0,
            "spafl__importance_update": how,
        }
        runs[how] = kept(run_local(tmp_path / how, **changes), 0)
    name = "atoms.1.conv.weight"  # 16 filters of 16 x 3 x 3
    before = runs["off"][1][name]
    sign = np.sign(before.reshape(16, -1).sum(1)).reshape(-1, 1, 1, 1)
    assert np.array_equal(runs["off"][2][name], before)
    assert np.allclose(runs["paper"][2][name], before - sign * 0.25 / 144, atol=1e-7)
    assert np.allclose(runs["authors"][2][name], before - sign * 0.25 / 9, atol=1e-7)


def changed(sent: ArrayRecord) -> ArrayRecord:
    """The same message, with a change of 0.25 everywhere."""
    if CHANGE in sent:
        sent[CHANGE] = Array(np.full(sent[CHANGE].numpy().shape, 0.25, np.float32))
    return sent


@pytest.mark.slow
def test_a_round_of_lenet_moves_a_three_hundredth_of_fedavgs_bytes(tmp_path: Path, data_dir: Path) -> None:
    """At most 0.3 %, on Flower messages with all that is in them; the second round has the change of thresholds too."""
    common = {
        "model": "lenet5",
        "dataset": "fashion-mnist",
        "data_dir": str(data_dir),
        "clients": 100,
        "clients_per_round": 2,
        "training__local_iterations": 2,
        "num_rounds": 2,
        "fleet": "spafl",
        "evaluation__clients": 2,
        "evaluation__mode": "personal",
    }
    sparse, dense = (run_local(tmp_path / s, strategy=s, **common).rounds()[1] for s in ("spafl", "fedavg"))
    moved = [record["bytes_down"] + record["bytes_up"] for record in (sparse, dense)]
    assert 2 * 2 * 4 * 430_500 < moved[1] < 2 * 2 * 4 * 430_500 + 20_000
    assert 2 * 2 * 4 * 580 < moved[0] <= 0.003 * moved[1]
    assert 0 < sparse["bytes_evaluation"] < 20_000


@pytest.mark.slow
def test_resume_is_bit_identical_with_the_clients_own_states(tmp_path: Path) -> None:
    changes = SPAFL | {"spafl__client_momentum": True, "clients_per_round": 2, "state_dir": ""}
    whole = run_local(tmp_path / "whole", **changes | {"num_rounds": 3, "training__lr_rounds": 3})
    part = run_local(tmp_path / "part", **changes | {"num_rounds": 2, "training__lr_rounds": 3})
    resumed = run_local(
        tmp_path / "part", **changes | {"num_rounds": 3, "training__lr_rounds": 3, "resume_from": str(part.path)}
    )
    assert same(model_of(whole), model_of(resumed))
    for client in range(3):
        one, other = kept(whole, client), kept(resumed, client)
        assert sorted(one) == sorted(other)
        for number, arrays in one.items():
            assert same(arrays, other[number])
    last = [{k: r[k] for k in ("accuracy", "alpha", "density", "filters")} for r in whole.rounds()[2:]]
    assert last == [{k: r[k] for k in ("accuracy", "alpha", "density", "filters")} for r in resumed.rounds()[2:]]


@pytest.mark.slow
def test_a_client_that_lost_its_store_starts_from_the_initial_model(tmp_path: Path) -> None:
    part = run_local(tmp_path, **SPAFL | {"num_rounds": 2, "training__lr_rounds": 3})
    shutil.rmtree(stores(part) / "1")
    resumed = run_local(tmp_path, **SPAFL | {"num_rounds": 3, "training__lr_rounds": 3, "resume_from": str(part.path)})
    records = resumed.rounds()
    assert [record["restarted"] for record in records] == [[], [], [1]]
    (report,) = [c for c in records[2]["clients"] if c["client"] == 1]
    assert report["status"] == "ok"
    assert "its store no longer has its model: it restarted from the initial one" in report["note"]
    assert sorted(kept(resumed, 1)) == [3]


@pytest.mark.slow
@pytest.mark.parametrize(("momentum", "models"), [(False, 2), (True, 4)])
def test_a_store_takes_at_most_two_models_and_with_momentum_four(tmp_path: Path, momentum: bool, models: int) -> None:
    changes = SPAFL | {
        "spafl__client_momentum": momentum,
        "spafl__masked_every": 0,
        "num_rounds": 4,
        "clients_per_round": 2,
    }
    run_dir = run_local(tmp_path, **changes)
    settings = tiny_settings(**changes | {"dataset": f"npz:{few_digits()}"})
    model = masked_model(settings)
    size = sum(4 * value.numel() for _, value in initial_state(model, 1))
    for client in range(3):
        assert len(kept(run_dir, client)) <= 2
        files = [file.stat().st_size for file in (stores(run_dir) / str(client)).rglob("*") if file.is_file()]
        assert sum(files) < models * size + 20_000  # names, checksums
    assert sum(array.nbytes for array in model_of(run_dir).values()) == 4 * (
        16 + 16 + 32 + 32 + 64
    )  # what the server has


def test_another_initial_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecework.strategies.sparse.spafl.server.initial_model", lambda *_: "0123456789abcdef")
    with pytest.raises(
        Exception, match=r"the initial model of seed 1 is [0-9a-f]{16} here and 0123456789abcdef on the"
    ):
        run_local(tmp_path, **SPAFL)


def test_initial_models_have_a_digest_of_their_own() -> None:
    settings = tiny_settings(dataset=f"npz:{few_digits()}")
    model = masked_model(settings)
    built: dict[str, np.ndarray] = {}
    assert initial_model(model, 1, built.update) == initial_model(model, 1) != initial_model(model, 2)
    assert same(built, {name: value.numpy() for name, value in initial_state(model, 1)})


def test_local_sends_nothing_and_keeps_its_thresholds(tmp_path: Path, grids: Callable[..., Any]) -> None:
    grid = grids()
    run_dir = run_local(tmp_path, grid, **SPAFL | {"strategy": "local", "num_rounds": 2})
    for message in [*training(grid.last.sent), *training(grid.last.received)]:
        assert not message.content.array_records["arrays"]
    assert not model_of(run_dir)[THRESHOLDS].any()
    one, other = (kept(run_dir, client)[2] for client in (0, 1))
    taus = [name for name in one if name.endswith(".tau")]
    assert any(one[name].any() for name in taus)
    assert not same(one, other, taus)
    assert run_dir.rounds()[1]["accuracy"] is not None


def test_personal_evaluation_is_of_each_clients_own_model(tmp_path: Path, grids: Callable[..., Any]) -> None:
    grid = grids()
    run_dir = run_local(
        tmp_path, grid, **SPAFL | {"num_rounds": 2, "evaluation__every": 2, "architecture__batch_norm": "running"}
    )
    first, second = run_dir.rounds()
    assert (first["accuracy"], first["density"]) == (None, None)
    told = [
        dict(m.content.metric_records["metrics"]) for m in grid.last.received if m.metadata.message_type == "evaluate"
    ]
    assert second["accuracy"] == pytest.approx(np.mean([each["val-accuracy"] for each in told]))
    assert second["density"] == pytest.approx(np.mean([each["density"] for each in told]))
    settings = tiny_settings(**SPAFL | {"dataset": f"npz:{few_digits()}", "architecture__batch_norm": "running"})
    model = masked_model(settings)
    densities = []
    for client in range(3):
        arrays = kept(run_dir, client)[2]

        def fill(unit: str, module: torch.nn.Module, arrays: dict[str, np.ndarray] = arrays) -> None:
            module.load_state_dict({name: torch.tensor(arrays[f"{unit}.{name}"]) for name in module.state_dict()})

        own = SparseModel(model, range(5), "head", load_for_device(model, fill))
        densities.append(np.mean([float(layer.mask().float().mean()) for layer in own.layers()]))
    assert second["density"] == pytest.approx(np.mean(densities), abs=1e-6)


def test_who_lost_a_model_says_so_in_evaluation_too(tmp_path: Path) -> None:
    part = run_local(tmp_path, **SPAFL | {"num_rounds": 2, "training__lr_rounds": 3, "clients_per_round": 2})
    trained = [c["client"] for c in part.rounds()[-1]["clients"]]
    shutil.rmtree(stores(part) / str(trained[0]))
    changes = SPAFL | {"num_rounds": 3, "training__lr_rounds": 3, "clients_per_round": 2, "resume_from": str(part.path)}
    last = run_local(tmp_path, **changes).rounds()[-1]
    assert last["restarted"] + last["lost"] == [trained[0]]


def test_there_is_no_global_model_to_load(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SPAFL)
    with pytest.raises(
        ModelFileError, match="holds thresholds alone: every client has a model of its own, in its store"
    ):
        piecework.load(run_dir.path)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [False, True])
def test_thresholds_alone_are_trained(tmp_path: Path, momentum: bool) -> None:
    """Table 1: weights and norms stay as they began, and take neither gradients nor momentum."""
    changes = {"num_rounds": 2, "clients_per_round": 0, "training__lr": 0.1}
    dense = run_local(tmp_path / "trained", **SPAFL | changes)
    run_dir = run_local(
        tmp_path / "frozen", **SPAFL | changes | {"spafl__frozen_weights": True, "spafl__client_momentum": momentum}
    )
    settings = tiny_settings(**SPAFL | {"dataset": f"npz:{few_digits()}"})
    initial = {name: value.numpy() for name, value in initial_state(masked_model(settings), settings.seed)}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    frozen = [name for name in initial if not name.endswith((".tau", *statistics))]
    assert any("bn" in name for name in frozen)
    for client in range(3):
        for model in kept(run_dir, client).values():
            assert same(model, initial, frozen)
            assert any(model[name].any() for name in initial if name.endswith(".tau"))
    assert not same(kept(dense, 0)[1], initial, frozen)
    for record, other in zip(run_dir.rounds(), dense.rounds(), strict=True):
        for client, trained in zip(record["clients"], other["clients"], strict=True):
            assert client["measured_peak"] == client["predicted_peak"] < trained["predicted_peak"]
