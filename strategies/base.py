"""What every strategy shares: sampling, tasks under budgets, checked updates, the running average, records.

Flower's `Strategy` signatures are kept. `aggregate_train` takes an iterable of replies and works on them as they arrive. A
method overrides what it does differently: how it cuts a model, which prices a task carries, how replies are combined.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from client_app.task import Outcome, Task, content_bytes, piece_key
from device_profiles.clock import simulated_seconds
from device_profiles.profile import DeviceState
from models.partition import Piece
from server_app.mail import LIFE
from server_app.roster import sampled
from server_app.settings import learning_rate
from strategies.aggregation import (
    CheckedUpdate,
    UpdateRejectedError,
    WeightedMean,
    check_update,
    compared,
    norm_limit,
    spec_of,
    within_limit,
)
from strategies.delivery import Delivery, without_units
from strategies.faults import SILENT, status_of
from strategies.pricing import pricing_for
from strategies.reports import LONGEST, ClientReport, finite
from strategies.rules import Rule
from strategies.state import Experiment, StrategyState

NORMS_KEPT = 1000


class PieceStrategy(Strategy):
    """Base of all strategies here. `rule_class` says how the method cuts a model."""

    name: ClassVar[str]
    rule_class: ClassVar[type[Rule]]

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.settings = experiment, experiment.settings
        self.blueprint, self.roster = experiment.blueprint, experiment.roster
        self.rule = self.rule_class(self.blueprint, pricing_for(self.settings, experiment.reference), self.settings)
        self.state = StrategyState()
        self.reports: dict[int, ClientReport] = {}
        self.evaluation_bytes = self.evaluated = 0
        self.left_out: dict[int, int] = {}
        self._asked: dict[int, tuple[Task, DeviceState]] = {}
        self._arrays = ArrayRecord()
        self.delivery = Delivery(self.settings, self.roster, experiment.experiment_id, experiment.state_dir)

    def frozen_units(self, client: int, task: Task) -> list[str]:
        """The units that a client's task reads and nobody trains any more: they are sent once, before the task."""
        return []

    @abstractmethod
    def prices_for(self, budget: int) -> dict[Piece, int]:
        """The price list of a client with this budget (bytes): all that its trainer will look up."""

    def price(self, piece: Piece) -> int:
        """Bytes of training a piece by the memory-model."""
        return self.rule.bytes(piece)

    @property
    def reference_bytes(self) -> int:
        """One reference step: the model at width 1, a FedAvg step; ratio budgets are shares of it."""
        return self.rule.pricing.reference_bytes

    def sample(self, server_round: int, grid: Grid) -> list[int]:
        """The clients of a round: a function of (seed, round) and of who is connected, free and not left out."""
        settings, left_out = self.settings, self.state.setbacks.left_out(server_round)
        present = self.roster.present(grid)
        chosen = [client for client in present if client not in left_out]
        if len(chosen) < max(1, settings.min_clients):
            chosen = present  # rather those than too few
        self.left_out = {client: left_out[client] for client in present if client not in chosen}
        return sampled(chosen, settings.clients_per_round, settings.seed, server_round) if chosen else []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One task a client. Prices are traced now; messages are made when they are sent, `max-in-flight` at a time."""
        self._arrays = arrays
        self._asked = self._ask(server_round, arrays, grid)
        self.reports = {c: ClientReport(c, state.device, state.budget_bytes) for c, (_, state) in self._asked.items()}
        for client, report in self.reports.items():
            if (share := self.state.setbacks.share(client)) < 1:
                report.note = f"given {share:.0%} of its budget since its process died"
        return self._messages("train", arrays)

    def _ask(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> dict[int, tuple[Task, DeviceState]]:
        asked = {}
        for client in self.sample(server_round, grid):
            state = self.roster.state(client, server_round, self.reference_bytes, arrays.count_bytes())
            state = replace(state, budget_bytes=self._share_of(state.budget_bytes, client))
            task = self.task(server_round, state.budget_bytes)
            frozen = self.delivery.hashes(arrays, self.frozen_units(client, task))
            asked[client] = replace(task, frozen=frozen), state
        return asked

    def _share_of(self, budget: int, client: int) -> int:
        """Bytes a client is given of its budget: all, or less since its process died, but what it needs to train at all."""
        share = self.state.setbacks.share(client)
        return budget if share == 1 else max(int(share * budget), min(budget, self.rule.least()))

    def deliver(self) -> Iterator[Iterator[Message]]:
        """Waves of messages with frozen units; `delivered` takes in the replies to one before the next is asked for."""
        tasks = {client: task for client, (task, _) in self._asked.items()}
        return self.delivery.waves(tasks, self._arrays, self.reports)

    def delivered(self, replies: Iterable[Message]) -> None:
        """Take note of which frozen units arrived."""
        for client, message in self.delivery.note(replies, self.reports):
            self._fail(message, self.reports[client])

    def _messages(self, kind: str, arrays: ArrayRecord) -> Iterator[Message]:
        for client, (trained, _) in self._asked.items():
            if client in self.delivery.unreached or (kind == "evaluate" and self.reports[client].status in SILENT):
                continue
            # Training of this round may have left a state: it is the newest that an evaluation may use, and must keep.
            task = trained if kind == "train" else replace(trained, state_round=trained.round)
            content = RecordDict({"task": task.to_record(), "arrays": without_units(arrays, task.frozen)})
            if kind == "train":
                self.reports[client].bytes_down += content_bytes(content)
                self.reports[client].reason = "no answer within round-timeout"
            else:
                self.evaluation_bytes += content_bytes(content)
            node = self.roster.members[client].node_id
            ttl = LIFE * self.settings.round_timeout
            yield Message(content, dst_node_id=node, message_type=kind, group_id=str(task.round), ttl=ttl)

    def task(self, server_round: int, budget: int) -> Task:
        """The task of a client with this budget."""
        return Task(
            experiment_id=self.experiment.experiment_id,
            round=server_round,
            state_round=server_round - 1,
            strategy=self.name,
            budget=budget,
            reference=self.reference_bytes,
            lr=learning_rate(self.settings, server_round),
            state_dir=self.experiment.state_dir,
            enforced=self.settings.enforced,
            prices={piece_key(piece): price for piece, price in self.prices_for(budget).items()},
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take in replies one by one. Returns (None, None) when nobody trained, or fewer than `min-clients`."""
        mean, norms = WeightedMean(), list[float]()
        factor = 0.0 if self.state.norms else self.settings.update_norm_limit
        for report, update, limit in compared(self._received(replies), factor):
            try:
                norms.append(within_limit(update.norm, limit))
                self.combine(mean, update)
            except UpdateRejectedError as error:
                report.status, report.reason = "rejected", str(error)
        if len(norms) < max(1, self.settings.min_clients):
            return None, None
        self.state.norms = [*self.state.norms, *norms][-NORMS_KEPT:]
        return self.finish(mean), self._train_metrics()

    def _received(self, replies: Iterable[Message]) -> Iterator[tuple[ClientReport, CheckedUpdate]]:
        spec = spec_of(self._arrays)
        limit = norm_limit(self.state.norms, self.settings.update_norm_limit, self._arrays)
        for message in replies:
            client = self.roster.client_of(message.metadata.src_node_id)
            if client is None or client not in self.reports:
                continue
            report = self.reports[client]
            if (update := self.receive(message, report, spec, limit)) is not None:
                yield report, update

    def combine(self, mean: WeightedMean, update: CheckedUpdate) -> None:
        """Add an update, weighted by its number of examples."""
        mean.add(update.arrays, update.examples)

    def finish(self, mean: WeightedMean) -> ArrayRecord:
        """The new model; arrays that nobody trained stay the very same objects."""
        spec = spec_of(self._arrays)
        return ArrayRecord(
            {
                name: Array(np.asarray(mean[name], dtype=spec[name][1])) if name in mean else array
                for name, array in self._arrays.items()
            }
        )

    def receive(self, message: Message, report: ClientReport, spec: Any, limit: float) -> CheckedUpdate | None:
        """Fill in the report; the update, if it may enter the model."""
        if message.has_error():
            self._fail(message, report)
            return None
        try:
            report.bytes_up += content_bytes(message.content)
            outcome = Outcome.from_record(message.content.config_records["outcome"])
            metrics = dict(message.content.metric_records["metrics"])
            self._note(report, outcome, metrics)
            if outcome.status != "ok":
                report.status, report.reason, report.needed = outcome.status, outcome.reason[:LONGEST], outcome.needed
                self.delivery.forget(report.client, outcome.lacking)
                return None
            arrays = message.content.array_records["arrays"]
            update = check_update(arrays, metrics.get("num-examples"), self._arrays, spec, limit)
            if report.examples > (known := self.roster.members[report.client].examples):
                raise UpdateRejectedError(f"num-examples is {report.examples}: the client has {known}")
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            report.status = "rejected"
            reason = str(error) if isinstance(error, UpdateRejectedError) else f"{type(error).__name__}: {error}"
            report.reason = reason[:LONGEST]
            return None
        report.status, report.reason = "ok", ""
        self.state.setbacks.answered(report.client)
        return update

    def _fail(self, message: Message, report: ClientReport) -> None:
        report.status = status_of(message.error)
        report.reason = f"error {message.error.code}: {message.error.reason}"[:LONGEST]
        self.note_error(report.client, self._asked[report.client][0].round, report.status)

    def note_error(self, client: int, server_round: int, status: str) -> None:
        """What a client's error in a round means for later ones; also of an error that comes late."""
        if status == "crashed":
            self.state.setbacks.crashed(client, server_round, self.rule.cuts)

    def _note(self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any]) -> None:
        report.add_note(outcome.note)
        report.read(metrics)
        if "memory-available" in metrics:
            self.roster.note_free_memory(report.client, int(metrics["memory-available"]))
        task, state = self._asked[report.client]
        batches = read = 0
        if outcome.status == "ok":
            keys, seen = outcome.reason.split("|"), [int(n) for n in metrics["seen"]]
            if unpriced := [key for key in keys if key not in task.prices]:
                raise UpdateRejectedError(f"piece {unpriced[0]!r} was not in the task's price list")
            if len(keys) > len(task.prices):
                raise UpdateRejectedError(f"{len(keys)} pieces, {len(task.prices)} are in the task's price list")
            report.pieces = outcome.reason
            parts = [self.rule.part(tuple(map(int, key.split(",")))) for key in keys]
            size = self.settings.batch_size
            report.flops = sum(self.rule.pricing.traced(p).flops * n / size for p, n in zip(parts, seen, strict=True))
            batches = sum(math.ceil(n / size) for n in seen)
            read = sum(p.copies * p.state_bytes + p.input_bytes * n for p, n in zip(parts, seen, strict=True))
        report.simulated_seconds = simulated_seconds(
            state, report.flops, report.bytes_down, report.bytes_up, read, batches
        )

    def _train_metrics(self) -> MetricRecord:
        trained = [r for r in self.reports.values() if r.status == "ok"]
        total = sum(r.examples for r in trained)
        return MetricRecord({"train-loss": sum((r.train_loss or 0.0) * r.examples for r in trained) / total})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """In every `client-evaluation-every`-th round, the clients of the round evaluate the new model."""
        self.evaluation_bytes = 0
        every = self.settings.client_evaluation_every
        return self._messages("evaluate", arrays) if every and server_round % every == 0 else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean over all validation examples of the clients that answered."""
        keys = ("val-loss", "val-accuracy")
        self.evaluated = 0
        total, sums = 0, dict.fromkeys(keys, 0.0)
        for message in replies:
            if message.has_error():
                client = self.roster.client_of(message.metadata.src_node_id)
                if client is not None:
                    self.note_error(client, server_round, status_of(message.error))
                continue
            with suppress(ValueError, TypeError, LookupError, ArithmeticError):  # what makes no sense does not count
                self.evaluation_bytes += content_bytes(message.content)
                metrics: dict[str, Any] = dict(message.content.metric_records["metrics"])
                examples, values = max(0, int(metrics.get("val-examples", 0))), [finite(metrics, key) for key in keys]
                for key, value in zip(keys, values, strict=True):
                    sums[key] += (value or 0.0) * examples
                total += examples
                self.evaluated += examples > 0
        return MetricRecord({key: sums[key] / total for key in keys}) if total else None

    def summary(self) -> None:
        """Nothing: the launcher prints the settings."""
