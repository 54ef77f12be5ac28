"""FedProphet's server on real answers: the partial average of Equations 16 and 17, and the pre-round query of Equation 11."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fedprophet_helpers import a_run
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from helpers import arrays_of, average, changing, examples_of, numpy_of

from piecework.models.cascade import unit_of
from piecework.server_app.rounds import Run
from piecework.strategies.cascade.fedprophet.adjustment import FedProphetState, FixedModule
from piecework.strategies.cascade.fedprophet.server import FedProphet
from piecework.strategies.query import aggregate_query, configure_query
from piecework.strategies.server import MethodServer
from piecework.training.answers import Outcome


@dataclass
class Answers:
    """A strategy that has asked three clients in round 1 or 2, which are one stage each, and their answers."""

    run: Run
    replies: dict[str, bytes]

    def ask(self, what: str) -> tuple[MethodServer, list[Message]]:
        """The strategy, having asked again, and copies of the true answers to `first`, `query` or `second`."""
        run, server = self.run, self.run.server
        assert isinstance(server.method, FedProphet)
        server.method.state = server.method.state_class(r_min=370_000, stage_rounds=9)
        server_round = 1 if what == "first" else 2
        if server_round == 2:
            state_of(server).stage, state_of(server).alpha = 1, 0.3
            state_of(server).fixed = FixedModule(clean=0.5, adversarial=0.25, epsilon=0.0, nonnegative=False)
            state_of(server).distance = None if what == "query" else 2.0
        if what == "query":
            messages = configure_query(server, server_round, run.arrays, run.grid)
            assert messages is not None
        else:
            messages = server.configure_train(server_round, run.arrays, ConfigRecord(), run.grid)
        for batch in server.dispatcher.batches():
            server.dispatcher.note_delivered(run.transport.exchange(server_round, batch))
        asked = list(messages)
        if what not in self.replies:
            self.replies[what] = pickle.dumps(list(run.grid.send_and_receive(asked)))
        return server, pickle.loads(self.replies[what])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    with a_run(tmp_path_factory.mktemp("answers")) as run:
        yield Answers(run, {})


def state_of(server: MethodServer) -> FedProphetState:
    assert isinstance(server.method, FedProphet)
    return server.method.state


def aggregated(server: MethodServer, replies: list[Message]) -> ArrayRecord:
    copies = pickle.loads(pickle.dumps(replies))
    arrays, _ = server.aggregate_train(1, iter(copies))
    assert [report.status for report in server.round.reports.values() if report.status != "timeout"] == ["ok"] * len(
        replies
    )
    assert arrays is not None
    return arrays


def by_unit(record: ArrayRecord) -> dict[str, list[str]]:
    """The names of arrays by unit."""
    units: dict[str, list[str]] = {}
    for name in record:
        units.setdefault(unit_of(name), []).append(name)
    return units


# ---- Equations 16 and 17


@pytest.mark.parametrize(
    ("what", "pieces", "trained"),
    [
        (
            "first",
            [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]],
            {"atoms.0": 3, "atoms.1": 3, "aux.1": 1, "atoms.2": 2, "atoms.3": 2, "aux.3": 1, "atoms.4": 1, "head": 1},
        ),
        ("second", [[2, 3], [2, 3, 4], [2, 3, 4]], {"atoms.2": 3, "atoms.3": 3, "aux.3": 1, "atoms.4": 2, "head": 2}),
    ],
)
def test_partial_average(answers: Answers, what: str, pieces: list[list[int]], trained: dict[str, int]) -> None:
    server, replies = answers.ask(what)
    old, new = answers.run.arrays, aggregated(server, replies)
    assert [report.pieces for report in server.round.reports.values()] == [[piece] for piece in pieces]
    weights = [examples_of(reply) for reply in replies]
    assert len(set(weights)) == 3  # so that a mean without weights would be another
    assert list(new) == list(old)
    for unit, names in by_unit(old).items():
        holders = [reply for reply in replies if names[0] in arrays_of(reply)]
        assert len(holders) == trained.get(unit, 0)
        for name in names:
            if not holders:
                assert new[name].data is old[name].data
            elif name.endswith("num_batches_tracked"):
                assert new[name].numpy() == old[name].numpy() + 2  # local iterations
                assert new[name].dtype == "int64"
            else:
                np.testing.assert_array_equal(new[name].numpy(), average(holders, name))
                assert not np.array_equal(new[name].numpy(), old[name].numpy())


def test_a_weighted_mean_by_hand(answers: Answers) -> None:
    """The head behind the first module comes from the first client alone, the second module from the other two."""
    server, replies = answers.ask("first")
    first, second, third = map(arrays_of, replies)
    new = numpy_of(aggregated(server, replies))
    np.testing.assert_array_equal(new["aux.1.fc.weight"], first["aux.1.fc.weight"])
    np.testing.assert_array_equal(new["aux.3.fc.bias"], second["aux.3.fc.bias"])
    np.testing.assert_array_equal(new["head.fc.bias"], third["head.fc.bias"])
    name, (_, two, three) = "atoms.2.conv.weight", [examples_of(reply) for reply in replies]
    by_hand = (two * second[name].astype(np.float64) + three * third[name]) / (two + three)
    np.testing.assert_allclose(new[name], by_hand, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("there", "untouched"),
    [
        ([0], {"atoms.2", "atoms.3", "atoms.4", "aux.3", "head"}),
        ([1], {"atoms.4", "aux.1", "head"}),
        ([0, 1], {"atoms.4", "head"}),
        ([2], {"aux.1", "aux.3"}),
    ],
)
def test_parameters_that_no_client_trained_are_bit_identical(
    answers: Answers, there: list[int], untouched: set[str]
) -> None:
    server, replies = answers.ask("first")
    old, new = answers.run.arrays, aggregated(server, [replies[n] for n in there])
    same = {name for name in old if new[name].data is old[name].data}  # Flower wraps the bytes again
    assert same == {name for name in old if unit_of(name) in untouched}
    assert all((new[name].shape, new[name].dtype) == (old[name].shape, old[name].dtype) for name in old)


def test_a_unit_that_was_not_assigned_is_not_taken(answers: Answers) -> None:
    """A client of the first module alone sends a second one, and the head of another."""
    for name in ("atoms.2.conv.weight", "aux.3.fc.bias", "head.fc.bias"):
        server, replies = answers.ask("first")
        with changing(replies[0]) as arrays:
            arrays[name] = answers.run.arrays[name]
        arrays, _ = server.aggregate_train(1, iter(replies))
        assert server.round.reports[0].status == "rejected"
        assert server.round.reports[0].reason == f"array {name!r} was not sent for training"
        assert arrays is not None


# ---- Equation 11: the mean over all examples


def measured(reply: Message) -> dict[str, Any]:
    return dict(reply.content.metric_records["metrics"])


def put(reply: Message, **metrics: Any) -> None:
    changed = measured(reply) | {name.replace("_", "-"): value for name, value in metrics.items()}
    reply.content["metrics"] = MetricRecord({name: value for name, value in changed.items() if value is not None})


def test_a_survey_of_all_clients(answers: Answers) -> None:
    server, replies = answers.ask("query")
    rows = [measured(reply) for reply in replies]
    assert [row["num-examples"] for row in rows] == [server.registry.members[client].examples for client in range(3)]
    assert aggregate_query(server, iter(replies))
    total = sum(row["perturbation"] * row["num-examples"] for row in rows)
    assert state_of(server).distance == pytest.approx(total / sum(row["num-examples"] for row in rows))
    assert state_of(server).nonnegative  # behind a ReLU
    assert state_of(server).epsilon == pytest.approx(0.3 * state_of(server).distance)


def test_examples_are_the_weights(answers: Answers) -> None:
    server, replies = answers.ask("query")
    for reply, distance, examples in zip(replies, (1.0, 2.0, 5.0), (10, 20, 10), strict=True):
        put(reply, perturbation=distance, num_examples=examples)
    assert aggregate_query(server, iter(replies))
    assert state_of(server).distance == pytest.approx((10 + 40 + 50) / 40)


@pytest.mark.parametrize(("minimum", "nonnegative"), [(0.0, True), (-1e-6, False)])
def test_one_client_with_features_below_zero_is_enough(answers: Answers, minimum: float, nonnegative: bool) -> None:
    server, replies = answers.ask("query")
    put(replies[1], min_feature=minimum)
    assert aggregate_query(server, iter(replies))
    assert state_of(server).nonnegative is nonnegative


@pytest.mark.parametrize(
    "nonsense",
    [
        {"perturbation": -1.0},
        {"perturbation": None},
        {"min_feature": None},
        {"num_examples": 10**6},
        {"num_examples": 0},
        {"num_examples": None},
        {"perturbation": float("nan")},
        {"perturbation": float("inf")},
        {"min_feature": float("nan")},
        {"perturbation": [1.0, 2.0]},
        {"num_examples": -5},
        {"num_examples": float("inf")},
        {"num_examples": [1, 2]},
    ],
    ids=str,
)
def test_a_measurement_that_makes_no_sense_does_not_count(answers: Answers, nonsense: dict[str, Any]) -> None:
    server, replies = answers.ask("query")
    for reply, distance in zip(replies, (1.0, 100.0, 3.0), strict=True):
        put(reply, perturbation=distance, num_examples=10)
    put(replies[1], **nonsense)
    assert aggregate_query(server, iter(replies))
    assert state_of(server).distance == pytest.approx(2.0)


def test_features_that_no_attack_moves_are_named(answers: Answers, caplog: pytest.LogCaptureFixture) -> None:
    """A module that was kept from a round with alpha = 0 moves nothing: the next module would silently train clean."""
    server, replies = answers.ask("query")
    for reply in replies:
        put(reply, perturbation=0.0)
    assert aggregate_query(server, iter(replies))
    assert caplog.messages == [
        "module 2 trains on clean features, because no attack moves the output of the module before"
    ]
    assert server.method.details(server.round)["clean_round"]
    server, replies = answers.ask("query")
    assert aggregate_query(server, iter(replies))
    assert len(caplog.messages) == 1
    assert not server.method.details(server.round)["clean_round"]


def test_a_pre_round_query_without_answers(answers: Answers) -> None:
    server, replies = answers.ask("query")
    for reply in replies:
        reply.content["outcome"] = Outcome("memory", 5, 4, "needs 5 bytes, allowed 4").to_record()
    for answered in ([], replies):
        assert not aggregate_query(server, iter(answered))
        assert state_of(server).distance is None
