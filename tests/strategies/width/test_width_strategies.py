"""Baselines that scale the model by width, and those that leave poor devices out: on the in-process grid."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    FEW,
    TRIO,
    RecordingGrid,
    arrays_of,
    average,
    clients_of,
    examples_of,
    first_arrays,
    fleet_json,
    model_of,
    run_local,
    same,
    tiny_settings,
    training,
)
from safetensors.numpy import load_file
from width_helpers import SMALL, conv_of

from piecework import load
from piecework.plans.plan import make_plan
from piecework.plans.question import ask

POOR = fleet_json(poor=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["heterofl", "fedrolex", "feddrop"])
def test_each_client_trains_the_widest_model_that_fits(tmp_path: Path, strategy: str) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"strategy": strategy})
    for record in run_dir.rounds():
        assert record["width_ratios"] == {"0": 1.0, "1": 0.5, "2": 0.25}
        assert [client["status"] for client in record["clients"]] == ["ok"] * 3
        for client in record["clients"]:
            assert client["measured_peak"] == client["predicted_peak"] <= client["budget"]
        rich, some, poor = (client["bytes_down"] for client in record["clients"])
        assert rich > 3 * some > 6 * poor
        assert record["clients"][2]["flops"] < record["clients"][0]["flops"] / 8
    assert run_dir.rounds()[-1]["train_loss"] < 3


@pytest.mark.slow
def test_budgets_are_enforced_by_the_papers_rule_too(tmp_path: Path) -> None:
    """Nearly half of the memory buys 31/64 of the channels, and a tenth 6/64, which do not fit: parts of a step are fixed."""
    changes = {"heterofl__width_rule": "paper", "heterofl__width_ratios": "1,0.5,0.25,0.125,0.0625", "num_rounds": 1}
    fleet = fleet_json(rich=1.2, some=0.49, poor=0.1)
    (record,) = run_local(tmp_path, **SMALL | changes | {"fleet": fleet}).rounds()
    assert record["width_ratios"] == {"0": 1.0, "1": 31 / 64, "2": 6 / 64}
    for client in record["clients"]:
        assert client["status"] == ("ok" if client["predicted_peak"] <= client["budget"] else "memory")


@pytest.mark.slow
def test_channels_that_no_client_trains_stay_as_they_are(tmp_path: Path) -> None:
    """Of 16 -> 32 channels a quarter: the first 4 and 8 of HeteroFL; in FedRolex's second round those from number 1 on."""
    settings = tiny_settings(**SMALL | {"dataset": "digits"})
    before = conv_of(first_arrays(settings))
    out, into = before.shape[:2]
    for strategy, rounds in (("heterofl", 2), ("fedrolex", 1), ("fedrolex", 2)):
        changes = {"strategy": strategy, "fleet": POOR, "num_rounds": rounds}
        run_dir = run_local(tmp_path / f"{strategy}{rounds}", **SMALL | changes)
        moved = np.argwhere((conv_of(model_of(run_dir)) != before).any(axis=(2, 3)))
        last = rounds if strategy == "fedrolex" else 1
        windows = {(o + k, i + k) for k in range(last) for o in range(out // 4) for i in range(into // 4)}
        assert {(int(o), int(i)) for o, i in moved} == windows, (strategy, rounds)


def test_dropped_channels_differ_between_clients_and_rounds(tmp_path: Path) -> None:
    before = conv_of(first_arrays(tiny_settings(**SMALL | {"dataset": "digits"})))
    out, into = before.shape[:2]
    run_dir = run_local(tmp_path, **SMALL | {"strategy": "feddrop", "fleet": POOR, "num_rounds": 1})
    moved = (conv_of(model_of(run_dir)) != before).any(axis=(2, 3))
    assert out * into // 16 < moved.sum() <= 3 * out * into // 16


def test_at_full_width_it_is_federated_averaging(tmp_path: Path) -> None:
    """To the bit, if clients weigh as much as they have examples."""
    whole = {
        "heterofl__client_weights": "examples",
        "heterofl__width_ratios": "1",
        "fleet": "unlimited",
        "heterofl__masked_loss": False,
        "architecture__batch_norm": "running",
    }
    rolled = run_local(tmp_path / "a", **SMALL | whole | {"strategy": "fedrolex"})
    del whole["heterofl__client_weights"], whole["heterofl__masked_loss"], whole["heterofl__width_ratios"]
    averaged = run_local(tmp_path / "b", **SMALL | whole | {"strategy": "fedavg"})
    assert same(model_of(rolled), model_of(averaged))


@pytest.mark.parametrize("strategy", ["heterofl", "fedrolex", "feddrop"])
@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_clients_count_alike_or_by_their_examples(tmp_path: Path, strategy: str, weights: str) -> None:
    """In one round of three clients of unlike sizes, which all train the whole model."""
    changes = {"strategy": strategy, "heterofl__client_weights": weights, "heterofl__width_ratios": "1"}
    unlike = {
        "data__partition": "dirichlet",
        "data__partition_alpha": 0.5,
        "data__partition_balanced": False,
        "fleet": "unlimited",
        "num_rounds": 1,
    }
    run_dir = run_local(tmp_path, RecordingGrid, **SMALL | changes | unlike)
    answers = training(RecordingGrid.last.received)
    sizes = [examples_of(answer) for answer in answers]
    assert max(sizes) > 1.5 * min(sizes)
    (name,) = [name for name in model_of(run_dir) if name.startswith("atoms.1.") and name.endswith("conv.weight")]
    alike = np.mean([arrays_of(answer)[name].astype(np.float64) for answer in answers], axis=0).astype(np.float32)
    assert np.array_equal(model_of(run_dir)[name], alike if weights == "equal" else average(answers, name))


@pytest.mark.slow
def test_clients_evaluate_the_models_they_train(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"evaluation__on_clients_every": 2})
    first, second = run_dir.rounds()
    assert first["client_accuracy"] is None
    assert second["clients_evaluated"] == 3
    for client in second["clients"]:
        assert 0 < client["evaluation_peak"] <= client["budget"]


def test_who_cannot_train_the_narrowest_says_so(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"fleet": fleet_json(rich=1.2, some=0.6, none=0.05), "num_rounds": 1})
    assert [client["status"] for client in clients_of(run_dir)] == ["ok", "ok", "memory"]
    assert clients_of(run_dir)[2]["needed"] > clients_of(run_dir)[2]["budget"]


