"""The gate for replies: each is received, checked, and compared with the others before it changes the model.

The checks of all strategies are in federation/aggregation.py. A strategy adds its own in `check` and `combine`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message

from piecework.device_profiles.clock import awaited
from piecework.federation.aggregation import (
    CheckedUpdate,
    Norms,
    UpdateRejectedError,
    add_norm_limits,
    check_update,
    first_limit,
    norm_limits,
    note_norms,
    require_within,
    spec_of,
)
from piecework.federation.pace import before_deadlines, deadline_message
from piecework.federation.reports import ClientReport, require_at_most
from piecework.training.answers import Answer, Outcome

if TYPE_CHECKING:
    from piecework.strategies.server import MethodServer

ReadReply = Callable[[ClientReport, Outcome, dict[str, Any]], None]
NORMS_KEPT = 200  # the latest norms that are stored of each unit


class UpdateGate:
    """Checks the updates of a round and combines those that pass. `read` fills in a client's report from its reply.

    With `faults.over-sample`, the first `clients-per-round` updates that pass end the round, and all other clients are late.
    The first are those that arrive first. Where clients are emulated, they are those of the fewest simulated seconds (of
    clients with equally many, the lower numbers), so that runs can be repeated; the gate then holds all of a round's updates
    at once. There it also keeps the deadlines: `deadline` returns for how many simulated seconds a client is awaited. On real
    devices the transport does. `closed_at` is the simulated seconds of the last update with which the round ended, infinite if
    it did not end so. `updates` are those that it held.
    """

    def __init__(self, server: "MethodServer", read: ReadReply) -> None:
        self.server, self.read = server, read
        self.deadline: Callable[[ClientReport], float] = lambda _: math.inf
        self.closed_at = math.inf
        self.updates: dict[int, CheckedUpdate] = {}

    def admit(self, server_round: int, replies: Iterable[Message]) -> bool:
        """Combine the valid updates of a round, and then late ones.

        Returns False if there are none in time, or fewer than `faults.min-clients`.
        """
        server, enough, least = self.server, self.server.settings.enough, self.server.settings.least
        accepted, norms = list[ClientReport](), dict[str, list[float]]()
        known, factor = server.method.state.norms, server.settings.faults.update_norm_limit
        self.closed_at, self.updates = math.inf, {}
        for report, update, limits in add_norm_limits(self._in_order(replies), factor, known, enough):
            if len(accepted) >= self.before_deadlines() and self._overdue(report):
                continue
            try:
                require_within(update.norms, limits)
                server.combine(report.client, update)
            except UpdateRejectedError as error:
                report.end("rejected", str(error))
                continue
            note_norms(norms, update.norms)
            accepted.append(report)
            if len(accepted) == enough:
                self._close(accepted)
                break
        if server.settings.simulated:
            needed = self.before_deadlines()
            self._note_waiting(accepted[needed - 1].simulated_seconds if len(accepted) >= needed else math.inf)
        if len(accepted) < least:
            return False
        server.late.merge(server_round)
        server.method.state.norms = known | {
            unit: [*known.get(unit, []), *new][-NORMS_KEPT:] for unit, new in norms.items()
        }
        return True

    def _in_order(self, replies: Iterable[Message]) -> Iterator[tuple[ClientReport, CheckedUpdate]]:
        """Yield the updates in the order in which their clients answer."""
        received, settings = self._received(replies), self.server.settings
        if not (settings.simulated and (settings.enough or settings.faults.deadline_factor)):
            return received
        pairs = list(received)
        self.updates = {report.client: update for report, update in pairs}
        return iter(sorted(pairs, key=lambda pair: (pair[0].simulated_seconds, pair[0].client)))

    def before_deadlines(self) -> int:
        """Return how many updates must be there before a client may be late, of those that may still bring one."""
        possible = sum(report.status in ("ok", "timeout", "late") for report in self.server.round.reports.values())
        return before_deadlines(possible, self.server.settings.least)

    def _overdue(self, report: ClientReport) -> bool:
        """Return whether a client answers after its deadline on the simulated clock. If so it is late."""
        if not self.server.settings.simulated or report.simulated_seconds <= (deadline := self.deadline(report)):
            return False
        report.end("late", deadline_message(deadline))
        return True

    def _note_waiting(self, there: float) -> None:
        """Note how long each client was awaited on the simulated clock, on which enough updates are `there` after so long."""
        for report in self.server.round.reports.values():
            deadline = self.deadline(report)
            report.deadline_seconds = deadline if math.isfinite(deadline) else None
            report.waited_seconds = min(awaited(report.simulated_seconds, deadline, there), self.closed_at)

    def _close(self, accepted: list[ClientReport]) -> None:
        """End the round with these updates: clients whose updates were not needed, or had not arrived, are late."""
        server = self.server
        self.closed_at = max(report.simulated_seconds for report in accepted)
        late = ("ok",) if server.settings.simulated else ("ok", "timeout")
        for client, report in server.round.reports.items():
            if report not in accepted and report.status in late and client not in server.weight_cache.unreached:
                report.end("late", f"{len(accepted)} others had answered, which is enough (faults.over-sample)")

    def _received(self, replies: Iterable[Message]) -> Iterator[tuple[ClientReport, CheckedUpdate]]:
        server, factor = self.server, self.server.settings.faults.update_norm_limit
        limits, maximum = (
            norm_limits(server.method.state.norms, factor),
            cache(partial(first_limit, factor, server.dispatcher.arrays)),
        )
        for message in replies:
            client = server.registry.client_of(message.metadata.src_node_id)
            if client is None or client not in server.round.reports:
                continue
            report = server.round.reports[client]
            if (update := self._receive(message, report, limits, maximum)) is not None:
                yield report, update

    def _receive(
        self, message: Message, report: ClientReport, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate | None:
        """Fill in the report, and return the update if it is valid, else None."""
        if message.has_error():
            self._fail(message, report)
            return None
        update = report.take(message, lambda answer: self._read(answer, report, limits, maximum))
        if update is not None:
            report.end("ok")
            self.server.method.state.crash_history.note_answer(report.client)
        return update

    def _read(
        self, answer: Answer, report: ClientReport, limits: Norms, maximum: Callable[[], float]
    ) -> CheckedUpdate | None:
        if not self._has_trained(answer, report, self.read):
            return None
        return self.server.check_answer(report.client, answer.arrays, answer.metrics, limits, maximum)

    def _has_trained(self, answer: Answer, report: ClientReport, read: ReadReply) -> bool:
        """Read what an answer says into the report, and return whether it brings an update."""
        outcome, metrics, _ = answer
        member = self.server.registry.members[report.client]
        require_at_most(metrics, "num-examples", member.examples)
        require_at_most(metrics, "val-examples", member.validation)
        read(report, outcome, metrics)
        if outcome.status != "ok":
            report.end(outcome.status, outcome.reason)
            report.needed, report.allowed = outcome.needed, outcome.allowed
            self.server.weight_cache.forget(report.client, outcome.missing)
        return outcome.status == "ok"

    def read_late(
        self, answer: Answer, report: ClientReport, model: ArrayRecord, read: ReadReply
    ) -> CheckedUpdate | None:
        """Return the update in a late answer to a task for which this model was sent, or None if there is none."""
        if not self._has_trained(answer, report, read):
            return None
        norms, factor = self.server.method.state.norms, self.server.settings.faults.update_norm_limit
        limits, maximum = norm_limits(norms, factor), cache(partial(first_limit, factor, model))
        return check_update(answer.arrays, answer.metrics.get("num-examples"), model, spec_of(model), limits, maximum)

    def delivered(self, replies: Iterable[Message]) -> None:
        """Record from clients' replies which frozen units arrived, and handle errors."""
        dispatcher = self.server.dispatcher
        for client, message in self.server.weight_cache.note(replies, dispatcher.log):
            self._fail(message, dispatcher.log[client])

    def _fail(self, message: Message, report: ClientReport) -> None:
        report.fail(message.error)
        self.note_error(report.client, self.server.dispatcher.tasks[report.client].round, report.status)

    def note_error(self, client: int, server_round: int, status: str) -> None:
        """Record a crash of a client, whether it is reported in its round or late. Other statuses are ignored."""
        policy = self.server.method.cut
        if status == "crashed":
            self.server.method.state.crash_history.note_crash(
                client, server_round, policy.can.cuts or policy.can.adapts
            )
