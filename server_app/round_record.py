"""The record of one round: its line in rounds.jsonl, and the data from which this line is made.

A round contributes four kinds of data: queries before it, training, evaluation, and the clients' reports.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from flwr.app import MetricRecord

from piecework.device_profiles.clock import round_seconds
from piecework.federation.evaluation import Evaluation
from piecework.federation.reports import ClientReport
from piecework.planning.coverage import Row, part_names, trained_rows
from piecework.server_app.rates import describe
from piecework.server_app.summary import accuracy_by_device, disk_use
from piecework.strategies.server import MethodServer
from piecework.training.settings import too_many_asked


@dataclass(frozen=True)
class RoundRecord:
    """One round. The fields are the keys of a line in rounds.jsonl, in this order.

    Sizes are in bytes and times in seconds. Accuracies are from 0 to 1. A figure is None if it was not evaluated or no client
    reported it. `details` are those of the strategy: each of them is a key of its own in the line.
    """

    round: int  # from 1
    stage: str  # its name; empty if the strategy has no stages
    lr: float  # the learning rate that clients trained with
    lr_schedule: str  # `cosine over 20 rounds`
    init_weights: str  # the weights taken from `training.init-weights`, in the first round; else empty
    details: dict[str, Any]  # of the strategy, by key
    personal: bool  # whether clients evaluate, each on its own part of the test split
    accuracy: float | None  # of the model on the test split; the mean over clients if evaluation is personal
    loss: float | None  # on the same examples as `accuracy`
    adversarial_accuracy: float | None  # of the model on attacked images of the test split
    train_loss: float | None  # mean over the examples of the clients that trained
    distillation_loss: float | None  # of ProFL's map phase, or of the server's distillation
    client_accuracy: float | None  # of the new model on clients' validation data; None if evaluation is personal
    client_adversarial_accuracy: float | None  # of the new model on clients' attacked validation data
    clients_evaluated: int  # clients whose evaluation counts
    accuracy_by_device: dict[str, float]  # validation accuracy after local training, by device class
    aggregated: bool  # whether the round made a new model
    examples: int  # training examples of all clients
    trained: list[Row]  # for each part of the model, how many clients trained it
    asked: int  # clients that were given a task
    answered: int  # clients whose update was accepted, even if too few were for a new model
    failed: int  # clients without an accepted update
    late_replies: list[dict[str, Any]]  # replies to earlier rounds' messages that arrived before this round
    late_used: list[
        dict[str, Any]
    ]  # late answers that entered the model of this round, with their age in rounds and weight
    late_dropped: list[dict[str, Any]]  # late answers that could not be used any more, with the reason
    busy: list[int]  # clients that were still doing an earlier task when the round began
    devices: dict[str, int]  # how many clients each device class has
    unusable_nodes: list[dict[str, int | str]]  # nodes whose answer to the query was unusable, and why
    warning: str  # if the settings ask for more clients than there are; else empty
    excluded: list[dict[str, int]]  # clients excluded because their processes died, and how often in a row
    bytes_down: int  # of training messages, to clients
    bytes_up: (
        int  # of their replies, of late ones that arrived before this round, and of new nodes' answers to the query
    )
    bytes_evaluation: int  # of evaluation messages and of measuring batch norms, both ways
    bytes_query: int  # of pre-round queries, both ways
    disk: (
        dict[str, int] | None
    )  # bytes that paged steps read and wrote, of all clients and the most by one; None if none paged
    batch_norm: str  # the statistics with which the model was evaluated
    statistics: dict[str, Any] | None  # which clients measured the batch norms; None if no client was asked
    evaluation: dict[str, Any] | None  # which clients evaluated; None if no client was asked
    query: dict[str, Any] | None  # which clients answered the pre-round query; None if there was none
    enforced: bool  # whether budgets are enforced on clients
    seconds: float  # of the round, on the server's clock
    train_seconds: float  # of the round, until the new model was aggregated
    simulated_seconds: float  # of the last client that it waited for, on its emulated device
    clients: list[ClientReport]  # one for each client that was asked

    def to_values(self) -> dict[str, Any]:
        """Return the line of rounds.jsonl as JSON values."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values |= value if field.name == "details" else {field.name: value}
        return values | {"clients": [asdict(report) for report in self.clients]}


@dataclass(frozen=True)
class Opening:
    """The state at the beginning of a round. `query`: which clients answered the pre-round query; None if there was none.

    `waited` is the simulated seconds before it began, in which too few clients were idle.
    """

    late_replies: list[dict[str, Any]]
    busy: list[int]
    query: dict[str, Any] | None
    query_bytes: int
    waited: float = 0.0


@dataclass(frozen=True)
class TrainingPhase:
    """The training of a round. `aggregated`: whether it made a new model."""

    aggregated: bool
    metrics: MetricRecord | None
    seconds: float


@dataclass(frozen=True)
class ModelEvaluation:
    """The evaluation of a round's model.

    `central` is that on the server, `clients` that on clients' data. `answers`: which clients evaluated. `statistics`: which
    clients measured its batch norms. Each of these is None if it was not requested. `message_bytes` are the bytes of
    evaluating and measuring on clients, both ways. `batch_norm` names the statistics with which the model was evaluated.
    """

    central: Evaluation | None
    clients: MetricRecord | None
    answers: dict[str, Any] | None
    statistics: dict[str, Any] | None
    message_bytes: int
    batch_norm: str


