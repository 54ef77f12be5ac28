"""What every strategy shares: sampling, tasks under budgets, checked updates, the running average, records.

Flower's `Strategy` signatures are kept. `aggregate_train` takes an iterable of replies and works on them as they arrive. A
method overrides what it does differently: how it cuts a model, which costs a task carries, how replies are combined.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from piecework.device_profiles.clock import simulated_seconds
from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import (
    CheckedUpdate,
    Norms,
    UpdateRejectedError,
    WeightedMean,
    check_update,
    compared,
    first_limit,
    norm_limits,
    note_norms,
    require_within,
    spec_of,
    updated,
)
from piecework.federation.dispatcher import Dispatcher
from piecework.federation.faults import SILENT, status_of
from piecework.federation.registry import MIN_EXAMPLES, sampled
from piecework.federation.reports import LONGEST, ClientReport, verdict
from piecework.federation.weight_cache import WeightCache, without_units
from piecework.models.cascade import initial_state, unit_of
from piecework.models.layer_statistics import layer_statistics
from piecework.models.partition import Piece
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel, cost_model_for
from piecework.planning.coverage import Row, Trainer, learned_names, part_names, richest, trained_rows
from piecework.planning.partition_policy import PartitionPolicy
from piecework.strategies.state import Experiment, StrategyState
from piecework.training.loop import PieceModel
from piecework.training.messages import Outcome, Task, content_bytes
from piecework.training.settings import learning_rate

NORMS_KEPT = 200  # of each unit
LOOKED_AT = 20  # rounds of a fleet, for its budgets
FREE = 0.75  # of what a device measured as free: later it may be less


class PieceStrategy(Strategy):
    """Base of all strategies here. `policy_class` says how the method cuts a model.

    `state` and the arrays of `kept` are what a checkpoint holds besides the model; `piece_class` is how the model is run.
    `measures` tells whether clients hold the model that is served, and can measure its batch norms.
    """

    name: ClassVar[str]
    policy_class: ClassVar[type[PartitionPolicy]]
    state_class: ClassVar[type[StrategyState]] = StrategyState
    piece_class: type[PieceModel] = PieceModel
    measures: ClassVar[bool] = True
    evaluation_keys: ClassVar[tuple[str, ...]] = ("val-loss", "val-accuracy")

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.settings = experiment, experiment.settings
        self.registry = experiment.registry
        steps = self.settings.attack_steps if self.policy_class.attacks(self.settings) else 0
        self.policy = self.policy_class(
            experiment.blueprint, cost_model_for(self.settings, experiment.reference, steps), self.settings
        )
        self.policy.require_model()
        self.blueprint = self.policy.model
        self.state = self.state_class()
        self.kept = ArrayRecord()
        self.reports: dict[int, ClientReport] = {}
        self.evaluated = 0
        self.excluded: dict[int, int] = {}
        self.slowest = math.inf
        self._asked: dict[int, tuple[Task, DeviceState]] = {}
        self.weight_cache = WeightCache(self.settings, self.registry, experiment.experiment_id, experiment.state_dir)
        self.dispatcher = Dispatcher(self.registry, self.weight_cache, self.settings.round_timeout, self.travelling)

    def initial(self) -> dict[str, np.ndarray]:
        """The arrays of the global model before the first round."""
        state = initial_state(self.blueprint, self.settings.seed, units=self.units())
        return {name: value.numpy() for name, value in state}

    def begin(self) -> None:
        """Called when the clients are known, before the first round and after each resume. Raises ValueError."""

    def units(self) -> list[str]:
        """The units of the global model, in order."""
        return self.blueprint.units(exits=self.policy.exits)

    def frozen_units(self, task: Task) -> list[str]:
        """The units that a task reads and no client trains any more: they are sent once, before the task."""
        return []

    def sent_units(self, task: Task) -> set[str] | None:
        """The other units that a task reads, and may train; None = all."""
        return None

    def travelling(self, task: Task, arrays: ArrayRecord) -> ArrayRecord:
        """The arrays of a model that go with a task."""
        units = self.sent_units(task)
        if units is None:
            return without_units(arrays, task.frozen)
        return ArrayRecord({name: array for name, array in arrays.items() if unit_of(name) in units})

    def untrained(self, task: Task) -> ArrayRecord:
        """What a client's update is compared with: the model, as far as the client was sent it."""
        return self.dispatcher.arrays

    @abstractmethod
    def costs_for(self, budget: int) -> dict[WorkItem, int]:
        """The cost list of a client with this budget (bytes): all that its trainer will look up."""

    def cost(self, item: WorkItem) -> int:
        """Bytes of a work item by the memory-model."""
        return self.policy.bytes(item)

    def cost_model_of(self, task: Task) -> CostModel:
        """The costs of a task's steps: those without attack in clean rounds of adversarial training."""
        return self.policy.cost_model if task.adversarial else self.policy.cost_model.unattacked

    def min_budget(self) -> int:
        """Bytes below which a client can do nothing in this round."""
        return self.policy.min_budget()

    @property
    def reference_bytes(self) -> int:
        """One reference step: the model at width 1, a FedAvg step; ratio budgets are shares of it."""
        return self.policy.cost_model.reference_bytes

    @property
    def message_bytes(self) -> int:
        """Of a message with the whole model."""
        return sum(layer_statistics(self.blueprint, unit).state_bytes for unit in self.blueprint.units())

    def budgets(self) -> list[int]:
        """Bytes that the clients have to train with, of each in each of the first rounds."""
        return [state.budget_bytes for state in self.states()]

    def states(self) -> list[DeviceState]:
        """What the clients have, each in each of the first rounds."""
        return [state for client in self.registry.members for state in self.states_of(client)]

    def states_of(self, client: int) -> list[DeviceState]:
        """What a client has in each of the first rounds; of memory that a device measured, what is sure to last."""
        message, share = self.message_bytes, FREE if client in self.registry.auto else 1
        rounds = range(1, min(self.settings.num_rounds, LOOKED_AT) + 1)
        states = [self.registry.state(client, n, self.reference_bytes, message) for n in rounds]
        return [replace(state, budget_bytes=int(share * state.budget_bytes)) for state in states]

    def trainers(self) -> dict[int, Trainer]:
        """The clients that have something to learn from."""
        members = {c: m for c, m in sorted(self.registry.members.items()) if m.examples >= MIN_EXAMPLES}
        return {c: Trainer(richest(self.states_of(c)), member.examples) for c, member in members.items()}

    def trained_rows(self, aggregated: bool) -> list[Row]:
        """What the clients trained in this round whose updates were accepted, if there is a new model."""
        accepted = [report for report in self.reports.values() if aggregated and report.status == "ok"]
        trained = {report.client: report.trained for report in accepted}
        examples = {client: member.examples for client, member in self.registry.members.items()}
        distilled = bool(trained) and self.policy.untrained == "distilled"
        return trained_rows([*part_names(self.policy.blueprint).values()], trained, examples, distilled=distilled)

    def sample(self, server_round: int, grid: Grid) -> list[int]:
        """The clients of a round: a function of (seed, round) and of who is connected, free and not excluded."""
        settings, excluded = self.settings, self.state.crash_history.excluded(server_round)
        present = [client for client in self.registry.present(grid) if self.may_be_asked(client, server_round)]
        chosen = [client for client in present if client not in excluded]
        if len(chosen) < max(1, settings.min_clients):
            chosen = present  # rather those than too few
        self.excluded = {client: excluded[client] for client in present if client not in chosen}
        return sampled(chosen, settings.clients_per_round, settings.seed, server_round) if chosen else []

    def may_be_asked(self, client: int, server_round: int) -> bool:
        """Whether a client can take part in a round: it is asked, and says what it cannot."""
        return True

    def affords(self, client: int, server_round: int, needed: int) -> bool:
        """Whether a client has so many bytes in a round."""
        state = self.registry.state(client, server_round, self.reference_bytes, self.message_bytes)
        return needed <= self.settings.allowance(state.budget_bytes)

    def require_emulated(self) -> None:
        """Raises ValueError where clients pretend to swap, and one has a memory of its own."""
        if self.policy.swaps and self.registry.auto:
            raise ValueError(
                f"{self.name} only pretends to swap here, and client {self.registry.auto[0]} has device = 'auto', a memory of "
                "its own: give it the name of a device of the fleet, or train by strategy = fedprophet with memory-model = "
                "traced"
            )

    def require_somebody(self, needed: int, doing: str) -> None:
        """Raises ValueError where no client will have so many bytes, in any of the first rounds."""
        richest = int(max(self.budgets()))
        if needed > self.settings.allowance(richest):
            raise ValueError(
                f"{self.name}: NA. {doing} needs {needed:,} bytes, and the richest client has {richest:,}: no client can take "
                "part; lower batch-size or model-width, or give clients more memory"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One task a client. Costs are traced now; messages are made when they are sent, `max-in-flight` at a time."""
        self._asked = self.ask(self.sample(server_round, grid), server_round, arrays)
        self.reports = {c: ClientReport(c, state.device, state.budget_bytes) for c, (_, state) in self._asked.items()}
        for client, report in self.reports.items():
            if (share := self.state.crash_history.share(client)) < 1:
                report.note = f"given {share:.0%} of its budget since its process died"
        tasks = {client: task for client, (task, _) in self._asked.items()}
        return self.dispatcher.configure("train", tasks, arrays, self.reports)

    def ask(
        self, clients: Iterable[int], server_round: int, arrays: ArrayRecord
    ) -> dict[int, tuple[Task, DeviceState]]:
        """The tasks of clients in a round, and what they have in it. Who has a memory of its own cannot pretend to swap."""
        states = {}
        for client in [client for client in clients if not (self.policy.swaps and client in self.registry.auto)]:
            state = self.registry.state(client, server_round, self.reference_bytes, arrays.count_bytes())
            states[client] = replace(state, budget_bytes=self._share_of(state, client))
        self.slowest = min((state.flops_per_second for state in states.values()), default=math.inf)
        return {c: (self.with_hashes(self.task(server_round, state), arrays), state) for c, state in states.items()}

    def with_hashes(self, task: Task, arrays: ArrayRecord) -> Task:
        """The task, naming its frozen units."""
        return replace(task, frozen=self.weight_cache.hashes(arrays, self.frozen_units(task)))

    def _share_of(self, state: DeviceState, client: int) -> int:
        """Bytes a client is given of its budget: all, or less since its process died, but what it needs to train at all."""
        share, budget = self.state.crash_history.share(client), state.budget_bytes
        return budget if share == 1 else max(int(share * budget), min(budget, self.min_budget_of(state)))

    def min_budget_of(self, state: DeviceState) -> int:
        """Bytes below which a client with such a device can do nothing in this round."""
        return self.min_budget()

    def delivered(self, replies: Iterable[Message]) -> None:
        """Take note of which frozen units arrived."""
        for client, message in self.weight_cache.note(replies, self.dispatcher.log):
            self._fail(message, self.dispatcher.log[client])

    def rate(self, server_round: int) -> float:
        """The learning rate of the round that begins."""
        return learning_rate(self.settings, server_round)

    def schedule(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """The rounds to come, at most those from `first` to `last`, each with its place in the schedule of learning rates.

        Asked before `begin`: a system with stages knows them in a run that goes on, where each lasts as long as it may; those
        of a new run cannot be told.
        """
        return ((server_round, server_round) for server_round in range(first, last + 1))

    def task(self, server_round: int, state: DeviceState) -> Task:
        """The task of a client that has this in a round."""
        return Task(
            experiment_id=self.experiment.experiment_id,
            round=server_round,
            state_round=server_round - 1,
            strategy=self.name,
            budget=state.budget_bytes,
            reference=self.reference_bytes,
            lr=self.rate(server_round),
            state_dir=self.experiment.state_dir,
            enforced=self.policy.enforced,
            costs=self.costs_for(state.budget_bytes),
            adversarial=self.is_adversarial(server_round),
            variant=self.policy.variant,
        )

    def is_adversarial(self, server_round: int) -> bool:
        """Whether clients train on adversarial examples in a round: after the warm-up, where system or settings ask for it."""
        return self.policy.attacks(self.settings) and server_round > self.settings.attack_warmup

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take in replies one by one. Returns (None, None) when no client trained, or fewer than `min-clients`."""
        self.mean, accepted, norms = WeightedMean(), 0, dict[str, list[float]]()
        known = self.state.norms
        for report, update, limits in compared(self._received(replies), self.settings.update_norm_limit, known):
            try:
                require_within(update.norms, limits)
                self.combine(report.client, update)
            except UpdateRejectedError as error:
                report.status, report.reason = "rejected", str(error)
                continue
            note_norms(norms, update.norms)
            accepted += 1
        if accepted < max(1, self.settings.min_clients):
            return None, None
        self.state.norms = known | {unit: [*known.get(unit, []), *new][-NORMS_KEPT:] for unit, new in norms.items()}
        return self.finish(), self._train_metrics()

    def _received(self, replies: Iterable[Message]) -> Iterator[tuple[ClientReport, CheckedUpdate]]:
        factor = self.settings.update_norm_limit
        limits, maximum = (
            norm_limits(self.state.norms, factor),
            cache(partial(first_limit, factor, self.dispatcher.arrays)),
        )
        for message in replies:
            client = self.registry.client_of(message.metadata.src_node_id)
            if client is None or client not in self.reports:
                continue
            report = self.reports[client]
            if (update := self.receive(message, report, limits, maximum)) is not None:
                yield report, update

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add an update, weighted by its number of examples."""
        self.mean.add(update.arrays, update.examples)

    def finish(self) -> ArrayRecord:
        """The new model; arrays that no client trained stay the very same objects."""
        return updated(self.dispatcher.arrays, self.mean)

    def receive(
        self, message: Message, report: ClientReport, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate | None:
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
                report.status, report.reason = outcome.status, outcome.reason[:LONGEST]
                report.needed, report.allowed = outcome.needed, outcome.allowed
                self.weight_cache.forget(report.client, outcome.missing)
                return None
            arrays = message.content.array_records["arrays"]
            update = self.check(arrays, metrics, self._asked[report.client][0], limits, maximum)
            if report.examples > (known := self.registry.members[report.client].examples):
                raise UpdateRejectedError(f"num-examples is {report.examples}: the client has {known}")
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            report.status = "rejected"
            reason = str(error) if isinstance(error, UpdateRejectedError) else f"{type(error).__name__}: {error}"
            report.reason = reason[:LONGEST]
            return None
        report.status, report.reason = "ok", ""
        self.state.crash_history.answered(report.client)
        return update

    def check(
        self, arrays: ArrayRecord, metrics: dict[str, Any], task: Task, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate:
        """An update, if it may enter the model. Raises UpdateRejectedError."""
        previous = self.untrained(task)
        update = check_update(arrays, metrics.get("num-examples"), previous, spec_of(previous), limits, maximum)
        sent = self.sent_units(task)
        if sent is not None and (strange := [name for name in update.arrays if unit_of(name) not in sent]):
            raise UpdateRejectedError(f"array {strange[0]!r} was not sent to be trained")
        return update

    def _fail(self, message: Message, report: ClientReport) -> None:
        report.status = status_of(message.error)
        report.reason = f"error {message.error.code}: {message.error.reason}"[:LONGEST]
        self.note_error(report.client, self.dispatcher.tasks[report.client].round, report.status)

    def note_error(self, client: int, server_round: int, status: str) -> None:
        """What a client's error in a round means for later ones; also of an error that comes late."""
        if status == "crashed":
            self.state.crash_history.crashed(client, server_round, self.policy.cuts or self.policy.adapts)

    def _note(self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any]) -> None:
        report.add_note(outcome.note)
        report.read(metrics)
        if "memory-available" in metrics:
            self.registry.note_free_memory(report.client, int(metrics["memory-available"]))
        task, state = self._asked[report.client]
        report.simulated_seconds = simulated_seconds(state, 0, report.bytes_down, report.bytes_up)
        if outcome.status == "ok":
            seen, executed = [int(n) for n in metrics["seen"]], self.executed(task, metrics)
            report.account(outcome.done, seen, task, state, self.policy, self.cost_model_of(task), executed)
            report.trained = learned_names(self.policy, outcome.done, seen)

    def _train_metrics(self) -> MetricRecord:
        trained = [r for r in self.reports.values() if r.status == "ok"]
        total = sum(r.examples for r in trained)
        return MetricRecord({"train-loss": sum((r.train_loss or 0.0) * r.examples for r in trained) / total})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Personal evaluation; or every `client-evaluation-every`-th round the round's clients evaluate the new model."""
        return self.dispatcher.configure("evaluate", self.evaluation_tasks(server_round, arrays, grid), arrays)

    def evaluation_tasks(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> dict[int, Task]:
        """Who evaluates the new model, and by which task."""
        every = self.settings.client_evaluation_every
        if self.personal:
            due = self.settings.evaluation_due(server_round)
            return self.personal_tasks(server_round, arrays, grid) if due else {}
        if not every or server_round % every or not self.measurable:
            return {}
        return {
            client: self.after_training(task) for client, (task, _) in self._asked.items() if self.reachable(client)
        }

    @property
    def personal(self) -> bool:
        """Whether clients evaluate on their own parts of the test split."""
        return self.settings.evaluation == "personal"

    def personal_tasks(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> dict[int, Task]:
        """The tasks of all clients, or of `evaluation-clients` that are drawn, but for those that were silent in the round."""
        settings = self.settings
        chosen = sampled(self.registry.present(grid), settings.evaluation_clients, settings.seed + 1, server_round)
        tasks = {
            client: task for client, (task, _) in self._asked.items() if client in chosen and self.reachable(client)
        }
        if others := [client for client in chosen if client not in self._asked]:
            tasks |= {client: task for client, (task, _) in self.ask(others, server_round, arrays).items()}
        return {client: replace(self.after_training(task), personal=True) for client, task in sorted(tasks.items())}

    def reachable(self, client: int) -> bool:
        """Whether a client of the round is worth asking again in the same round."""
        return client not in self.weight_cache.unreached and self.reports[client].status not in SILENT

    def after_training(self, task: Task) -> Task:
        """Training of this round may have left a state: it is the newest that an evaluation may use, and must keep."""
        return replace(task, state_round=task.round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean over all validation examples of the clients that answered; of personal models over clients, each alike."""
        self.evaluated = 0
        total, sums = 0, dict.fromkeys(self.evaluation_keys, 0.0)
        for client, metrics in self.dispatcher.answers(
            replies, lambda c, status: self.note_error(c, server_round, status)
        ):
            if client in self.reports:
                self.reports[client].evaluation_peak = self.dispatcher.log[client].evaluation_peak
            try:
                member = self.registry.members[client]
                maximum = member.test if self.personal else member.validation
                examples, values = verdict(metrics, tuple(sums), maximum)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                self.dispatcher.reject(client, str(error)[:LONGEST])
                continue
            self.note_answer(client, metrics)
            weight = min(examples, 1) if self.personal else examples
            for key, value in values.items():
                sums[key] += value * weight
            total += weight
            self.evaluated += examples > 0
        return MetricRecord({key: sums[key] / total for key in sums}) if total else None

    def note_answer(self, client: int, metrics: dict[str, Any]) -> None:
        """What else a client says that evaluated."""

    def executed(self, task: Task, metrics: dict[str, Any]) -> float:
        """The share of its pieces' FLOPs that a client executed. Raises UpdateRejectedError."""
        return 1.0

    def configure_query(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> Iterable[Message] | None:
        """Questions to clients that have to be answered before the round; None = there are none."""
        return None

    def aggregate_query(self, server_round: int, replies: Iterable[Message]) -> bool:
        """Take in the answers; whether the round can begin."""
        return True

    def conclude(self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> ArrayRecord:
        """What the clients' evaluation means for the rounds to come; the model that they go on from."""
        return arrays

    def final(self, arrays: ArrayRecord) -> ArrayRecord:
        """The model of the run, which may be an earlier one than that of the last round."""
        return arrays

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        return False

    @property
    def stage(self) -> str:
        """The name of the stage; empty where there are none."""
        return ""

    def details(self) -> dict[str, Any]:
        """What the record of a round says of this system alone, as JSON values."""
        return {}

    def trained_model(self) -> tuple[Piece, str]:
        """The atoms and the head that make the model of the round: all of it, or what of it has been trained."""
        return tuple(range(len(self.blueprint.atoms))), "head"

    @property
    def measurable(self) -> bool:
        """Whether the model of the round can be evaluated."""
        return True

    def evaluation_details(self) -> dict[str, Any]:
        """What the records say of how the model is evaluated, as JSON values."""
        return {}

    def prepare(self, piece: PieceModel) -> None:
        """What is done with a model that has new weights, before it is evaluated: nothing."""

    def model_details(self) -> dict[str, Any]:
        """What a trained model's file says of it besides its atoms and head, as JSON values."""
        return {}

    def final_model(self) -> tuple[Piece, str]:
        """The atoms and the head that make the model of the run, where it ends now."""
        return self.trained_model()

    def summary(self) -> None:
        """Nothing: the launcher prints the settings."""
