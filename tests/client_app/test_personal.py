"""Personal evaluation: whose part of the test split is what, and the mean over clients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FEW, TRIO, a_client, few_digits, fleet_json, run_local, tiny_settings

import piecework
from piecework.federated_data.partition import partition_rows
from piecework.federated_data.personal import client_test_rows
from piecework.models.work_item import WorkItem
from piecework.strategies.width.heterofl import client as heterofl
from piecework.strategies.width.heterofl.client import HeteroFLTaskConfig
from piecework.training.examples import normalise
from piecework.training.loop import PieceModel
from piecework.training.messages import Task
from piecework.training.methods import METHODS
from piecework.training.scoring import predictions
from piecework.training.settings import SettingsError
from piecework.training.setup import all_client_rows, open_dataset

SKEWED = {
    "data__partition": "dirichlet",
    "data__partition_alpha": 0.4,
    "data__partition_balanced": False,
    "clients_per_round": 2,
    "num_rounds": 3,
    "architecture__batch_norm": "running",
}


def test_a_class_of_the_test_split_is_divided_in_the_proportions_of_the_training_split() -> None:
    labels = np.array([0] * 8 + [1] * 4 + [2] * 2)
    shares = [np.array([0, 1, 8, 9, 10, 11]), np.array([2, 3, 4, 5, 6, 7])]  # 2 and 6 of class 0, all of class 1
    test_labels = np.array([1, 0, 0, 0, 0, 2, 1])
    first, second = client_test_rows(labels, shares, test_labels, seed=3)
    assert [int(np.sum(test_labels[rows] == 0)) for rows in (first, second)] == [1, 3]  # a quarter of four
    assert [int(np.sum(test_labels[rows] == 1)) for rows in (first, second)] == [2, 0]
    assert 5 not in {*first, *second}, "no client trains on class 2"
    assert not set(first) & set(second)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "pathological"])
def test_all_of_the_test_split_is_given_away_once(kind: str) -> None:
    rng = np.random.default_rng(0)
    labels, test_labels = rng.integers(0, 10, 6000), rng.integers(0, 10, 1000)
    settings: dict[str, Any] = {"alpha": 0.2, "balanced": False, "classes_per_client": 2, "skew": 0.8}
    shares = partition_rows(kind, labels, 30, 5, **settings)
    own = client_test_rows(labels, shares, test_labels, 5)
    assert np.array_equal(np.sort(np.concatenate(own)), np.arange(1000))
    for rows, test_rows in zip(shares, own, strict=True):
        expected = np.bincount(labels[rows], minlength=10) / np.bincount(labels, minlength=10)
        found = np.bincount(test_labels[test_rows], minlength=10)
        assert np.abs(found - expected * np.bincount(test_labels, minlength=10)).max() <= 1
    assert all(map(np.array_equal, own, client_test_rows(labels, shares, test_labels, 5)))


def test_every_client_evaluates_on_its_part_and_each_counts_alike(tmp_path: Path) -> None:
    settings = tiny_settings(**TRIO | {"dataset": f"npz:{few_digits()}"} | SKEWED)
    run_dir = run_local(tmp_path, strategy="fedavg", evaluation__mode="personal", evaluation__every=2, **TRIO | SKEWED)
    first, second, third = run_dir.rounds()
    assert (first["accuracy"], first["loss"], first["bytes_evaluation"]) == (None, None, 0)
    assert second["accuracy"] is not None
    data, model = open_dataset(settings.dataset, ""), piecework.load(run_dir.path, normalise=False)
    own = client_test_rows(data.labels, all_client_rows(settings, 3), data.test_labels, settings.seed)
    assert len({len(rows) for rows in own}) > 1
    right = [
        (predictions(model(normalise(data.test_inputs[rows], data))).numpy() == data.test_labels[rows]).mean()
        for rows in own
    ]
    assert third["accuracy"] == pytest.approx(np.mean(right))
    assert third["personal"]
    assert (third["clients_evaluated"], third["evaluation"]["asked"]) == (3, 3)
    assert run_dir.summary()["accuracy"] == third["accuracy"]


def test_some_clients_are_drawn(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, strategy="fedavg", evaluation__mode="personal", evaluation__clients=2, **TRIO)
    assert run_dir.rounds()[0]["evaluation"]["asked"] == 2


def test_it_leaves_the_clients_validation_alone() -> None:
    with pytest.raises(SettingsError, match=r"evaluation\.on-clients-every = 2: with evaluation\.mode = 'personal'"):
        tiny_settings(dataset=FEW, evaluation__mode="personal", evaluation__on_clients_every=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", METHODS)
def test_every_strategy_evaluates_personally_or_refuses(tmp_path: Path, strategy: str) -> None:
    """Also clients that were not in the round; every one counts alike."""
    changes = TRIO | {"clients_per_round": 2, "strategy": strategy, "training__momentum": 0.0}
    changes |= {
        "attack__steps": 1,
        "evaluation__attack_steps": 1,
        "training__local_iterations": 1,
        "profl__distil_rounds": 0,
        "fleet": fleet_json(rich=4.0),
    }
    changes |= {"feddf__family": "convnet", "data__public_fraction": 0.1, "feddf__server_iterations": 1}
    if strategy == "fedrbn":
        changes |= {"architecture__batch_norm": "running"}
    if strategy in ("fedprophet", "jfat"):
        with pytest.raises(
            ValueError, match=r"evaluation\.mode = 'personal': .* controls training by clients' validation data"
        ):
            run_local(tmp_path, evaluation__mode="personal", **changes)
        return
    if strategy == "profl":
        changes |= {"num_rounds": 6, "evaluation__every": 0}
    record = run_local(tmp_path, evaluation__mode="personal", **changes).rounds()[-1]
    assert record["accuracy"] is not None
    assert record["clients_evaluated"] == 3
    assert record["evaluation"]["others"] == []


@pytest.mark.parametrize(
    ("is_masked", "personal", "absent"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_personal_evaluation_masks_the_classes_that_training_masks(
    tmp_path: Path, is_masked: bool, personal: bool, absent: bool
) -> None:
    """The first three of the digits are 0, 2 and 3, so seven classes are absent."""
    settings = tiny_settings(strategy="heterofl", architecture__batch_norm="running")
    client = a_client(tmp_path, settings, rows=3)
    assert client.local_data(0).labels.tolist() == [0, 2, 3]
    item = WorkItem((0, 1, 2, 3, 4))
    task = Task("experiment", 1, 0, "heterofl", 10**9, 10**9, 0.1, "", costs={item: 1}, personal=personal)
    task = replace(task, config=HeteroFLTaskConfig(level=0, masked=is_masked).to_values())
    found = heterofl.evaluate(task, client)
    piece = PieceModel(client.blueprint, item.atoms, "head", client.load())
    piece.train(False)
    examples = client.validation
    logits = piece.logits(examples.read(np.arange(len(examples)))).detach()
    if absent:
        logits[:, [1, 4, 5, 6, 7, 8, 9]] = 0
    expected = torch.nn.functional.cross_entropy(logits, examples.targets(np.arange(len(examples)))).item()
    assert found["val-loss"] == pytest.approx(expected, rel=1e-5)