# ---- those without sub-models


def test_the_exclusive_ask_the_rich_alone(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"strategy": "exclusivefl"})
    for record in run_dir.rounds():
        assert [client["client"] for client in record["clients"]] == [0]
        assert record["clients"][0]["status"] == "ok"


def test_not_available_if_no_client_has_enough_memory(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"exclusivefl: Training the whole model needs [\d,]+ bytes, and the richest client has"
    ):
        run_local(tmp_path, **SMALL | {"strategy": "exclusivefl", "fleet": POOR})


def test_all_small_is_as_wide_as_the_poorest_allows(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"strategy": "allsmall"})
    (share,) = {record["width"] for record in run_dir.rounds()}
    assert 0 < share < 0.4
    budget = min(client["budget"] for client in clients_of(run_dir))
    for client in clients_of(run_dir):
        assert 0.8 * budget < client["measured_peak"] == client["predicted_peak"] <= budget
    logits = load(run_dir.path)(torch.zeros(2, 1, 8, 8))
    assert logits.shape == (2, 10)
    with pytest.raises(
        ValueError, match=r"allsmall: with 1/64 of its channels the model needs [\d,]+ bytes, and the poorest"
    ):
        run_local(tmp_path / "none", **SMALL | {"strategy": "allsmall", "fleet": fleet_json(a=1.0, b=10_000)})


# ---- adversarial training, plans, settings


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["heterofl", "depthfl"])
def test_adversarial_training_is_an_option(tmp_path: Path, strategy: str) -> None:
    changes = {
        "strategy": strategy,
        "training__adversarial": True,
        "attack__steps": 2,
        "attack__warmup": 1,
        "architecture__batch_norm": "running",
    }
    changes |= {
        "evaluation__attack_steps": 2,
        "evaluation__attack_examples": 20,
        "fleet": fleet_json(a=1.2, b=1.2, c=1.2),
    }
    run_dir = run_local(tmp_path, **SMALL | changes)
    clean, attacked = run_dir.rounds()
    assert attacked["adversarial_accuracy"] is not None
    for before, client in zip(clean["clients"], attacked["clients"], strict=True):
        assert before["predicted_peak"] == client["predicted_peak"] == client["measured_peak"] <= client["budget"]
        assert 2 * before["flops"] < client["flops"]  # two attack steps, each forward and backward
    plain = run_local(tmp_path / "plain", **SMALL | changes | {"training.adversarial": False})
    assert not same(model_of(run_dir), model_of(plain))


