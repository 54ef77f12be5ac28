"""The server's side that all methods share: a method as one of Flower's strategies."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from piecework.device_profiles.profile import DeviceState
from piecework.federation.dispatcher import Dispatcher
from piecework.federation.faults import UNRESPONSIVE_STATUSES
from piecework.federation.private_mean import PrivateMean
from piecework.federation.public_data import public_examples
from piecework.federation.reports import ClientReport, verdict
from piecework.federation.weight_cache import WeightCache
from piecework.planning.assignment import Assignment, Context, least_bytes
from piecework.planning.costs import cost_model_for
from piecework.planning.cut import trains_adversarially
from piecework.planning.page_plan import speed_of
from piecework.strategies.client_evaluation import Verdict, choose_evaluators, mean_verdict
from piecework.strategies.cohort import draw_clients
from piecework.strategies.late_answers import LateAnswers
from piecework.strategies.method import Assigned, Method, Round, StagedMethod
from piecework.strategies.private_rounds import begin_privacy, find_entries
from piecework.strategies.resources import ClientResources
from piecework.strategies.state import Experiment
from piecework.strategies.update_gate import UpdateGate
from piecework.training.answers import Answer
from piecework.training.messages import Task
from piecework.training.settings import learning_rate
from piecework.training.settings.cases import is_true, require_accepted


class MethodServer(Strategy):
    """Runs a method: draws clients, sends their assignments as tasks, checks answers, and has the method combine them.

    The signatures are those of Flower's `Strategy`, except that `aggregate_train` takes an iterable of replies and processes
    them as they arrive.

    `resources` knows the clients' memory, speed and examples. `dispatcher` sends tasks and reads answers. `gate` checks updates
    before they enter the model, and `late` holds those that come too late for their round. `serving` makes the model that is
    evaluated and saved, and those that devices deploy.
    """

    def __init__(self, experiment: Experiment, method_class: type[Method]) -> None:
        self.experiment, self.settings, self.registry = experiment, experiment.settings, experiment.registry
        self.attacks = trains_adversarially(method_class.can, self.settings)
        costs = cost_model_for(self.settings, experiment.reference, self.settings.attack.steps if self.attacks else 0)
        cut = method_class.make_cut(experiment.blueprint, costs, self.settings)
        require_accepted(self.settings, method_class.refuses, method_class.name)
        cut.require_model()
        self.method = method_class(cut)
        if is_true(method_class.can.public, self.settings):
            self.method.public = public_examples(self.settings)
        self.enforced = self.settings.memory.enforced and not cut.swaps
        self.slowest = math.inf
        self.round = Round(0, ArrayRecord())
        self.weight_cache = WeightCache(self.settings, self.registry, experiment.experiment_id, experiment.state_dir)
        timeout = self.settings.messages.round_timeout
        self.dispatcher = Dispatcher(self.registry, self.weight_cache, timeout, self.note_crash)
        self.resources = ClientResources(self.method, self.registry)
        self.gate = UpdateGate(self.method, self.dispatcher)
        self.late = LateAnswers(self.gate)
        self.serving = method_class.serving_class(self.method, self.resources)
        self.privacy = begin_privacy(self.settings, self.method.cut.model, experiment.privacy)

    def note_crash(self, client: int, server_round: int) -> None:
        """Record that a client's process died at its task of a round, whether that is told in this round or late."""
        can = self.method.can
        self.method.state.crash_history.note_crash(client, server_round, can.cuts or can.adapts)

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

    def draw(self, server_round: int, grid: Grid) -> list[int]:
        """Draw the clients of a round from those that are connected, idle and able to take part."""
        able = [client for client in self.registry.present(grid) if self.may_be_asked(client, server_round)]
        crashes = self.method.state.crash_history.excluded_clients(server_round)
        if self.privacy is not None:
            return [client for client in able if self.privacy.takes_part(client)]
        drawn, self.round.excluded = draw_clients(able, crashes, self.settings, server_round)
        return drawn

    @property
    def reachable(self) -> list[int]:
        """The clients of the round that can get another task: they were not silent, and they hold their frozen units."""
        silent = {client for client, each in self.round.reports.items() if each.status in UNRESPONSIVE_STATUSES}
        return [client for client in self.round.reports if client not in silent | self.weight_cache.unreached]

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
            states[client] = replace(state, budget_bytes=self._assign_budget(ctx))
        self.slowest = min((state.flops_per_second for state in states.values()), default=math.inf)
        found = {}
        for place, (client, state) in enumerate(states.items()):
            assignment = self.method.assign(self.context(client, state, server_round, arrays, place))
            task = self.weight_cache.with_frozen_hashes(
                self.task_of(assignment, server_round, state), arrays, assignment.frozen
            )
            found[client] = Assigned(assignment, task, state)
        return found

    def _assign_budget(self, ctx: Context) -> int:
        """Return the budget (bytes) that a client is given: less after crashes, but enough to train if it can at all."""
        if self.privacy is not None:  # who holds what must not depend on what became of earlier tasks
            return ctx.device.budget_bytes
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
            strategy=self.settings.strategy,
            budget=state.budget_bytes,
            reference=self.resources.reference_bytes,
            lr=learning_rate(self.settings, server_round) if assignment.lr is None else assignment.lr,
            state_dir=self.experiment.state_dir,
            enforced=self.enforced,
            costs=self.method.cut.costs(assignment.needed, state.allowed_bytes, speed_of(state)),
            discarded_rounds=assignment.discarded_rounds,
            kept_round=assignment.kept_round,
            adversarial=attacked if assignment.adversarial is None else assignment.adversarial,
            variant=assignment.variant or self.method.cut.variant,
            config=assignment.config.to_values() if assignment.config is not None else {},
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients and return one message for each.

        Costs are traced now. Messages are built when they are sent, `messages.max-in-flight` at a time.
        """
        self.round = Round(server_round, arrays)
        if self.privacy is not None:
            self.round.new_mean = partial(PrivateMean, self.privacy)
        self.method.open(self.round)
        if self.privacy is not None:
            assigned = self.assign_privately(server_round, grid)
        else:
            assigned = self.assign(self.draw(server_round, grid), server_round, arrays)
        self.round.assigned = assigned
        self.round.reports = {c: ClientReport(c, a.device.device, a.device.budget_bytes) for c, a in assigned.items()}
        for client, report in self.round.reports.items():
            fraction = self.method.state.crash_history.fraction(client)
            if fraction < 1 and self.privacy is None:
                report.note = f"given {fraction:.0%} of its budget since its process died"
        return self.send("train", assigned, arrays, self.round.reports)

    def assign_privately(self, server_round: int, grid: Grid) -> dict[int, Assigned]:
        """Return the assignments of the clients of a private round, which depend on nobody else's presence.

        So all clients are given one, and the mean is told who holds what, before anybody is drawn.
        """
        everyone = self.assign(range(self.settings.clients), server_round, self.round.arrays)
        found = find_entries(self.method, everyone, self.round.arrays, enforced=self.enforced)
        self.round.entries = found.by_client
        self.round.mean.expect(found.holders)
        return {client: everyone[client] for client in self.draw(server_round, grid)}

    def send(
        self,
        kind: str,
        assigned: Mapping[int, Assigned],
        arrays: ArrayRecord,
        reports: dict[int, ClientReport] | None = None,
    ) -> Iterable[Message]:
        """Return the messages that carry assignments of a kind, with the arrays of the model that each sends."""
        tasks = {client: each.task for client, each in assigned.items()}
        sends = {client: each.assignment.sends for client, each in assigned.items()}
        return self.dispatcher.configure(kind, tasks, arrays, sends, reports)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate replies one by one. Returns (None, None) if no client trained, or fewer than `faults.min-clients`."""
        norms = self.gate.admit(self.round, replies)
        if self.privacy is not None:
            self.privacy.releases += 1
        elif norms is None:
            return None, None
        else:
            self.late.merge(self.round)
            self.method.state.note_norms(norms)
        arrays, name = self.method.finish(self.round), "" if self.privacy is not None else self.round.loss_name
        self.round.trained, self.round.arrays = True, arrays  # the model before may be freed
        loss = {name: self._train_loss()} if name else {}
        return arrays, MetricRecord({**loss, **self.round.metrics})

    def _train_loss(self) -> float:
        """Return the mean training loss over the clients' examples."""
        trained = [r for r in self.round.reports.values() if r.status == "ok"]
        return sum((r.train_loss or 0.0) * r.examples for r in trained) / sum(r.examples for r in trained)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the clients that evaluate the new model, after the training of the round.

        The state that this round's training left with a client may be used, and must be kept.
        """
        method, members, assigned = self.method, self.registry.members, self.round.assigned
        chosen = choose_evaluators(method, self.round, self.reachable, partial(self.registry.present, grid))
        others = [client for client in chosen if client not in assigned]
        assigned = assigned | (self.assign(others, server_round, arrays) if others else {})
        found = {}
        for client in filter(assigned.__contains__, chosen):
            each, member = assigned[client], members[client]
            ctx = self.context(client, each.device, server_round, arrays)
            examples = member.test if method.personal else member.validation
            assignment = method.assign_evaluation(ctx, each.assignment, examples)
            task = replace(
                each.task,
                state_round=server_round,
                personal=method.personal,
                config=assignment.config.to_values() if assignment.config is not None else {},
                evaluation=assignment.steps,
            )
            found[client] = Assigned(assignment, task, each.device)
        return self.send("evaluate", found, arrays)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean metrics over all clients' examples, or for personal evaluation over clients; None without examples."""
        current, keys, personal = self.round, self.method.evaluation_keys, self.method.personal
        current.answers = {}

        def read(report: ClientReport, answer: Answer) -> Verdict:
            member = self.registry.members[report.client]
            found = verdict(answer.metrics, keys, member.test if personal else member.validation)
            current.answers[report.client] = answer.metrics
            return found

        verdicts = (found for _, found in self.dispatcher.answers(replies, read))
        current.evaluation = mean_verdict(verdicts, keys, personal=personal)
        for client, report in current.reports.items():
            if (found := self.dispatcher.log.get(client)) is not None:  # also of clients that refused
                report.evaluation_peak, report.evaluation_predicted = found.measured_peak, found.predicted_peak
        return current.evaluation

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
