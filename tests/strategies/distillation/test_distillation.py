"""FedDF and FedET on the in-process grid: prototypes from what clients sent, what does not enter, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from helpers import (
    TRIO,
    RecordingGrid,
    arrays_of,
    average,
    changing,
    clients_of,
    examples_of,
    few_digits,
    fleet_json,
    model_of,
    numpy_of,
    record_of,
    run_local,
    tiny_settings,
    training,
)

from piecework import load
from piecework.federation.public_data import public_examples
from piecework.models.cascade import initial_state
from piecework.models.zoo import build_blueprint
from piecework.plans.plan import make_plan
from piecework.plans.question import ask
from piecework.strategies.distillation.feddf.server_training import consensus, logits_of
from piecework.training.memory_cap import MemoryCap

# A ResNet-10 for the rich, a small network for the poor; nothing is cut.
SMALL: dict[str, Any] = TRIO | {
    "strategy": "feddf",
    "model": "resnet10",
    "architecture__width": 0.125,
    "feddf__family": "cnn3",
    "data__public_fraction": 0.2,
    "training__local_iterations": 2,
    "feddf__server_iterations": 3,
    "feddf__server_batch_size": 8,
    "fleet": fleet_json(rich=2_000_000, poor=300_000),
}
STILL = 1e-30  # a rate that moves nothing


def test_each_client_trains_the_largest_model_that_fits(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"architecture__batch_norm": "running", "num_rounds": 2})
    for record in run_dir.rounds():
        assert record["architectures"] == {"0": "resnet10", "1": "cnn3", "2": "resnet10"}
        assert record["public_examples"] == 42
        assert record["distillation_loss"] > 0
        assert record["server_peak"] > 100_000
        rich, poor, _ = record["clients"]
        assert (rich["status"], poor["status"]) == ("ok", "ok")
        assert rich["measured_peak"] == rich["predicted_peak"] <= rich["budget"]
        assert poor["measured_peak"] == poor["predicted_peak"] <= poor["budget"] < rich["predicted_peak"]
        assert rich["bytes_up"] > 10 * poor["bytes_up"]
    assert sum(p.numel() for p in load(run_dir.path).parameters()) == 77_858


def prototypes(run_dir: Any) -> dict[str, np.ndarray]:
    checkpoint = run_dir.load_checkpoint()
    return numpy_of(checkpoint.kept)


def test_prototypes_by_hand(tmp_path: Path) -> None:
    """Two clients' ResNets of nothing but 1 and 4, of one and of two examples, are one of 3; the small network's is its 7."""

    class Grid(RecordingGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            nodes = sorted(self.get_node_ids())
            for reply in training(replies):
                value, examples = [(1, 1), (7, 5), (4, 2)][nodes.index(reply.metadata.src_node_id)]
                with changing(reply) as arrays:
                    for name in list(arrays):
                        arrays[name] = Array(np.full_like(arrays[name].numpy(), value))
                reply.content.metric_records["metrics"]["num-examples"] = examples
                reply.content.metric_records["metrics"]["seen"] = [examples]
            return replies

    changes = {"feddf__server_lr": STILL, "architecture__batch_norm": "batch", "faults__update_norm_limit": 0.0}
    run_dir = run_local(tmp_path, Grid, **SMALL | changes)
    assert [client["status"] for client in clients_of(run_dir)] == ["ok"] * 3
    assert run_dir.rounds()[0]["architectures"] == {"0": "resnet10", "1": "cnn3", "2": "resnet10"}
    assert {float(value) for array in model_of(run_dir).values() for value in array.flat} == {3.0}
    assert {float(value) for array in prototypes(run_dir).values() for value in array.flat} == {7.0}


def test_prototypes_are_means_of_their_own_clients(tmp_path: Path) -> None:
    """With a rate that moves nothing; what no client trained stays as it was."""
    still = SMALL | {"feddf__server_lr": STILL, "architecture__batch_norm": "batch"}
    run_dir = run_local(tmp_path / "a", RecordingGrid, **still)
    replies = training(RecordingGrid.last.received)
    rich, poor = [replies[0], replies[2]], [replies[1]]
    model, kept = model_of(run_dir), prototypes(run_dir)
    for name in arrays_of(rich[0]):
        assert np.array_equal(model[name], average(rich, name))
    for name in arrays_of(poor[0]):
        assert np.array_equal(kept[f"cnn3/{name}"], average(poor, name))
    assert len(kept) == len(arrays_of(poor[0]))
    everybody_rich = run_local(tmp_path / "b", **still | {"fleet": fleet_json(rich=2_000_000)})
    settings = tiny_settings(**still | {"dataset": "digits"})
    first = dict(initial_state(build_cnn3(), settings.seed))
    for name, value in first.items():  # zeros moved by 1e-30
        np.testing.assert_allclose(prototypes(everybody_rich)[f"cnn3/{name}"], value.numpy(), rtol=0, atol=1e-25)


def build_cnn3() -> Any:
    return build_blueprint("cnn3", num_classes=10, input_shape=(1, 8, 8), width=0.125, batch_norm="batch")


def test_architectures_that_no_client_trained_learn_too(tmp_path: Path) -> None:
    run_dir = run_local(tmp_path, **SMALL | {"architecture__batch_norm": "batch", "fleet": fleet_json(rich=2_000_000)})
    first = dict(initial_state(build_cnn3(), 1))
    kept = prototypes(run_dir)
    assert not any(np.array_equal(kept[f"cnn3/{n}"], v.numpy()) for n, v in first.items() if "weight" in n)


def test_fedet_exchanges_only_the_last_layer(tmp_path: Path) -> None:
    unlike = {"data__partition": "dirichlet", "data__partition_alpha": 0.5, "data__partition_balanced": False}
    changes = SMALL | unlike | {"strategy": "fedet", "architecture__batch_norm": "batch", "feddf__server_lr": STILL}
    run_dir = run_local(tmp_path, RecordingGrid, **changes)
    replies = training(RecordingGrid.last.received)
    sent = list(map(arrays_of, replies))
    first_size, _, third_size = map(examples_of, replies)
    assert first_size != third_size
    model, kept = model_of(run_dir), prototypes(run_dir)
    names = ["head.fc.weight", "head.fc1.weight", "head.fc.weight"]
    head = sum(arrays[name].astype(np.float64) / 3 for arrays, name in zip(sent, names, strict=True))
    np.testing.assert_allclose(model["head.fc.weight"], head, rtol=1e-6)
    assert np.array_equal(kept["resnet10/head.fc.weight"], model["head.fc.weight"])
    assert np.array_equal(kept["cnn3/head.fc1.weight"], model["head.fc.weight"])
    # The server's model is no client's: but for its last layer it is as it began, where nothing is learnt.
    settings = tiny_settings(**changes | {"dataset": "digits"})
    blueprint = build_blueprint("resnet10", num_classes=10, input_shape=(1, 8, 8), width=0.125, batch_norm="batch")
    first = {n: v.numpy() for n, v in initial_state(blueprint, settings.seed)}
    for name, value in first.items():
        if not name.startswith("head."):
            np.testing.assert_allclose(model[name], value, rtol=0, atol=1e-25)
            alike = (sent[0][name].astype(np.float64) + sent[2][name]) / 2
            np.testing.assert_allclose(kept[f"resnet10/{name}"], alike, rtol=1e-6, atol=1e-9)
    # The record says how often the ensemble is right.
    public = public_examples(tiny_settings(**changes | {"dataset": f"npz:{few_digits()}"}))
    cap = MemoryCap(0, enforced=False)
    models, size = [blueprint, build_cnn3(), blueprint], settings.evaluation.batch_size
    logits = [logits_of(m, record_of(reply), public, size, cap) for m, reply in zip(models, replies, strict=True)]
    right = (consensus(logits)[:, :10].argmax(1).numpy() == public.labels).mean()
    assert run_dir.rounds()[0]["teachers_accuracy"] == pytest.approx(right)


def test_clients_evaluate_the_prototype_of_their_architecture(tmp_path: Path) -> None:
    changes = {
        "evaluation__on_clients_every": 1,
        "data__validation_fraction": 0.2,
        "architecture__batch_norm": "running",
    }
    (record,) = run_local(tmp_path, **SMALL | changes).rounds()
    assert record["clients_evaluated"] == 3
    assert all(0 < client["evaluation_peak"] <= client["budget"] for client in record["clients"])


def test_clients_may_train_on_adversarial_examples(tmp_path: Path) -> None:
    changes = {
        "training__adversarial": True,
        "attack__steps": 2,
        "evaluation__attack_examples": 50,
        "architecture__batch_norm": "running",
    }
    (record,) = run_local(tmp_path, **SMALL | changes).rounds()
    assert record["adversarial_accuracy"] is not None
    clean = clients_of(run_local(tmp_path / "clean", **SMALL | {"architecture__batch_norm": "running"}))
    assert [c["status"] for c in record["clients"]] == ["ok"] * 3
    for attacked, plain in zip(record["clients"], clean, strict=True):
        assert attacked["flops"] > 2 * plain["flops"]
        assert attacked["measured_peak"] == attacked["predicted_peak"]


def test_who_cannot_train_the_smallest_says_so(tmp_path: Path) -> None:
    run_dir = run_local(
        tmp_path, **SMALL | {"fleet": fleet_json(rich=2_000_000, none=50_000), "architecture__batch_norm": "batch"}
    )
    assert [client["status"] for client in clients_of(run_dir)] == ["ok", "memory", "ok"]
    assert clients_of(run_dir)[1]["needed"] > 50_000


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"data__public_fraction": 0.0},
            r"data.public-fraction = 0.0: feddf needs public examples on the server, but has 0",
        ),
        (
            {"feddf.family": ""},
            r"feddf.family is empty: name smaller models to train beside resnet10, such as feddf.family=cnn3; only vgg16 and",
        ),
        ({"feddf.family": "cnn5"}, r"family = 'cnn5': model = 'cnn5' is not known"),
        ({"feddf.family": "cnn4"}, r"family = 'cnn4': cnn4 needs images of at least 51x51 pixels"),
        (
            {"architecture__batch_norm": "local"},
            r"architecture.batch-norm = 'local': clients of feddf can change their architecture",
        ),
        ({"strategy": "fedet", "feddf.family": "convnet"}, r"the last layers of resnet10 and convnet have the shapes"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        run_local(tmp_path, **SMALL | {"architecture__batch_norm": "running"} | changes)


def test_a_plan_refuses_what_a_run_refuses() -> None:
    settings = tiny_settings(**SMALL | {"dataset": "digits", "strategy": "fedet", "feddf.family": "convnet"})
    with pytest.raises(ValueError, match="the last layers of resnet10 and convnet have the shapes"):
        make_plan(settings, ask(settings))


def test_a_model_whose_logits_overflow_does_not_enter(tmp_path: Path) -> None:
    """Weights that are finite and make logits that are not: its client is rejected, the others' models are not."""

    class Grid(RecordingGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in training(replies):
                if reply.metadata.src_node_id == self.spoilt():
                    with changing(reply) as arrays:
                        arrays["head.fc.bias"] = Array(np.full(10, 3e38, np.float32))
                        arrays["head.fc.weight"] = Array(np.full((10, 64), 3e38, np.float32))
            return replies

        def spoilt(self) -> int:
            return min(self.get_node_ids())

    run_dir = run_local(
        tmp_path, Grid, **SMALL | {"architecture__batch_norm": "batch", "faults__update_norm_limit": 0.0}
    )
    statuses = {client["client"]: (client["status"], client["reason"]) for client in clients_of(run_dir)}
    assert sorted(status for status, _ in statuses.values()) == ["ok", "ok", "rejected"]
    assert "logits of the public examples are not finite" in "".join(reason for _, reason in statuses.values())
    assert all(np.isfinite(array).all() for array in model_of(run_dir).values())


def test_distillation_that_diverges_is_discarded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = run_local(
        tmp_path, **SMALL | {"architecture__batch_norm": "running", "feddf__server_lr": 1e6, "num_rounds": 2}
    )
    assert "lower feddf.server-lr = 1000000.0" in caplog.text
    for record in run_dir.rounds():
        assert record["aggregated"] and record["distillation_loss"] is None
        assert [client["status"] for client in record["clients"]] == ["ok"] * 3
    assert all(np.isfinite(array).all() for array in [*model_of(run_dir).values(), *prototypes(run_dir).values()])


def test_variances_of_nothing_do_not_make_the_others_learn(tmp_path: Path) -> None:
    """An update within all limits, whose batch norms divide by nothing: its logits do not enter the mean.

    The next round, in which no update is whole, has nothing to say of it.
    """

    class Grid(RecordingGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in training(replies):
                with changing(reply) as arrays:
                    if len(training(self.sent)) > 3:
                        del arrays[next(iter(arrays))]
                    elif reply.metadata.src_node_id == max(self.get_node_ids()):
                        for name in [name for name in arrays if name.endswith("running_var")]:
                            arrays[name] = Array(np.zeros_like(arrays[name].numpy()))
            return replies

    changes = {"architecture__batch_norm": "running", "num_rounds": 2, "faults__max_empty_rounds": 2}
    first, second = run_local(tmp_path, Grid, **SMALL | changes).rounds()
    assert [client["status"] for client in first["clients"]] == ["ok"] * 3
    assert len(first["distrusted"]) == 1
    assert not second["aggregated"]
    assert (second["distrusted"], second["server_peak"]) == ([], 0)


def test_a_model_that_is_not_whole_does_not_enter(tmp_path: Path) -> None:
    class Grid(RecordingGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in training(replies)[:1]:
                if not hasattr(self, "cut"):
                    with changing(reply) as arrays:
                        del arrays["head.fc.bias"]
                    self.cut = True
            return replies

    found = clients_of(run_local(tmp_path, Grid, **SMALL | {"architecture__batch_norm": "batch"}))
    assert sorted(client["status"] for client in found) == ["ok", "ok", "rejected"]
    assert "array 'head.fc.bias' is missing" in "".join(client["reason"] for client in found)


def test_a_plan_agrees_with_a_run(tmp_path: Path) -> None:
    changes = SMALL | {"dataset": "digits", "architecture__batch_norm": "running"}
    found = make_plan(tiny_settings(**changes), ask(tiny_settings(**changes)))
    (record,) = run_local(tmp_path, **changes).rounds()
    (stage,) = found["fleet"]["stages"]
    assert stage["peak_bytes"] == max(client["measured_peak"] for client in record["clients"])
    assert stage["participation"] == 1
