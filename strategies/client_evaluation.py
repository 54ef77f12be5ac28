"""Evaluation of the round's model by clients: the choice of clients, their tasks, and the mean of their answers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from piecework.federation.faults import UNRESPONSIVE_STATUSES
from piecework.federation.registry import sample_clients
from piecework.federation.reports import verdict
from piecework.strategies.method import Assigned
from piecework.training.answers import Answer

if TYPE_CHECKING:
    from piecework.strategies.server import MethodServer


class ClientEvaluation:
    """Has clients evaluate the model of a method.

    `answers` are the valid metrics of each client in the last evaluation. `evaluated` is the number of these clients that had
    examples to evaluate on.
    """

    def __init__(self, server: "MethodServer") -> None:
        self.server = server
        self.answers: dict[int, dict[str, Any]] = {}
        self.evaluated = 0

    def reachable(self, client: int) -> bool:
        """Return whether a client of the round can get another task: it was not silent and holds its frozen units."""
        server = self.server
        return (
            client not in server.weight_cache.unreached
            and server.round.reports[client].status not in UNRESPONSIVE_STATUSES
        )

    def assign(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> dict[int, Assigned]:
        """Return the assignments of the clients that evaluate the new model, after the training of the round.

        The state that this round's training left with a client may be used, and must be kept.
        """
        server, found = self.server, {}
        method, members = server.method, server.registry.members
        for client, each in sorted(self._evaluators(server_round, arrays, grid).items()):
            ctx = server.context(client, each.device, server_round, arrays)
            examples = members[client].test if method.personal else members[client].validation
            assignment = method.assign_evaluation(ctx, each.assignment, examples)
            task = replace(
                each.task,
                state_round=server_round,
                personal=method.personal,
                own=assignment.config.to_values() if assignment.config is not None else {},
                evaluation=assignment.steps,
            )
            found[client] = Assigned(assignment, task, each.device)
        return found

    def _evaluators(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> dict[int, Assigned]:
        """Return the clients that evaluate: those of the round, or for personal evaluation all or `evaluation.clients` of them.

        Each has its assignment in training. Those that were silent in the round are left out.
        """
        server, settings = self.server, self.server.settings
        every, assigned = settings.evaluation.on_clients_every, server.round.assigned
        asked = {client: each for client, each in assigned.items() if self.reachable(client)}
        if server.method.personal:
            if not settings.evaluation_due(server_round):
                return {}
            chosen = sample_clients(
                server.registry.present(grid), settings.evaluation.clients, settings.seed + 1, server_round
            )
            asked = {client: each for client, each in asked.items() if client in chosen}
        elif server.method.validates == "all":
            chosen = server.registry.present(grid)
        else:
            due = every and server_round % every == 0 and server.method.progress.measurable
            return asked if due or server.method.validates == "asked" else {}
        others = [client for client in chosen if client not in assigned]
        return asked | (server.assign(others, server_round, arrays) if others else {})

    def aggregate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean metrics over all clients' examples, or for personal evaluation over clients; None without examples."""
        server, dispatcher = self.server, self.server.dispatcher
        self.answers, self.evaluated = {}, 0
        total, sums = 0, dict.fromkeys(server.method.evaluation_keys, 0.0)

        def read(client: int, answer: Answer) -> tuple[int, dict[str, float], dict[str, Any]]:
            member = server.registry.members[client]
            maximum = member.test if server.method.personal else member.validation
            return *verdict(answer.metrics, tuple(sums), maximum), answer.metrics

        for client, (examples, values, metrics) in dispatcher.answers(
            replies, lambda c, status: server.gate.note_error(c, server_round, status), read
        ):
            self.answers[client] = metrics
            weight = min(examples, 1) if server.method.personal else examples
            for key, value in values.items():
                sums[key] += value * weight
            total += weight
            self.evaluated += examples > 0
        for client, report in server.round.reports.items():
            if (found := dispatcher.log.get(client)) is not None:  # also of clients that refused
                report.evaluation_peak, report.evaluation_predicted = found.evaluation_peak, found.evaluation_predicted
        return MetricRecord({key: sums[key] / total for key in sums}) if total else None
