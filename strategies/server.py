"""The server's side that all methods share: a method as one of Flower's strategies."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from piecework.device_profiles.clock import simulated_seconds
from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import CheckedUpdate, Norms
from piecework.federation.dispatcher import Dispatcher
from piecework.federation.public_data import public_examples
from piecework.federation.reports import ClientReport
from piecework.federation.weight_cache import WeightCache, without_units
from piecework.planning.assignment import Assignment, Context, least_bytes
from piecework.planning.costs import cost_model_for
from piecework.planning.coverage import learned_names
from piecework.planning.cut import trains_adversarially
from piecework.strategies.client_evaluation import ClientEvaluation
from piecework.strategies.cohort import Cohort
from piecework.strategies.late_answers import LateAnswers
from piecework.strategies.method import Assigned, Method, Received, Round, StagedMethod
from piecework.strategies.resources import ClientResources
from piecework.strategies.state import Experiment
from piecework.strategies.update_gate import UpdateGate
from piecework.training.answers import Outcome
from piecework.training.messages import Task
from piecework.training.settings import learning_rate


class MethodServer(Strategy):
    """Runs a method: draws clients, sends their assignments as tasks, checks answers, and has the method combine them.

    The signatures are those of Flower's `Strategy`, except that `aggregate_train` takes an iterable of replies and processes
    them as they arrive.

    Six helpers do the work. `resources` knows the clients' memory, speed and examples. `cohort` draws the clients of a round.
    `gate` checks their updates before they enter the model, and `late` holds those that come too late for their round.
    `evaluation` has clients evaluate it. `serving` makes the model that is evaluated and saved, and those that devices deploy.
    """

    def __init__(self, experiment: Experiment, method_class: type[Method]) -> None:
        self.experiment, self.settings, self.registry = experiment, experiment.settings, experiment.registry
        self.attacks = trains_adversarially(method_class.can, self.settings)
        costs = cost_model_for(self.settings, experiment.reference, self.settings.attack.steps if self.attacks else 0)
        cut = method_class.make_cut(experiment.blueprint, costs, self.settings)
        cut.require_model()
        self.method = method_class(cut)
        self.method.require_settings()
        if self.method.needs_public_data:
            self.method.public = public_examples(self.settings)
        self.enforced = self.settings.memory.enforced and not cut.swaps
        self.slowest = math.inf
        self.round = Round(0, ArrayRecord())
        self.weight_cache = WeightCache(self.settings, self.registry, experiment.experiment_id, experiment.state_dir)
        self.dispatcher = Dispatcher(self.registry, self.weight_cache, self.settings.messages.round_timeout)
        self.resources, self.cohort = ClientResources(self), Cohort(self)
        self.gate, self.evaluation = UpdateGate(self, self._note), ClientEvaluation(self)
        self.late, self.serving = (
            LateAnswers(self, self._note_task),
            method_class.serving_class(self.method, self.resources),
        )

    def context(
        self, client: int, state: DeviceState, server_round: int, arrays: ArrayRecord | None = None, place: int = 0
    ) -> Context:
        """Return what a client's assignment depends on."""
        return Context(
            state,
            self.slowest,
            stage=self.method.progress.key,
            round=server_round,
            client=client,
            place=place,
            clients=len(self.registry.members),
            measures_itself=client in self.registry.auto,
            measured=bool(self.registry.auto),
            arrays=arrays,
        )

    def may_be_asked(self, client: int, server_round: int) -> bool:
        """Return whether a client has the memory to take part in a round."""
        if self.method.asks == "all":
            return True
        state = self.resources.state(client, server_round)
        assignment = self.method.assign(self.context(client, state, server_round))
        able = (assignment.needed[item] <= state.allowed_bytes for item in assignment.items)
        return assignment.refusal is None and all(able)

    def assign(self, clients: Iterable[int], server_round: int, arrays: ArrayRecord) -> dict[int, Assigned]:
        """Return the assignments of clients in a round.

        If devices swap, clients that measure their own memory get none, because swapping is only simulated.
        """
        swaps, message = self.method.cut.swaps, arrays.count_bytes()
        states = {}
        for place, client in enumerate(c for c in clients if not (swaps and c in self.registry.auto)):
            state = self.registry.state(client, server_round, self.resources.reference_bytes, message)
            ctx = self.context(client, state, server_round, arrays, place)
            states[client] = replace(state, budget_bytes=self._given_budget(ctx))
        self.slowest = min((state.flops_per_second for state in states.values()), default=math.inf)
        found = {}
        for place, (client, state) in enumerate(states.items()):
            assignment = self.method.assign(self.context(client, state, server_round, arrays, place))
            task = self.weight_cache.with_frozen_hashes(
                self.task_of(assignment, server_round, state), arrays, assignment.frozen
            )
            found[client] = Assigned(assignment, task, state)
        return found

    def _given_budget(self, ctx: Context) -> int:
        """Return the budget (bytes) that a client is given: less after crashes, but enough to train if it can at all."""
        fraction, budget = self.method.state.crash_history.fraction(ctx.client), ctx.device.budget_bytes
        return (
            budget if fraction == 1 else max(int(fraction * budget), min(budget, least_bytes(self.method.assign(ctx))))
        )

    def task_of(self, assignment: Assignment, server_round: int, state: DeviceState) -> Task:
        """Return the task that carries an assignment to a client whose device has this state in the round."""
        attacked = self.attacks and server_round > self.settings.attack.warmup
        return Task(
            experiment_id=self.experiment.experiment_id,
            round=server_round,
            state_round=server_round - 1,
            strategy=self.method.name,
            budget=state.budget_bytes,
            reference=self.resources.reference_bytes,
            lr=learning_rate(self.settings, server_round) if assignment.lr is None else assignment.lr,
            state_dir=self.experiment.state_dir,
            enforced=self.enforced,
            costs=self.method.cut.costs(assignment.needed, state.allowed_bytes),
            void=assignment.discarded_rounds,
            kept_round=assignment.kept_round,
            adversarial=attacked if assignment.adversarial is None else assignment.adversarial,
            variant=assignment.variant or self.method.cut.variant,
            own=assignment.config.to_values() if assignment.config is not None else {},
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients and return one message for each.

        Costs are traced now. Messages are built when they are sent, `messages.max-in-flight` at a time.
        """
        self.round = Round(server_round, arrays)
        self.method.open(self.round)
        assigned = self.assign(self.cohort.sample(server_round, grid), server_round, arrays)
        self.round.assigned = assigned
        self.round.reports = {c: ClientReport(c, a.device.device, a.device.budget_bytes) for c, a in assigned.items()}
        for client, report in self.round.reports.items():
            if (fraction := self.method.state.crash_history.fraction(client)) < 1:
                report.note = f"given {fraction:.0%} of its budget since its process died"
        return self.send("train", assigned, arrays, self.round.reports)

    def send(
        self,
        kind: str,
        assigned: Mapping[int, Assigned],
        arrays: ArrayRecord,
        reports: dict[int, ClientReport] | None = None,
    ) -> Iterable[Message]:
        """Return the messages that carry assignments of a kind, with the arrays of the model that each sends."""

        def sent(client: int, _: Task, model: ArrayRecord) -> ArrayRecord:
            assignment = assigned[client].assignment
            return without_units(assignment.sends(model), assignment.frozen)

        tasks = {client: each.task for client, each in assigned.items()}
        return self.dispatcher.configure(kind, tasks, arrays, sent, reports)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate replies one by one. Returns (None, None) if no client trained, or fewer than `faults.min-clients`."""
        if not self.gate.admit(server_round, replies):
            return None, None
        arrays, name = self.method.finish(self.round), self.round.loss_name
        self.round.trained, self.round.arrays = True, arrays  # the model before may be freed
        loss = {name: self._train_loss()} if name else {}
        return arrays, MetricRecord({**loss, **self.round.metrics})

    def combine(self, client: int, update: CheckedUpdate) -> None:
        """Have the method add a client's update to the round. Raises UpdateRejectedError."""
        self.method.combine(self.round, client, update)

    def check_answer(
        self, client: int, arrays: ArrayRecord, metrics: dict[str, Any], limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate:
        """Return a client's update if it may enter the model. Raises UpdateRejectedError."""
        assignment = self.round.assigned[client].assignment
        return self.method.check(Received(arrays, metrics, assignment, self.round.arrays, limits, maximum))

    def asked_of(self, client: int) -> tuple[Task, DeviceState]:
        """Return the training task of a client of the round, and its device state."""
        return self.round.assigned[client].task, self.round.assigned[client].device

    def _note(self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any]) -> None:
        self._note_task(report, outcome, metrics, *self.asked_of(report.client))

    def _note_task(
        self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any], task: Task, state: DeviceState
    ) -> None:
        report.add_note(outcome.note)
        report.read(metrics)
        if "memory-available" in metrics:
            self.registry.note_free_memory(report.client, int(metrics["memory-available"]))
        report.simulated_seconds = simulated_seconds(state, 0, report.bytes_down, report.bytes_up)
        if outcome.status == "ok":
            self._note_answer(report, outcome, metrics, task, state)

    def _train_loss(self) -> float:
        """Return the mean training loss over the clients' examples."""
        trained = [r for r in self.round.reports.values() if r.status == "ok"]
        return sum((r.train_loss or 0.0) * r.examples for r in trained) / sum(r.examples for r in trained)

    def _note_answer(
        self, report: ClientReport, outcome: Outcome, metrics: dict[str, Any], task: Task, state: DeviceState
    ) -> None:
        """Fill in the report of a client that did its task."""
        reading = self.method.read(self.round, report, metrics)
        cut, seen = self.method.cut, metrics["seen"]
        # Clean rounds of adversarial training cost steps without an attack.
        cost_model = cut.cost_model if task.adversarial else cut.cost_model.unattacked
        report.account(outcome.done, seen, task, state, cut, cost_model, reading.executed)
        if reading.counted_flops is not None:
            report.counted_flops = reading.counted_flops
        report.trained = learned_names(cut, outcome.done, seen)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the clients that evaluate the new model."""
        return self.send("evaluate", self.evaluation.assign(server_round, arrays, grid), arrays)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean metrics over all clients' examples, or for personal evaluation over clients; None without examples."""
        found = self.evaluation.aggregate(server_round, replies)
        self.round.answers, self.round.evaluation = self.evaluation.answers, found
        return found

    def rate(self, server_round: int) -> float:
        """Return the learning rate of the round's tasks, also if nobody is asked."""
        if self.round.assigned:
            return next(each.task.lr for each in self.round.assigned.values())
        lr = self.method.assign(self.context(0, self.resources.richest, server_round)).lr
        return learning_rate(self.settings, server_round) if lr is None else lr

    def min_budget(self, server_round: int) -> int:
        """Return the bytes below which the richest client can do nothing in a round."""
        return least_bytes(self.method.assign(self.context(0, self.resources.richest, server_round)))

    def frozen_units(self, server_round: int) -> tuple[str, ...]:
        """Return the units that no client trains any more in this stage."""
        if not self.method.can.stages:
            return ()
        return self.method.assign(self.context(0, self.resources.richest, server_round)).frozen

    def conclude(self, arrays: ArrayRecord) -> ArrayRecord:
        """End the round after its evaluation by clients, and return the model for the next round."""
        return self.method.conclude(self.round, arrays) if isinstance(self.method, StagedMethod) else arrays

    def summary(self) -> None:
        """Do nothing, because the launcher prints the settings."""
