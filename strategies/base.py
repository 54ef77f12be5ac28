"""What all strategies have in common: tasks under budgets, checked updates, the running average, what records say of it.

Flower's `Strategy` signatures are kept. `aggregate_train` takes an iterable of replies and works on them as they arrive. A
method overrides what it does differently: how it cuts a model, which costs a task carries, how replies are combined.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
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
    spec_of,
    updated,
)
from piecework.federation.dispatcher import Dispatcher
from piecework.federation.reports import ClientReport
from piecework.federation.weight_cache import WeightCache, without_units
from piecework.models.cascade import initial_state, unit_of
from piecework.models.partition import Piece
from piecework.models.work_item import WorkItem
from piecework.planning.costs import cost_model_for
from piecework.planning.coverage import learned_names
from piecework.planning.partition_policy import PartitionPolicy
from piecework.strategies.client_evaluation import ClientEvaluation
from piecework.strategies.cohort import Cohort
from piecework.strategies.resources import ClientResources
from piecework.strategies.state import Experiment, Progress, StrategyState
from piecework.strategies.update_gate import UpdateGate
from piecework.training.loop import PieceModel
from piecework.training.messages import Outcome, Task
from piecework.training.settings import learning_rate


class PieceStrategy(Strategy):
    """Base of all strategies here. `policy_class` says how the method cuts a model.

    `state` and the arrays of `kept` are what a checkpoint holds besides the model; `piece_class` is how the model is run.
    `measures` tells whether clients hold the model that is served, and can measure its batch norms. `personal` tells whether
    clients evaluate, each on its own part of the test split. `prepare` gets a model with new weights before it is evaluated.

    `evaluation_details` are what the records say of how the model is evaluated. `model_details` are what a trained model's file
    says of it besides its atoms and head. Both are JSON values.

    Four helpers do what all systems do alike. `resources` knows what clients have. `cohort` draws those of a round. `gate`
    lets their updates into the model. `evaluation` has clients evaluate it.
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
        steps = self.settings.attack.steps if self.policy_class.attacks(self.settings) else 0
        self.policy = self.policy_class(
            experiment.blueprint, cost_model_for(self.settings, experiment.reference, steps), self.settings
        )
        self.policy.require_model()
        self.blueprint = self.policy.model
        self.state = self.state_class()
        self.kept = ArrayRecord()
        self.personal = self.settings.evaluation.mode == "personal"
        self.evaluation_details: dict[str, Any] = {}
        self.model_details: dict[str, Any] = {}
        self.prepare: Callable[[PieceModel], None] = lambda _: None
        self.reports: dict[int, ClientReport] = {}
        self.slowest = math.inf
        self._asked: dict[int, tuple[Task, DeviceState]] = {}
        self.weight_cache = WeightCache(self.settings, self.registry, experiment.experiment_id, experiment.state_dir)
        self.dispatcher = Dispatcher(
            self.registry, self.weight_cache, self.settings.messages.round_timeout, self.travelling
        )
        self.resources, self.cohort = ClientResources(self), Cohort(self)
        self.gate, self.evaluation = UpdateGate(self, self._note), ClientEvaluation(self)

    def initial(self) -> dict[str, np.ndarray]:
        """The arrays of the global model before the first round."""
        state = initial_state(self.blueprint, self.settings.seed, units=self.blueprint.units(exits=self.policy.exits))
        return {name: value.numpy() for name, value in state}

    def begin(self) -> None:
        """Called when the clients are known, before the first round and after each resume. Raises ValueError."""

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
    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """Return the costs of all work items that a client may look up whose training may take `allowed` bytes."""

    def min_budget(self, state: DeviceState | None = None) -> int:
        """Bytes below which a client can do nothing in this round: any client, or one with such a device."""
        return self.policy.min_budget()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One task a client. Costs are traced now; messages are made when they are sent, `messages.max-in-flight` at a time."""
        self._asked = self.ask(self.cohort.sample(server_round, grid), server_round, arrays)
        self.reports = {c: ClientReport(c, state.device, state.budget_bytes) for c, (_, state) in self._asked.items()}
        for client, report in self.reports.items():
            if (fraction := self.state.crash_history.fraction(client)) < 1:
                report.note = f"given {fraction:.0%} of its budget since its process died"
        tasks = {client: task for client, (task, _) in self._asked.items()}
        return self.dispatcher.configure("train", tasks, arrays, self.reports)

    def ask(
        self, clients: Iterable[int], server_round: int, arrays: ArrayRecord
    ) -> dict[int, tuple[Task, DeviceState]]:
        """The tasks of clients in a round, and what they have in it. Who has a memory of its own cannot pretend to swap."""
        states = {}
        for client in [client for client in clients if not (self.policy.swaps and client in self.registry.auto)]:
            state = self.registry.state(client, server_round, self.resources.reference_bytes, arrays.count_bytes())
            states[client] = replace(state, budget_bytes=self._reduced_budget(state, client))
        self.slowest = min((state.flops_per_second for state in states.values()), default=math.inf)
        tasks = {client: self.task(server_round, state) for client, state in states.items()}
        return {c: (self.weight_cache.named(t, arrays, self.frozen_units(t)), states[c]) for c, t in tasks.items()}

    def _reduced_budget(self, state: DeviceState, client: int) -> int:
        """Bytes a client is given of its budget: all, or less since its process died, but what it needs to train at all."""
        fraction, budget = self.state.crash_history.fraction(client), state.budget_bytes
        return budget if fraction == 1 else max(int(fraction * budget), min(budget, self.min_budget(state)))

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
            reference=self.resources.reference_bytes,
            lr=self.rate(server_round),
            state_dir=self.experiment.state_dir,
            enforced=self.policy.enforced,
            costs=self.costs_for(state.allowed_bytes),
            adversarial=self.policy.attacks(self.settings) and server_round > self.settings.attack.warmup,
            variant=self.policy.variant,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take in replies one by one. Returns (None, None) when no client trained, or fewer than `faults.min-clients`."""
        self.mean = WeightedMean()
        return (self.finish(), self._train_metrics()) if self.gate.admit(replies) else (None, None)

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add an update, weighted by its number of examples."""
        self.mean.add(update.arrays, update.examples)

    def finish(self) -> ArrayRecord:
        """The new model; arrays that no client trained stay the very same objects."""
        return updated(self.dispatcher.arrays, self.mean)

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

    def _note(self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any]) -> None:
        report.add_note(outcome.note)
        report.read(metrics)
        if "memory-available" in metrics:
            self.registry.note_free_memory(report.client, int(metrics["memory-available"]))
        task, state = self._asked[report.client]
        report.simulated_seconds = simulated_seconds(state, 0, report.bytes_down, report.bytes_up)
        if outcome.status == "ok":
            seen, executed = [int(n) for n in metrics["seen"]], self._executed(task, metrics)
            # clean rounds of adversarial training have steps without attack
            cost_model = self.policy.cost_model if task.adversarial else self.policy.cost_model.unattacked
            report.account(outcome.done, seen, task, state, self.policy, cost_model, executed)
            report.trained = learned_names(self.policy, outcome.done, seen)

    def _executed(self, task: Task, metrics: dict[str, Any]) -> float:
        """The fraction of its pieces' FLOPs that a client executed. Raises UpdateRejectedError."""
        return 1.0

    def _train_metrics(self) -> MetricRecord:
        trained = [r for r in self.reports.values() if r.status == "ok"]
        total = sum(r.examples for r in trained)
        return MetricRecord({"train-loss": sum((r.train_loss or 0.0) * r.examples for r in trained) / total})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Personal evaluation; or every `evaluation.on-clients-every`-th round the round's clients evaluate the new model."""
        return self.dispatcher.configure("evaluate", self.evaluation_tasks(server_round, arrays, grid), arrays)

    def evaluation_tasks(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> dict[int, Task]:
        """Who evaluates the new model, and by which task."""
        asked = {client: task for client, (task, _) in self._asked.items()}
        return self.evaluation.tasks(server_round, arrays, grid, asked)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean over all validation examples of the clients that answered; of personal models over clients, each alike."""
        return self.evaluation.aggregate(server_round, replies)

    @property
    def progress(self) -> Progress:
        """How far the run is; without stages it goes on to its last round."""
        return Progress()

    def conclude(self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> ArrayRecord:
        """What the clients' evaluation means for the rounds to come; the model that they go on from."""
        return arrays

    def details(self) -> dict[str, Any]:
        """What the record of a round says of this system alone, as JSON values."""
        return {}

    def trained_model(self) -> tuple[Piece, str]:
        """The atoms and the head that make the model of the round: all of it, or what of it has been trained."""
        return tuple(range(len(self.blueprint.atoms))), "head"

    def summary(self) -> None:
        """Nothing: the launcher prints the settings."""
