"""FedRBN: two sets of statistics, what propagates, by hand and on the in-process grid."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedrbn_helpers import SMALL, a_dual_blueprint
from flwr.app import Array, ArrayRecord
from helpers import (
    RecordingGrid,
    a_blueprint,
    arrays_of,
    changing,
    clients_of,
    examples_of,
    fleet_json,
    model_of,
    numpy_of,
    run_local,
    tiny_settings,
    training,
)
from torch import nn
from torch.nn import functional as F

from piecework import load
from piecework.client_app.client import Client
from piecework.models.dual_norm import begin_adversarial, is_adversarial, use, with_two_sets
from piecework.planning.costs import cost_model_for
from piecework.planning.part import Part
from piecework.server_app.records import RunDir
from piecework.strategies.whole.fedrbn import client as fedrbn
from piecework.strategies.whole.fedrbn.client import adversarial_loss, learner
from piecework.strategies.whole.fedrbn.server import begin_statistics, propagate, similarity
from piecework.training.loop import start, train_step
from piecework.training.sgd import SGD, TrainingConfig


@pytest.fixture(scope="module")
def one_round(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RecordingGrid]:
    """A round and its messages."""

    class Kept(RecordingGrid):
        """This run's."""

    run_dir = run_local(tmp_path_factory.mktemp("one-round"), Kept, **SMALL)
    return run_dir, Kept.last


