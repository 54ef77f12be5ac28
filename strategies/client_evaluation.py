"""Evaluation of the round's model by clients: the choice of clients, their tasks, and the mean of their answers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from piecework.federation.faults import SILENT
from piecework.federation.registry import sampled
from piecework.federation.reports import LONGEST, verdict
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
        return client not in strategy.weight_cache.unreached and strategy.reports[client].status not in SILENT

    def tasks(self, server_round: int, arrays: ArrayRecord, grid: Grid, asked: Mapping[int, Task]) -> dict[int, Task]:
        """Return the tasks of clients that evaluate the new model. `asked` are the training tasks of the round's clients."""
        strategy, settings = self.strategy, self.strategy.settings
        every = settings.evaluation.on_clients_every
        if strategy.personal:
            due = settings.evaluation_due(server_round)
            return self._personal_tasks(server_round, arrays, grid, asked) if due else {}
        if not every or server_round % every or not strategy.progress.measurable:
            return {}
        return {client: after_training(task) for client, task in asked.items() if self.reachable(client)}

    def _personal_tasks(
        self, server_round: int, arrays: ArrayRecord, grid: Grid, asked: Mapping[int, Task]
    ) -> dict[int, Task]:
        """Return the tasks of all clients, or of `evaluation.clients` drawn ones, without those that were silent."""
        strategy, settings = self.strategy, self.strategy.settings
        chosen = sampled(strategy.registry.present(grid), settings.evaluation.clients, settings.seed + 1, server_round)
        tasks = {client: task for client, task in asked.items() if client in chosen and self.reachable(client)}
        if others := [client for client in chosen if client not in asked]:
            tasks |= {client: task for client, (task, _) in strategy.ask(others, server_round, arrays).items()}
        return {client: replace(after_training(task), personal=True) for client, task in sorted(tasks.items())}

    def aggregate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean metrics over all clients' examples, or for personal evaluation over clients; None without examples."""
        strategy, dispatcher = self.strategy, self.strategy.dispatcher
        self.answers, self.evaluated = {}, 0
        total, sums = 0, dict.fromkeys(strategy.evaluation_keys, 0.0)
        for client, metrics in dispatcher.answers(
            replies, lambda c, status: strategy.gate.note_error(c, server_round, status)
        ):
            if client in strategy.reports:
                strategy.reports[client].evaluation_peak = dispatcher.log[client].evaluation_peak
            try:
                member = strategy.registry.members[client]
                maximum = member.test if strategy.personal else member.validation
                examples, values = verdict(metrics, tuple(sums), maximum)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                dispatcher.reject(client, str(error)[:LONGEST])
                continue
            self.answers[client] = metrics
            weight = min(examples, 1) if strategy.personal else examples
            for key, value in values.items():
                sums[key] += value * weight
            total += weight
            self.evaluated += examples > 0
        return MetricRecord({key: sums[key] / total for key in sums}) if total else None
