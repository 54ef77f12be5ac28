"""The base of all strategies: tasks under budgets, checked updates, the running average, and values for the records.

The signatures are those of Flower's `Strategy`, except that `aggregate_train` takes an iterable of replies and processes them
as they arrive. A strategy overrides the methods in which it differs: how it cuts a model, which costs a task carries, and how
updates are combined.
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
from piecework.strategies.late_answers import LateAnswers
from piecework.strategies.resources import ClientResources
from piecework.strategies.serving import Serving
from piecework.strategies.state import Experiment, Progress, StrategyState
from piecework.strategies.update_gate import UpdateGate
from piecework.training.answers import Outcome
from piecework.training.loop import PieceModel
from piecework.training.messages import Task
from piecework.training.settings import learning_rate


class PieceStrategy(Strategy):
    """Base of all strategies. `policy_class` is the partition policy, and `piece_class` the class that runs the model.

    A checkpoint holds the model, `state` and the arrays in `kept`. `measures`: clients hold the served model, so they can
    measure its batch norms. `personal`: clients evaluate the model, each on its own part of the test split. The server calls
    `prepare` with each model before evaluating it. `evaluation_keys` are the metrics that clients report in an evaluation.

    `accepts_late`: the new model is the mean of what clients trained of one model, so that late answers can enter it.

    `evaluation_details` describe the evaluation in the records. `model_details` describe a trained model in its file, besides
    its atoms and head. Both are JSON values.

    Six helpers do the work that all strategies share. `resources` knows the clients' memory, speed and examples. `cohort`
    draws the clients of a round. `gate` checks their updates before they enter the model, and `late` holds those that come too
    late for their round. `evaluation` has clients evaluate it.
    `serving` makes the model that is evaluated and saved, and those that devices deploy.
    """

    name: ClassVar[str]
    policy_class: ClassVar[type[PartitionPolicy]]
    state_class: ClassVar[type[StrategyState]] = StrategyState
    evaluation_class: ClassVar[type[ClientEvaluation]] = ClientEvaluation
    serving_class: ClassVar[type[Serving]] = Serving
    piece_class: type[PieceModel] = PieceModel
    measures: ClassVar[bool] = True
    accepts_late: ClassVar[bool] = False
    evaluation_keys: ClassVar[tuple[str, ...]] = ("val-loss", "val-accuracy")

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.settings = experiment, experiment.settings
        self.registry = experiment.registry
        steps = self.settings.attack.steps if self.policy_class.attacks(self.settings) else 0
        self.policy = self.policy_class(
            experiment.blueprint, cost_model_for(self.settings, experiment.reference, steps), self.settings
        )
        self.policy.require_model()
        self.enforced = self.settings.memory.enforced and not self.policy.swaps
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
        self.gate, self.evaluation = UpdateGate(self, self._note), self.evaluation_class(self)
        self.late, self.serving = LateAnswers(self, self._note_task), self.serving_class(self)

    def initial(self) -> dict[str, np.ndarray]:
        """Return the arrays of the global model before the first round."""
        state = initial_state(self.blueprint, self.settings.seed, units=self.blueprint.units(exits=self.policy.exits))
        return {name: value.numpy() for name, value in state}

    def begin(self) -> None:
        """Set up what depends on the clients: before the first round, and after each resume.

        Raises ValueError if the strategy cannot run with these clients.
        """

    def frozen_units(self, task: Task) -> list[str]:
        """Return the units that a task reads and that no client trains any more. They are sent once, ahead of the task."""
        return []

    def sent_units(self, task: Task) -> set[str] | None:
        """Return the other units that a task reads and may train, or None for all of them."""
        return None

    def travelling(self, task: Task, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays of a model that are sent with a task."""
        units = self.sent_units(task)
        if units is None:
            return without_units(arrays, task.frozen)
        return ArrayRecord({name: array for name, array in arrays.items() if unit_of(name) in units})

    def untrained(self, task: Task) -> ArrayRecord:
        """Return the arrays with which a client's update is compared, by default those of the round's model."""
        return self.dispatcher.arrays

    @abstractmethod
    def costs_for(self, allowed: int) -> dict[WorkItem, int]:
        """Return the work items that a client may look up, if its training may take `allowed` bytes.

        Each is given with the bytes that it needs at least.
        """

    def min_budget(self, state: DeviceState | None = None) -> int:
        """Return the bytes below which a client can train nothing in this round: any client, or one with this device state."""
        return self.policy.min_budget()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients and return one message for each.

        Costs are traced now. Messages are built when they are sent, `messages.max-in-flight` at a time.
        """
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
        """Return the tasks of clients in a round, each with the client's device state.

        If devices swap, clients that measure their own memory get no task, because swapping is only simulated.
        """
        states = {}
        for client in [client for client in clients if not (self.policy.swaps and client in self.registry.auto)]:
            state = self.registry.state(client, server_round, self.resources.reference_bytes, arrays.count_bytes())
            states[client] = replace(state, budget_bytes=self._reduced_budget(state, client))
        self.slowest = min((state.flops_per_second for state in states.values()), default=math.inf)
        tasks = {client: self.task(server_round, state) for client, state in states.items()}
        return {
            c: (self.weight_cache.with_frozen_hashes(t, arrays, self.frozen_units(t)), states[c])
            for c, t in tasks.items()
        }

    def _reduced_budget(self, state: DeviceState, client: int) -> int:
        """Return the budget (bytes) that a client is given: less after crashes, but enough to train if it can at all."""
        fraction, budget = self.state.crash_history.fraction(client), state.budget_bytes
        return budget if fraction == 1 else max(int(fraction * budget), min(budget, self.min_budget(state)))

    def rate(self, server_round: int) -> float:
        """Return the learning rate of a round, from 1."""
        return learning_rate(self.settings, server_round)

    def schedule(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Return pairs of a round from `first` to `last` and its position in the learning-rate schedule.

        This is called before `begin`. A strategy with stages counts each remaining stage at its maximum length in a resumed
        run, and cannot know the rounds of a new run.
        """
        return ((server_round, server_round) for server_round in range(first, last + 1))

    def task(self, server_round: int, state: DeviceState) -> Task:
        """Return the task of a client whose device has this state in the round."""
        return Task(
            experiment_id=self.experiment.experiment_id,
            round=server_round,
            state_round=server_round - 1,
            strategy=self.name,
            budget=state.budget_bytes,
            reference=self.resources.reference_bytes,
            lr=self.rate(server_round),
            state_dir=self.experiment.state_dir,
            enforced=self.enforced,
            costs=self.policy.costs(self.costs_for(state.allowed_bytes), state.allowed_bytes),
            adversarial=self.policy.attacks(self.settings) and server_round > self.settings.attack.warmup,
            variant=self.policy.variant,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate replies one by one. Returns (None, None) if no client trained, or fewer than `faults.min-clients`."""
        self.mean = WeightedMean()
        return (self.finish(), self._train_metrics()) if self.gate.admit(server_round, replies) else (None, None)

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Add a client's update to the mean, weighted by its number of examples. Raises UpdateRejectedError."""
        self.mean.add(update.arrays, update.examples)

    def finish(self) -> ArrayRecord:
        """Return the new model. Arrays that no client trained stay the same objects."""
        return updated(self.dispatcher.arrays, self.mean)

    def check(
        self, arrays: ArrayRecord, metrics: dict[str, Any], task: Task, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate:
        """Return the update if it may enter the model (`limits`, `maximum`: see check_update). Raises UpdateRejectedError."""
        previous = self.untrained(task)
        update = check_update(arrays, metrics.get("num-examples"), previous, spec_of(previous), limits, maximum)
        sent = self.sent_units(task)
        if sent is not None and (strange := [name for name in update.arrays if unit_of(name) not in sent]):
            raise UpdateRejectedError(f"array {strange[0]!r} was not sent for training")
        return update

    def asked_of(self, client: int) -> tuple[Task, DeviceState]:
        """Return the training task of a client of the round, and its device state."""
        return self._asked[client]

    def _note(self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any]) -> None:
        self._note_task(report, outcome, metrics, *self._asked[report.client])

    def _note_task(
        self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any], task: Task, state: DeviceState
    ) -> None:
        report.add_note(outcome.note)
        report.read(metrics)
        if "memory-available" in metrics:
            self.registry.note_free_memory(report.client, int(metrics["memory-available"]))
        report.simulated_seconds = simulated_seconds(state, 0, report.bytes_down, report.bytes_up)
        if outcome.status == "ok":
            seen, executed = metrics["seen"], self._executed(task, metrics)
            # Clean rounds of adversarial training cost steps without an attack.
            cost_model = self.policy.cost_model if task.adversarial else self.policy.cost_model.unattacked
            report.account(outcome.done, seen, task, state, self.policy, cost_model, executed)
            report.trained = learned_names(self.policy, outcome.done, seen)

    def _executed(self, task: Task, metrics: dict[str, Any]) -> float:
        """Return the fraction of its work items' FLOPs that a client executed. Raises UpdateRejectedError if it is invalid."""
        return 1.0

    def _train_metrics(self) -> MetricRecord:
        trained = [r for r in self.reports.values() if r.status == "ok"]
        total = sum(r.examples for r in trained)
        return MetricRecord({"train-loss": sum((r.train_loss or 0.0) * r.examples for r in trained) / total})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of personal evaluation, or every `evaluation.on-clients-every` rounds to the round's clients."""
        asked = {client: task for client, (task, _) in self._asked.items()}
        tasks = self.evaluation.tasks(server_round, arrays, grid, asked)
        return self.dispatcher.configure("evaluate", tasks, arrays)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean metrics over all clients' examples, or for personal evaluation over clients; None without examples."""
        return self.evaluation.aggregate(server_round, replies)

    @property
    def progress(self) -> Progress:
        """The progress of the run; without stages, a run is never finished before its last round."""
        return Progress()

    def conclude(self, server_round: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> ArrayRecord:
        """End the round after its evaluation by clients (`metrics`), and return the model for the next round."""
        return arrays

    def details(self) -> dict[str, Any]:
        """Return the strategy's own entries of a round's record, as JSON values."""
        return {}

    def trained_model(self) -> tuple[Piece, str]:
        """Return the atoms and the head of the round's model: all, or those of the part that is trained so far."""
        return tuple(range(len(self.blueprint.atoms))), "head"

    def summary(self) -> None:
        """Do nothing, because the launcher prints the settings."""