def test_not_every_strategy_has_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adversarial = true: fedepth trains on clean examples only"):
        run_local(tmp_path, **SMALL | {"strategy": "fedepth", "training.adversarial": True})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["heterofl", "allsmall", "exclusivefl"])
def test_a_plan_agrees_with_a_run(tmp_path: Path, strategy: str) -> None:
    settings = tiny_settings(**SMALL | {"dataset": "digits", "strategy": strategy})
    found = make_plan(settings, ask(settings))
    record = run_local(tmp_path, **SMALL | {"dataset": "digits", "strategy": strategy, "num_rounds": 1}).rounds()[0]
    (stage,) = found["fleet"]["stages"]
    assert stage["peak_bytes"] == max(client["measured_peak"] for client in record["clients"])
    assert stage["participation"] == len(record["clients"]) / 3


@pytest.mark.parametrize("ratios", ["", "0.5,x", "2,1", "0,1", "-1"])
def test_width_ratios_that_are_refused(ratios: str) -> None:
    with pytest.raises(ValueError, match=r"heterofl.width-ratios = .*: give fractions above 0 and up to 1"):
        tiny_settings(heterofl__width_ratios=ratios)


def test_an_attack_that_never_comes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"attack.warmup = 2 leaves no adversarial round in num-rounds = 2"):
        run_local(tmp_path, **SMALL | {"training__adversarial": True, "attack__warmup": 2})


def test_a_partial_update_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends less than its sub-model: what it sent counts."""
    from piecework.strategies.width.heterofl import client as heterofl

    train = heterofl.train

    def less(task: Any, client: Any) -> Any:
        update = train(task, client)
        return replace(update, units=update.units[:1]) if client.number == 0 else update

    monkeypatch.setattr(heterofl, "train", less)
    run_dir = run_local(tmp_path, **SMALL | {"num_rounds": 1})
    assert [client["status"] for client in clients_of(run_dir)] == ["ok"] * 3


# ---- norms that stay with the clients


@pytest.mark.parametrize("strategy", ["heterofl", "fedrolex", "feddrop"])
def test_a_client_keeps_the_norms_of_its_channels(tmp_path: Path, strategy: str) -> None:
    """Of a client with half of the channels: those of the first ones, of a window that moves, or of two draws."""
    changes = {"strategy": strategy, "architecture__batch_norm": "local", "fleet": fleet_json(some=0.6)}
    seen = []
    for rounds in (1, 2):
        run = run_local(tmp_path / str(rounds), **SMALL | changes | {"num_rounds": rounds})
        (folder,) = run.path.glob(f"clients/*/0/state/{rounds}/batch-norm")
        mean = load_file(folder / "atoms.1.safetensors")["atoms.1.bn.running_mean"]
        seen.append(np.flatnonzero(~np.isnan(mean)))
    count = len(mean)
    assert len(seen[0]) == count // 2
    if strategy == "heterofl":
        assert list(seen[0]) == list(seen[1]) == list(range(count // 2))
    elif strategy == "fedrolex":
        assert list(seen[1]) == list(range(count // 2 + 1))
    else:
        assert set(seen[0]) < set(seen[1])


def test_own_norms_are_trained_on(tmp_path: Path, grids: Any) -> None:
    """Each client has one batch, and nothing learns: its norms stay as they are, although the server sends their average."""
    changes = {"architecture__batch_norm": "local", "fleet": fleet_json(some=0.6), "training__lr": 1e-9, "dataset": FEW}
    whole = {"training__local_iterations": 0, "training__local_epochs": 1, "training__batch_size": 128}
    grid = grids()
    run_local(tmp_path, grid, **SMALL | changes | whole)
    name = "atoms.0.bn.running_mean"
    first, second = ([arrays_of(m)[name] for m in training(grid.last.received)[n : n + 3]] for n in (0, 3))
    for before, after in zip(sorted(first, key=sum), sorted(second, key=sum), strict=True):
        np.testing.assert_allclose(after, before, atol=1e-6)
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(first, 2)) > 1e-3


@pytest.mark.parametrize("strategy", ["orthdrop", "prism"])
def test_systems_without_norms_of_their_own(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(ValueError, match=rf"batch-norm = 'local': clients of {strategy} have no norms of their own"):
        run_local(tmp_path, **TRIO | {"strategy": strategy, "architecture__batch_norm": "local"})
