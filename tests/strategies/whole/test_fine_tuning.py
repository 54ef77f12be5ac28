"""FedAvg's fine-tuning before a personal evaluation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TRIO, a_client, clients_of, fleet_json, model_of, run_local, same, tiny_settings
from torch.nn import functional as F

from piecework.client_app.client import Client
from piecework.models.work_item import WorkItem
from piecework.strategies.whole.fedavg import client as fedavg
from piecework.training.loop import PieceModel
from piecework.training.messages import Task

ATOMS = tuple(range(5))
ITEM = WorkItem(ATOMS)
PERSONAL = {"evaluation__mode": "personal", "evaluation__every": 2, "num_rounds": 2, "data__partition_alpha": 0.2}


def tuning_client(folder: Path, epochs: int, rows: int = 8, allowed: int = 10**9) -> Client:
    """A client without momentum or weight decay, whose examples are one batch. Its task's rate has decayed."""
    settings = tiny_settings(
        evaluation__mode="personal",
        fedavg__fine_tuning_epochs=epochs,
        architecture__norm="group",
        training__momentum=0.0,
        training__weight_decay=0.0,
    )
    client = a_client(folder, settings, allowed=allowed, rows=rows)
    return replace(client, training_config=replace(client.training_config, lr=1e-6))


def evaluation(cost: int = 1, *, personal: bool = True) -> Task:
    """A request to evaluate, of a client whose training takes `cost` bytes."""
    return Task(
        "experiment", 1, 0, "fedavg", 10**9, 10**9, 1e-6, "", costs={ITEM: cost}, personal=personal, enforced=False
    )


def loss_after(client: Client, steps: int) -> float:
    """The loss of the sent model on the evaluation's examples after plain steps of gradient descent at `training.lr`."""
    model = PieceModel(client.blueprint, ATOMS, "head", client.load())
    examples, rate = client.local_data(0), client.settings.training.lr
    x, y = examples.read(np.arange(len(examples))), examples.targets(np.arange(len(examples)))
    for _ in range(steps):
        gradients = torch.autograd.grad(F.cross_entropy(model.logits(x), y), model.parameters())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= rate * gradient
    held = np.arange(len(client.validation))
    return float(F.cross_entropy(model.logits(client.validation.read(held)), client.validation.targets(held)).detach())


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_client_trains_the_sent_model_on_its_examples_and_evaluates_that(tmp_path: Path, epochs: int) -> None:
    client = tuning_client(tmp_path, epochs)
    expected, sent = loss_after(client, epochs), loss_after(client, 0)
    found = fedavg.evaluate(evaluation(), client)
    assert found["val-loss"] == pytest.approx(expected, rel=1e-4)
    assert abs(expected - sent) > 1e-3
    assert (found["fine-tuned"], found["predicted-peak"], found["val-examples"]) == (1, 1, 20)


@pytest.mark.parametrize(
    ("epochs", "rows", "cost", "personal"),
    [(0, 8, 1, True), (1, 1, 1, True), (1, 8, 2 * 10**9, True), (1, 8, 1, False)],
)
def test_the_sent_model_is_evaluated_as_it_is(
    tmp_path: Path, epochs: int, rows: int, cost: int, personal: bool
) -> None:
    """Without the setting, with a single example, where training does not fit, and in another evaluation."""
    client = tuning_client(tmp_path, epochs, rows)
    expected = loss_after(client, 0)
    found = fedavg.evaluate(evaluation(cost, personal=personal), client)
    assert found["val-loss"] == pytest.approx(expected, rel=1e-4)
    assert "fine-tuned" not in found


def test_the_servers_model_and_the_clients_training_stay_what_they_are(tmp_path: Path) -> None:
    plain = run_local(tmp_path / "plain", strategy="fedavg", **TRIO | PERSONAL)
    tuned = run_local(tmp_path / "tuned", strategy="fedavg", fedavg__fine_tuning_epochs=2, **TRIO | PERSONAL)
    assert same(model_of(plain), model_of(tuned))
    assert [each["train_loss"] for each in plain.rounds()] == [each["train_loss"] for each in tuned.rounds()]
    assert "fine_tuned" not in plain.rounds()[-1]
    assert [each.get("fine_tuned") for each in tuned.rounds()] == [None, 3]
    assert plain.rounds()[-1]["loss"] != tuned.rounds()[-1]["loss"]


def test_fine_tuning_holds_what_training_holds(tmp_path: Path) -> None:
    run = run_local(tmp_path, strategy="fedavg", fedavg__fine_tuning_epochs=1, **TRIO | PERSONAL)
    for client in clients_of(run, 2):
        assert client["evaluation_predicted"] == client["predicted_peak"]
        assert 0 < client["evaluation_peak"] <= client["evaluation_predicted"]


def test_a_device_that_cannot_train_evaluates_the_model_as_it_is(tmp_path: Path) -> None:
    fleet = fleet_json(rich=4.0, poor=0.9)
    changes = TRIO | PERSONAL | {"fleet": fleet, "clients": 4}
    last = run_local(tmp_path, strategy="fedavg", fedavg__fine_tuning_epochs=1, **changes).rounds()[-1]
    assert last["clients_evaluated"] == 4
    assert 0 < last["fine_tuned"] < 4


def test_a_paged_step_fine_tunes_too(tmp_path: Path) -> None:
    changes = TRIO | PERSONAL | {"fleet": fleet_json(poor=0.9), "memory__fit": "page"}
    last = run_local(tmp_path, strategy="fedavg", fedavg__fine_tuning_epochs=1, **changes).rounds()[-1]
    assert last["fine_tuned"] == 3
