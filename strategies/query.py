"""The query that a method with stages sends to all clients before a round (FedProphet)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from piecework.federation.reports import ClientReport
from piecework.strategies.method import Assigned, QueryingMethod
from piecework.strategies.server import MethodServer
from piecework.training.answers import Answer


def configure_query(
    server: MethodServer, server_round: int, arrays: ArrayRecord, grid: Grid
) -> Iterable[Message] | None:
    """Return the messages of a query, which clients answer before the round's tasks; None if there is none."""
    method, members, found = server.method, server.registry.members, {}
    if not isinstance(method, QueryingMethod) or not method.queries:
        return None
    for client, each in server.assign(server.registry.present(grid), server_round, arrays).items():
        ctx = server.context(client, each.device, server_round, arrays)
        assignment = method.assign_query(ctx, each.assignment, members[client].examples)
        task = replace(server.task_of(assignment, server_round, each.device), evaluation=assignment.steps)
        named = server.weight_cache.with_frozen_hashes(task, arrays, assignment.frozen)
        found[client] = Assigned(assignment, named, each.device)
    return server.send("query.query", found, arrays)


def aggregate_query(server: MethodServer, replies: Iterable[Message]) -> bool:
    """Have the method take in the answers to a query, and return whether the round can begin."""
    method, members = server.method, server.registry.members
    assert isinstance(method, QueryingMethod)

    def read(report: ClientReport, answer: Answer) -> Any:
        return method.read_query(dict(answer.metrics), members[report.client].examples)

    answers = {report.client: found for report, found in server.dispatcher.answers(replies, read)}
    rejected = method.conclude_query(answers)
    for client, reason in rejected.items():
        server.dispatcher.reject(client, reason)
    return len(rejected) < len(answers)
