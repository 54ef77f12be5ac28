"""PriSM's momentum: averaged by the server entry by entry, or carried by the client from round to round."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    TRIO,
    a_client,
    arrays_of,
    clients_of,
    run_local,
    same,
    tiny_settings,
    training,
)
from safetensors.numpy import load_file

from piecework.client_app.momentum import MOMENTUM, CarriedMomentum
from piecework.models.low_rank import low_rank
from piecework.strategies.low_rank.prism.client import LowRankModel
from piecework.training.adam import Adam
from piecework.training.loop import LocalTrainer

SMALL = {"strategy": "prism", "training.lr": 0.05}


def momentum_of(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name.startswith(MOMENTUM)}


@pytest.mark.slow
def test_momentum_is_averaged_entry_by_entry_and_sent_to_the_next(tmp_path: Path, grids: Callable[..., Any]) -> None:
    """Of factors and norms: who gets a kernel gets its momentum; what no client had stays. The rest stays with the client."""
    grid, changes = (
        grids(),
        TRIO | SMALL | {"num_rounds": 3, "prism__server_momentum": True, "prism__keep_ratios": "0.5"},
    )
    run = run_local(tmp_path, grid, **changes, fleet="unlimited")
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    last = {name: array.numpy() for name, array in checkpoint.kept.items() if name.startswith(MOMENTUM)}
    names = {name.removeprefix(MOMENTUM) for name in last}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in names} >= {"v", "u"}
    assert not any(name.startswith(("atoms.0.conv", "head")) for name in names)
    sent = {n: [arrays_of(m) for m in training(grid.last.sent) if m.metadata.group_id == str(n)] for n in (1, 2, 3)}
    assert not any(array.any() for arrays in sent[1] for array in momentum_of(arrays).values())
    assert all(momentum_of(arrays).keys() == last.keys() for arrays in sent[2])
    assert any(array.any() for arrays in sent[2] for array in momentum_of(arrays).values())
    replies = [arrays_of(m) for m in training(grid.last.received) if m.metadata.group_id == "3"]
    norm = next(name for name in last if "norm" in name or "bn" in name)
    r = len(replies[0][norm])
    np.testing.assert_allclose(
        last[norm][:r], np.mean([arrays[norm] for arrays in replies], axis=0), rtol=1e-5, atol=1e-9
    )
    assert not last[norm][r:].any()
    for client in clients_of(run):
        assert client["measured_peak"] == client["predicted_peak"]
    state = next((run.path / "clients").glob("*/0/state/3/momentum/*.safetensors"))
    assert {name.removeprefix(MOMENTUM) for name in load_file(state)}.isdisjoint(names)


class AdamModel(LowRankModel):
    """A low-rank model that Adam trains."""

    optimiser = Adam


@pytest.mark.parametrize("piece_class", [LowRankModel, AdamModel])
def test_a_round_goes_on_with_the_momentum_of_the_last(tmp_path: Path, piece_class: type[LowRankModel]) -> None:
    """Three steps in one task, or two and one in the next: the same weights."""

    def tasks(folder: Path, *steps: int) -> dict[str, np.ndarray]:
        client = a_client(
            folder, tiny_settings(strategy="prism", prism__server_momentum=True, architecture__batch_norm="batch")
        )
        client.blueprint = low_rank(client.blueprint, 0.5)
        for unit in client.blueprint.units():
            torch.manual_seed(0)
            client.store.save(unit, client.blueprint.build_unit(unit))
        examples, atoms = client.local_data(0), range(len(client.blueprint.atoms))
        for number, count in enumerate(steps, start=1):
            client.training_config = replace(
                client.training_config, momentum=0.9, iterations=count, batch_size=len(examples)
            )
            trainer = LocalTrainer(
                lambda: [piece_class(client.blueprint, atoms, "head", client.load())],
                client.training_config,
                carried=CarriedMomentum(client),
            )
            for _ in trainer.epochs():
                trainer.epoch(examples, np.random.default_rng(0), client.cap, f"task {number}")
            (piece,) = trainer.finish()
            client.save(piece)
            client.commit()
            client.old_state, client._new_state = client.store.newest_state(client.round), None
        return dict(client.store.read(client.blueprint.units()))

    once, twice, other = tasks(tmp_path / "a", 3), tasks(tmp_path / "b", 2, 1), tasks(tmp_path / "c", 2)
    for name, array in once.items():
        np.testing.assert_allclose(twice[name], array, rtol=1e-4, atol=1e-6)
    assert not same(once, other)


def test_there_must_be_momentum_to_average(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"prism\.server-momentum = true: it averages momentum, but training\.momentum is 0"
    ):
        run_local(tmp_path, **TRIO | SMALL | {"prism__server_momentum": True, "training__momentum": 0.0})
