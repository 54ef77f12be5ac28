"""Evaluation of the round's model by clients: the choice of clients, their tasks, and the mean of their answers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from piecework.device_profiles.profile import allowance
from piecework.federation.faults import UNRESPONSIVE_STATUSES
from piecework.federation.registry import sample_clients
from piecework.federation.reports import verdict
from piecework.models.cascade import Blueprint
from piecework.models.partition import Piece
from piecework.models.variant import vary
from piecework.planning.evaluation_cost import evaluation_steps
from piecework.training.answers import Answer
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.messages import Task

if TYPE_CHECKING:
    from piecework.strategies.base import PieceStrategy


def after_training(task: Task) -> Task:
    """Return a training task for evaluation: the client state that this round's training left may be used and must be kept."""
    return replace(task, state_round=task.round)


class ClientEvaluation:
    """Has clients evaluate a strategy's model.

    `answers` are the valid metrics of each client in the last evaluation. `evaluated` is the number of these clients that had
    examples to evaluate on.
    """

    def __init__(self, strategy: "PieceStrategy") -> None:
        self.strategy = strategy
        self.answers: dict[int, dict[str, Any]] = {}
        self.evaluated = 0

    def reachable(self, client: int) -> bool:
        """Return whether a client of the round can get another task: it was not silent and holds its frozen units."""
        strategy = self.strategy
        return (
            client not in strategy.weight_cache.unreached
            and strategy.reports[client].status not in UNRESPONSIVE_STATUSES
        )

    def tasks(self, server_round: int, arrays: ArrayRecord, grid: Grid, asked: Mapping[int, Task]) -> dict[int, Task]:
        """Return the tasks of clients that evaluate the new model. `asked` are the training tasks of the round's clients."""
        strategy, settings = self.strategy, self.strategy.settings
        every = settings.evaluation.on_clients_every
        if strategy.personal:
            due = settings.evaluation_due(server_round)
            tasks = self._personal_tasks(server_round, arrays, grid, asked) if due else {}
        elif not every or server_round % every or not strategy.progress.measurable:
            return {}
        else:
            tasks = {client: after_training(task) for client, task in asked.items() if self.reachable(client)}
        return {client: replace(task, evaluation=self.steps(client, task)) for client, task in tasks.items()}

    def steps(self, client: int, task: Task) -> list[EvaluationStep]:
        """Return the ways to evaluate that a client may choose from: one atom after another, with what that takes."""
        strategy, member = self.strategy, self.strategy.registry.members[client]
        blueprint = vary(strategy.policy.blueprint, task.variant)
        allowed = allowance(task.budget, strategy.settings.memory.excess)
        examples = member.test if task.personal else member.validation
        atoms = self.atoms(blueprint, task)
        # A client that measures its memory may have less when it evaluates: the smallest step is listed too.
        limits = [allowed, *([0] if client in strategy.registry.auto else [])]
        return [
            step
            for limit in limits
            for step in evaluation_steps(strategy.policy, blueprint, atoms, "head", limit, examples)
        ]

    def atoms(self, blueprint: Blueprint, task: Task) -> Piece:
        """Return the atoms that clients evaluate with the head, by default all."""
        return tuple(range(len(blueprint.atoms)))

    def _personal_tasks(
        self, server_round: int, arrays: ArrayRecord, grid: Grid, asked: Mapping[int, Task]
    ) -> dict[int, Task]:
        """Return the tasks of all clients, or of `evaluation.clients` drawn ones, without those that were silent."""
        strategy, settings = self.strategy, self.strategy.settings
        chosen = sample_clients(
            strategy.registry.present(grid), settings.evaluation.clients, settings.seed + 1, server_round
        )
        tasks = {client: task for client, task in asked.items() if client in chosen and self.reachable(client)}
        if others := [client for client in chosen if client not in asked]:
            tasks |= {client: task for client, (task, _) in strategy.ask(others, server_round, arrays).items()}
        return {client: replace(after_training(task), personal=True) for client, task in sorted(tasks.items())}

    def aggregate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean metrics over all clients' examples, or for personal evaluation over clients; None without examples."""
        strategy, dispatcher = self.strategy, self.strategy.dispatcher
        self.answers, self.evaluated = {}, 0
        total, sums = 0, dict.fromkeys(strategy.evaluation_keys, 0.0)

        def read(client: int, answer: Answer) -> tuple[int, dict[str, float], dict[str, Any]]:
            member = strategy.registry.members[client]
            maximum = member.test if strategy.personal else member.validation
            return *verdict(answer.metrics, tuple(sums), maximum), answer.metrics

        for client, (examples, values, metrics) in dispatcher.answers(
            replies, lambda c, status: strategy.gate.note_error(c, server_round, status), read
        ):
            self.answers[client] = metrics
            weight = min(examples, 1) if strategy.personal else examples
            for key, value in values.items():
                sums[key] += value * weight
            total += weight
            self.evaluated += examples > 0
        for client, report in strategy.reports.items():
            if (found := dispatcher.log.get(client)) is not None:  # also of clients that refused
                report.evaluation_peak, report.evaluation_predicted = found.evaluation_peak, found.evaluation_predicted
        return MetricRecord({key: sums[key] / total for key in sums}) if total else None


class EvaluationAsTrained(ClientEvaluation):
    """Has clients evaluate what they can train, and hold it so: their limits are those of the task's work items."""

    def steps(self, client: int, task: Task) -> list[EvaluationStep]:
        """Return no steps."""
        return []
