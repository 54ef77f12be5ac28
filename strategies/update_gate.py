"""The gate for replies: each is received, checked, and compared with the others before it changes the model.

The checks of all strategies are in federation/aggregation.py. A strategy adds its own in `check` and `combine`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from flwr.app import ArrayRecord, Message

from piecework.device_profiles.clock import seconds_awaited, simulated_seconds
from piecework.federation.aggregation import (
    CheckedUpdate,
    Norms,
    UpdateRejectedError,
    add_norm_limits,
    first_limit,
    norm_limits,
    note_norms,
    require_within,
)
from piecework.federation.dispatcher import Dispatcher
from piecework.federation.pace import before_deadlines, deadline_message
from piecework.federation.reports import ClientReport, require_at_most
from piecework.models.work_item import WorkItem
from piecework.planning.coverage import learned_names
from piecework.strategies.method import Assigned, Method, Received, Round
from piecework.training.answers import Answer


class UpdateGate:
    """Checks the updates of a round and has the method combine those that pass.

    With `faults.over-sample`, the first `clients-per-round` updates that pass end the round, and all other clients are late.
    The first are those that arrive first. Where clients are emulated, they are those of the fewest simulated seconds (of
    clients with equally many, the lower numbers), so that runs can be repeated; the gate then holds all of a round's updates
    at once. There it also keeps the deadlines: `deadline` returns for how many simulated seconds a client is awaited. On real
    devices the transport does.
    """

    def __init__(self, method: Method, dispatcher: Dispatcher) -> None:
        self.method, self.settings, self.dispatcher = method, method.settings, dispatcher
        self.deadline: Callable[[ClientReport], float] = lambda _: math.inf
        # A verdict that depends on other clients' updates would tell of them, and the clip bounds a private update anyway.
        self.factor = 0.0 if self.settings.privacy.on else self.settings.faults.update_norm_limit

    def admit(self, current: Round, replies: Iterable[Message]) -> dict[str, list[float]] | None:
        """Combine the valid updates of a round. Returns their norms by unit.

        Returns None if there are none in time, or fewer than `faults.min-clients`.
        """
        enough, factor = self.settings.enough, self.factor
        accepted, norms = list[ClientReport](), dict[str, list[float]]()
        updates = self._in_order(current, replies)
        for report, update, limits in add_norm_limits(updates, factor, self.method.state.norms, enough):
            if len(accepted) >= self.before_deadlines(current) and self._overdue(report):
                continue
            try:
                require_within(update.norms, limits)
                self.method.combine(current, report.client, self._within_entries(current, report.client, update))
            except UpdateRejectedError as error:
                report.end("rejected", str(error))
                continue
            note_norms(norms, update.norms)
            accepted.append(report)
            if len(accepted) == enough:
                self._close(current, accepted)
                break
        if self.settings.simulated:
            needed = self.before_deadlines(current)
            there = accepted[needed - 1].simulated_seconds if len(accepted) >= needed else math.inf
            self._note_waiting(current, there)
        return norms if len(accepted) >= self.settings.least else None

    def _within_entries(self, current: Round, client: int, update: CheckedUpdate) -> CheckedUpdate:
        """Return the update without what the client was not to train, if the round is private: nobody expects it there."""
        if current.entries is None:
            return update
        return replace(update, arrays={n: a for n, a in update.arrays.items() if n in current.entries[client]})

    def _in_order(self, current: Round, replies: Iterable[Message]) -> Iterator[tuple[ClientReport, CheckedUpdate]]:
        """Yield the updates in the order in which their clients answer."""
        received = self._receive(current, replies)
        if not (self.settings.simulated and (self.settings.enough or self.settings.faults.deadline_factor)):
            return received
        pairs = list(received)
        current.updates = {report.client: update for report, update in pairs}
        return iter(sorted(pairs, key=lambda pair: (pair[0].simulated_seconds, pair[0].client)))

    def before_deadlines(self, current: Round) -> int:
        """Return how many updates must be there before a client may be late, of those that may still bring one."""
        possible = sum(report.status in ("ok", "timeout", "late") for report in current.reports.values())
        return before_deadlines(possible, self.settings.least)

    def _overdue(self, report: ClientReport) -> bool:
        """Return whether a client answers after its deadline on the simulated clock. If so it is late."""
        if not self.settings.simulated or report.simulated_seconds <= (deadline := self.deadline(report)):
            return False
        report.end("late", deadline_message(deadline))
        return True

    def _note_waiting(self, current: Round, there: float) -> None:
        """Note how long each client was awaited on the simulated clock, on which enough updates are `there` after so long."""
        for report in current.reports.values():
            deadline = self.deadline(report)
            report.deadline_seconds = deadline if math.isfinite(deadline) else None
            report.waited_seconds = min(seconds_awaited(report.simulated_seconds, deadline, there), current.closed_at)

    def _close(self, current: Round, accepted: list[ClientReport]) -> None:
        """End the round with these updates: clients whose updates were not needed, or had not arrived, are late."""
        current.closed_at = max(report.simulated_seconds for report in accepted)
        late = ("ok",) if self.settings.simulated else ("ok", "timeout")
        unreached = self.dispatcher.weight_cache.unreached
        for client, report in current.reports.items():
            if report not in accepted and report.status in late and client not in unreached:
                report.end("late", f"{len(accepted)} others had answered, which is enough (faults.over-sample)")

    def _receive(self, current: Round, replies: Iterable[Message]) -> Iterator[tuple[ClientReport, CheckedUpdate]]:
        """Yield each update that is valid on its own."""
        limits, maximum = self.limits(current.arrays)

        def check(report: ClientReport, answer: Answer) -> CheckedUpdate:
            asked = current.assigned[report.client].assignment
            return self.method.check(Received(answer.arrays, answer.metrics, asked, current.arrays, limits, maximum))

        def note(report: ClientReport, answer: Answer) -> None:
            self._note(current, current.assigned[report.client], report, answer)

        for report, update in self.dispatcher.answers(replies, check, note):
            self.method.state.crash_history.note_answer(report.client)
            yield report, update

    def limits(self, model: ArrayRecord) -> tuple[Norms, Callable[[], float]]:
        """Return the limits of units' norms, and that of a whole update of this model without a history (`first_limit`)."""
        return norm_limits(self.method.state.norms, self.factor), cache(partial(first_limit, self.factor, model))

    def read_late(
        self, current: Round, asked: Assigned, model: ArrayRecord, report: ClientReport, reply: Message
    ) -> CheckedUpdate | None:
        """Return the update in a late reply of a client that was `asked` and sent this model; None if there is none."""
        limits, maximum = self.limits(model)

        def check(_: ClientReport, answer: Answer) -> CheckedUpdate:
            return self.method.check(Received(answer.arrays, answer.metrics, asked.assignment, model, limits, maximum))

        if (answer := report.take(reply)) is None:
            return None
        return self.dispatcher.read(report, answer, check, partial(self._note, current, asked))

    def _note(self, current: Round, asked: Assigned, report: ClientReport, answer: Answer) -> None:
        """Fill in the report of a client that was `asked`. Raises UpdateRejectedError."""
        registry, metrics = self.dispatcher.registry, dict[str, Any](answer.metrics)
        require_at_most(metrics, "num-examples", registry.members[report.client].examples)
        require_at_most(metrics, "val-examples", registry.members[report.client].validation)
        report.read(answer)
        if "memory-available" in metrics:
            registry.note_free_memory(report.client, int(metrics["memory-available"]))
        report.simulated_seconds = simulated_seconds(asked.device, 0, report.bytes_down, report.bytes_up)
        if answer.outcome.status == "ok":
            self._note_work(current, asked, report, answer.outcome.done, metrics)

    def _note_work(
        self, current: Round, asked: Assigned, report: ClientReport, done: Sequence[WorkItem], metrics: dict[str, Any]
    ) -> None:
        """Fill in the report of a client that did its task."""
        reading, seen = self.method.read(current, report, metrics), metrics["seen"]
        report.account(done, seen, asked.task, asked.device, self.method.cut, reading.executed)
        if reading.counted_flops is not None:
            report.counted_flops = reading.counted_flops
        report.trained = learned_names(self.method.cut, done, seen)