@pytest.fixture(scope="module")
def two_rounds(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[RunDir, RecordingGrid, list[dict[str, np.ndarray]]]:
    """Two rounds where clients keep their statistics, the messages, and what each task found in the client's store."""
    seen: list[dict[str, np.ndarray]] = []
    train = fedrbn.train

    class Kept(RecordingGrid):
        """This run's."""

    def noted(task: Any, client: Client) -> Any:
        seen.append(dict(client.store.read(["atoms.1"])))
        return train(task, client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedrbn, "train", noted)
        changes = SMALL | {"architecture__batch_norm": "local", "num_rounds": 2}
        run_dir = run_local(tmp_path_factory.mktemp("two-rounds"), Kept, **changes)
    return run_dir, Kept.last, seen


# ---- the layer


def test_each_set_takes_note_of_its_own_examples() -> None:
    norm: Any = with_two_sets(partial(nn.BatchNorm1d, 1))
    norm(torch.tensor([[1.0], [3.0]]))
    assert (norm.running_mean.item(), norm.running_var.item()) == pytest.approx((0.2, 0.9 + 0.1 * 2))
    assert (norm.adversarial_running_mean.item(), norm.adversarial_running_var.item()) == (0.0, 1.0)
    use([norm], adversarial=True)
    norm(torch.tensor([[10.0], [30.0]]))
    assert (norm.adversarial_running_mean.item(), norm.adversarial_running_var.item()) == pytest.approx((2.0, 20.9))
    assert norm.running_mean.item() == pytest.approx(0.2)
    assert (int(norm.num_batches_tracked), int(norm.adversarial_num_batches_tracked)) == (1, 1)
    norm.eval()
    assert norm(torch.tensor([[2.0]])).item() == pytest.approx(0.0, abs=1e-6)
    use([norm], adversarial=False)
    assert norm(torch.tensor([[0.2]])).item() == pytest.approx(0.0, abs=1e-6)
    assert int(norm.adversarial_num_batches_tracked) == 1


def test_what_was_never_used_begins_as_the_clean_set() -> None:
    norm: Any = with_two_sets(partial(nn.BatchNorm2d, 2))
    norm(torch.rand(4, 2, 3, 3))
    begin_adversarial([norm])
    assert torch.equal(norm.adversarial_running_mean, norm.running_mean)
    assert torch.equal(norm.adversarial_running_var, norm.running_var)
    use([norm], adversarial=True)
    norm(torch.rand(4, 2, 3, 3) + 5)
    met = norm.adversarial_running_mean.clone()
    begin_adversarial([norm])
    assert torch.equal(norm.adversarial_running_mean, met)


# ---- a step


def a_piece(weight: float) -> Any:
    blueprint = a_dual_blueprint()
    torch.manual_seed(0)
    return learner(weight)(blueprint, range(len(blueprint.atoms)), "head", blueprint.build_unit)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_gradient_is_of_both_losses(weight: float) -> None:
    """(1 - q) CE of clean examples by the clean set, q CE of the others by the adversarial one; each takes note of its own."""
    x, y, moved = torch.rand(6, 1, 8, 8), torch.arange(6), torch.rand(6, 1, 8, 8)
    by_hand = a_piece(weight)
    by_hand.train(True)
    use(by_hand.units().values(), adversarial=False)
    clean = F.cross_entropy(by_hand.logits(x), y)
    use(by_hand.units().values(), adversarial=True)
    ((1 - weight) * F.cross_entropy(by_hand.logits(moved), y) + weight * clean).backward()
    gradients = [p.grad.clone() for p in by_hand.parameters()]

    piece, taken = a_piece(weight), []

    class Noting(SGD):
        def step(self) -> None:
            taken.extend(p.grad.clone() for p in self.parameters if p.grad is not None)

    loss, _ = start([piece], TrainingConfig(0.1, 0.9, 0.0, 6, 1), adversarial_loss(weight))

    def perturb(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        piece.before_attack(loss, z, labels)
        return moved

    train_step(loss, Noting(piece.parameters(), TrainingConfig(0.1, 0.9, 0.0, 6, 1)), x, y, perturb)
    for one, other in zip(taken, gradients, strict=True):
        torch.testing.assert_close(one, other)
    for name, value in piece.modules["atoms.1"].state_dict().items():
        torch.testing.assert_close(value, by_hand.modules["atoms.1"].state_dict()[name])


# ---- what propagates


def sets(clean: list[list[float]], attacked: float, batches: int = 3) -> dict[str, np.ndarray]:
    """Statistics of a layer `a`: means and variances, clean; all of the second set alike."""
    mean, var = (np.array(values, np.float32) for values in clean)
    second = {f"a.adversarial_{n}": np.full(2, attacked, np.float32) for n in ("running_mean", "running_var")}
    count = {"a.adversarial_num_batches_tracked": np.asarray(batches)}
    return {"a.running_mean": mean, "a.running_var": var} | second | count


def test_similarity_is_a_mean_of_cosines() -> None:
    """Means at a right angle, variances alike in direction: (0 + 1) / 2."""
    assert similarity(sets([[1, 0], [1, 1]], 0), sets([[0, 5], [2, 2]], 0)) == pytest.approx(0.5)
    assert similarity(sets([[3, 4], [1, 0]], 0), sets([[4, 3], [1, 1]], 0)) == pytest.approx((24 / 25 + 0.5**0.5) / 2)
    assert similarity(sets([[0, 0], [1, 1]], 0), sets([[0, 5], [2, 2]], 0)) == pytest.approx(0.5)  # 0 has no direction


def test_statistics_propagate_by_softmax_weights() -> None:
    """Similarities 1 and 0.99: a temperature of 0.01 makes weights e / (e + 1) and 1 / (e + 1)."""
    angle = math.acos(0.98)
    near, far = sets([[1, 0], [1, 0]], 10.0), sets([[math.cos(angle), math.sin(angle)], [1, 0]], 20.0, batches=7)
    found = propagate(sets([[1, 0], [1, 0]], -1.0), [near, far])
    expected = (math.e * 10 + 20) / (math.e + 1)
    np.testing.assert_allclose(found["a.adversarial_running_mean"], [expected] * 2, rtol=1e-4)
    np.testing.assert_allclose(found["a.adversarial_running_var"], [expected] * 2, rtol=1e-4)
    assert found["a.adversarial_num_batches_tracked"] == 7
    assert sorted(found) == sorted(name for name in near if "adversarial" in name)
    assert {name: array.dtype for name, array in found.items()} == {name: near[name].dtype for name in found}


def test_a_round_by_hand(one_round: tuple[RunDir, RecordingGrid]) -> None:
    run_dir, grid = one_round
    (record,) = run_dir.rounds()
    assert record["adversarial_clients"] == [0, 2]
    assert [client["status"] for client in record["clients"]] == ["ok"] * 3
    assert record["clients"][1]["measured_peak"] > record["clients"][1]["budget"]  # it swaps
    assert not record["enforced"]
    for client in record["clients"]:
        assert client["measured_peak"] == client["predicted_peak"]
    assert record["clients"][0]["flops"] > 2 * record["clients"][1]["flops"]
    replies = training(grid.received)
    sent = [arrays_of(reply) for reply in replies]
    weights = np.array([examples_of(reply) for reply in replies]) / sum(examples_of(reply) for reply in replies)
    sent[1] |= propagate(sent[1], [sent[0], sent[2]])
    model = model_of(run_dir)
    for name, array in model.items():
        if np.issubdtype(array.dtype, np.floating):
            mean = sum(w * a[name].astype(np.float64) for w, a in zip(weights, sent, strict=True))
            np.testing.assert_allclose(array, mean, rtol=1e-5, atol=1e-7)
    (name,) = [name for name in model if name.startswith("atoms.1.") and name.endswith("adversarial_running_mean")]
    assert not np.allclose(model[name], model[name.replace("adversarial_", "")])


def test_nothing_propagates_if_no_client_trained_adversarially(tmp_path: Path) -> None:
    warmed = run_local(tmp_path / "warm-up", **SMALL | {"attack__warmup": 1, "num_rounds": 2}).rounds()
    assert [record["adversarial_clients"] for record in warmed] == [[], [0, 2]]
    run_dir = run_local(tmp_path / "poor", **SMALL | {"fleet": fleet_json(poor=0.3)})
    assert run_dir.rounds()[0]["adversarial_clients"] == []
    for name, array in model_of(run_dir).items():
        if is_adversarial(name):
            assert np.array_equal(array, np.ones_like(array) if name.endswith("var") else np.zeros_like(array)), name


@pytest.mark.parametrize("batch_norm", ["running", "local"])
def test_nothing_propagates_where_no_adversarial_update_enters(tmp_path: Path, batch_norm: str) -> None:
    class Grid(RecordingGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            poor = sorted(self.get_node_ids())[1]
            for reply in training(replies):
                if reply.metadata.src_node_id != poor:
                    with changing(reply) as arrays:
                        arrays["head.fc.bias"] = Array(np.full(10, np.nan, np.float32))
            return replies

    run_dir = run_local(tmp_path, Grid, **SMALL | {"architecture__batch_norm": batch_norm})
    assert [client["status"] for client in clients_of(run_dir)] == ["rejected", "ok", "rejected"]
    assert run_dir.rounds()[0]["adversarial_clients"] == [0, 2]
    for name, array in model_of(run_dir).items():
        if is_adversarial(name):
            assert np.array_equal(array, np.ones_like(array) if name.endswith("var") else np.zeros_like(array)), name
    checkpoint = run_dir.load_checkpoint()
    assert checkpoint is not None and not checkpoint.kept


def test_local_statistics_stay_and_adversarial_ones_come_from_the_server(
    two_rounds: tuple[RunDir, RecordingGrid, Any],
) -> None:
    run_dir, grid, _ = two_rounds
    tasks, replies = training(grid.sent), training(grid.received)
    first = [arrays_of(reply) for reply in replies[:3]]
    handed = propagate(first[1], [first[0], first[2]])
    for client, message in enumerate(tasks[3:]):
        sent = arrays_of(message)
        expected = handed if client == 1 else first[client]
        for name in sent:
            if is_adversarial(name):
                assert np.array_equal(sent[name], expected[name]), (client, name)
    checkpoint = run_dir.load_checkpoint()
    assert checkpoint is not None
    assert {name.partition("/")[0] for name in numpy_of(checkpoint.kept)} == {"0", "1", "2"}


def test_a_client_keeps_its_clean_batch_norms_only(two_rounds: tuple[Any, RecordingGrid, Any]) -> None:
    _, grid, seen = two_rounds
    first = [arrays_of(reply) for reply in training(grid.received)[:3]]
    sent = [arrays_of(message) for message in training(grid.sent)[3:]]
    assert len(seen) == 6
    for client, held in enumerate(seen[3:]):
        for name, array in held.items():
            if is_adversarial(name):
                assert np.array_equal(array, sent[client][name])
            elif ".bn." in name:
                assert np.array_equal(array, first[client][name])


@pytest.mark.slow
def test_the_first_adversarial_round_is_measured_from_the_clean_set(tmp_path: Path) -> None:
    """After a warm-up the server's second set is still (0, 1), far from where clients begin theirs."""
    sent = ArrayRecord(
        {
            "a.running_mean": Array(np.array([3.0], np.float32)),
            "a.running_var": Array(np.array([5.0], np.float32)),
            "a.adversarial_running_mean": Array(np.zeros(1, np.float32)),
            "a.adversarial_running_var": Array(np.ones(1, np.float32)),
            "a.adversarial_num_batches_tracked": Array(np.array(0)),
        }
    )
    first = begin_statistics(sent)
    assert [float(first[f"a.adversarial_running_{name}"].numpy()[0]) for name in ("mean", "var")] == [3.0, 5.0]
    used = begin_statistics(ArrayRecord({**sent, "a.adversarial_num_batches_tracked": Array(np.array(4))}))
    assert [float(used[f"a.adversarial_running_{name}"].numpy()[0]) for name in ("mean", "var")] == [0.0, 1.0]

    changes = {
        "attack__warmup": 12,
        "num_rounds": 13,
        "training__local_iterations": 10,
        "training__lr": 0.05,
        "evaluation__every": 0,
    }
    run_dir = run_local(tmp_path, **SMALL | changes)
    assert [client["status"] for client in clients_of(run_dir, 13)] == ["ok"] * 3


def test_losses_of_clients_are_of_both_parts(tmp_path: Path) -> None:
    """At the same weights (1 - q) CE(clean) + q CE(adversarial) is below CE(adversarial), and above half of it."""
    losses = {}
    for weight in (0.0, 0.5):
        run_dir = run_local(
            tmp_path / str(weight), **SMALL | {"fedrbn__clean_weight": weight, "training__local_iterations": 1}
        )
        losses[weight] = [client["train_loss"] for client in clients_of(run_dir)]
    assert losses[0.0][1] == losses[0.5][1]
    for attacked, both in (pair for n, pair in enumerate(zip(*losses.values(), strict=True)) if n != 1):
        assert 0.8 * attacked < both < attacked


@pytest.mark.parametrize("memory_model", ["fedepth", "prism", "profl", "fedprophet"])
def test_papers_count_both_sets_as_one_batch_norm(memory_model: str) -> None:
    costs = []
    for blueprint in (a_blueprint(batch_norm="running"), a_dual_blueprint()):
        settings = tiny_settings(**SMALL | {"memory__model": memory_model, "training__batch_size": 4})
        costs.append(cost_model_for(settings, blueprint).bytes(Part(blueprint, tuple(range(len(blueprint.atoms))))))
    assert costs[0] == costs[1]


def test_plain_clients_stay_plain_with_any_settings(tmp_path: Path, one_round: tuple[RunDir, Any]) -> None:
    plain = clients_of(one_round[0])[1]
    told = clients_of(run_local(tmp_path, **SMALL | {"training.adversarial": True}))[1]
    assert (told["train_loss"], told["measured_peak"]) == (plain["train_loss"], plain["predicted_peak"])


def test_the_model_can_be_loaded(tmp_path: Path, one_round: tuple[RunDir, Any]) -> None:
    run_dir, _ = one_round
    model = load(run_dir.path)
    x = torch.rand(4, 1, 8, 8)
    clean = model(x)
    use([model], adversarial=True)
    assert not torch.allclose(model(x), clean)
    other = load(run_local(tmp_path / "adversarial", **SMALL | {"fedrbn__evaluation_branch": "adversarial"}).path)
    torch.testing.assert_close(other(x), model(x))
    # no client trains adversarially: the clean set stands in, as it did in the run's evaluation
    changes = {"fedrbn__evaluation_branch": "adversarial", "fleet": fleet_json(poor=0.3)}
    never = load(run_local(tmp_path / "never", **SMALL | changes).path)
    before = never(x)
    use([never], adversarial=False)
    torch.testing.assert_close(never(x), before)