def record_of(
    server: MethodServer,
    server_round: int,
    opening: Opening,
    training: TrainingPhase,
    evaluation: ModelEvaluation,
    *,
    init_weights: str,
    seconds: float,
) -> RoundRecord:
    """Return the record of the round that a strategy has just finished. `seconds` is the duration of the round."""
    registry, reports = server.registry, list(server.round.reports.values())
    return RoundRecord(
        round=server_round,
        stage=server.method.progress.stage,
        lr=server.rate(server_round),
        lr_schedule=describe(server.settings),
        init_weights=init_weights,
        details={**server.method.details(server.round), **server.method.evaluation_details, **privacy_of(server)},
        **accuracies(evaluation, personal=server.method.personal),
        train_loss=metric(training.metrics, "train-loss"),
        distillation_loss=metric(training.metrics, "distillation-loss"),
        clients_evaluated=sum(bool(each.get("val-examples")) for each in server.round.answers.values()),
        accuracy_by_device=accuracy_by_device(reports),
        aggregated=training.aggregated,
        examples=sum(member.examples for member in registry.members.values()),
        trained=trained_rows_of(server, training.aggregated),
        **counts(reports),
        late_replies=opening.late_replies,
        **server.late.recorded,
        busy=opening.busy,
        devices=registry.devices(),
        unusable_nodes=registry.unusable(),
        warning=too_many_asked(server.settings, registry.clients),
        excluded=[{"client": c, "crashes": n} for c, n in sorted(server.round.excluded.items())],
        **bytes_of(server, opening),
        bytes_evaluation=evaluation.message_bytes,
        bytes_query=opening.query_bytes,
        disk=disk_use([vars(report) for report in reports]),
        batch_norm=evaluation.batch_norm,
        statistics=evaluation.statistics,
        evaluation=evaluation.answers,
        query=opening.query,
        enforced=server.enforced,
        seconds=seconds,
        train_seconds=training.seconds,
        simulated_seconds=opening.waited + training_seconds(server),
        clients=reports,
    )


def bytes_of(server: MethodServer, opening: Opening) -> dict[str, Any]:
    """Return the bytes of training messages, those up with answers of new nodes and late replies.

    Late replies of emulated clients are counted in their own round.
    """
    reports, late = server.round.reports.values(), sum(each.get("bytes", 0) for each in opening.late_replies)
    return {
        "bytes_down": sum(report.bytes_down for report in reports),
        "bytes_up": sum(report.bytes_up for report in reports) + late + server.registry.take_query_bytes(),
    }


def privacy_of(server: MethodServer) -> dict[str, Any]:
    """Return the entry `privacy` of a private run's record: what it has spent, and the signal-to-noise ratio of each unit."""
    if server.privacy is None:
        return {}
    return {"privacy": server.privacy.describe() | {"signal_to_noise": server.round.mean.signal_to_noise()}}


def counts(reports: Sequence[ClientReport]) -> dict[str, Any]:
    """Return the fields of a record with the numbers of clients that were asked, whose updates were accepted, and others."""
    answered = sum(report.status == "ok" for report in reports)
    return {"asked": len(reports), "answered": answered, "failed": len(reports) - answered}


def training_seconds(server: MethodServer) -> float:
    """Return the simulated seconds of the round's training: of its slowest client, or until it did not wait any more."""
    reports = server.round.reports.values()
    if server.settings.simulated:
        return round_seconds(report.waited_seconds for report in reports)
    return min(round_seconds(report.simulated_seconds for report in reports), server.round.closed_at)


def accuracies(evaluation: ModelEvaluation, *, personal: bool) -> dict[str, Any]:
    """Return the fields of a record with the model's loss and accuracies, on the server and on clients."""
    found = evaluation.central
    accuracy, loss = (metric(evaluation.clients, key) for key in ("val-accuracy", "val-loss"))
    return {
        "personal": personal,
        "accuracy": found.accuracy if found else accuracy if personal else None,
        "loss": found.loss if found else loss if personal else None,
        "adversarial_accuracy": found.adversarial_accuracy if found else None,
        "client_accuracy": None if personal else accuracy,
        "client_adversarial_accuracy": metric(evaluation.clients, "val-adversarial-accuracy"),
    }


def trained_rows_of(server: MethodServer, aggregated: bool) -> list[Row]:
    """Return who trained each part of the model in this round: clients with accepted updates, if there is a new model."""
    accepted = [report for report in server.round.reports.values() if aggregated and report.status == "ok"]
    trained = {report.client: report.trained for report in accepted}
    for late in server.late.used:
        trained[late["client"]] = [*trained.get(late["client"], []), *late["trained"]]
    examples = {client: member.examples for client, member in server.registry.members.items()}
    distilled = bool(trained) and server.method.cut.can.untrained == "distilled"
    return trained_rows([*part_names(server.method.cut.blueprint).values()], trained, examples, distilled=distilled)


def metric(metrics: MetricRecord | None, key: str) -> float | None:
    """Return a metric of a round, or None if no client reported it."""
    return float(metrics[key]) if metrics is not None and key in metrics else None  # type: ignore[arg-type]
