"""Send a strategy's tasks to clients and read their answers, for training, evaluation and pre-round queries alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

from piecework.device_profiles.profile import is_limit
from piecework.federation.faults import status_of
from piecework.federation.registry import ClientRegistry
from piecework.federation.reports import LONGEST, ClientReport, count
from piecework.federation.transport import LIFE
from piecework.federation.weight_cache import WeightCache
from piecework.training.messages import Outcome, Task, content_bytes

Travelling = Callable[[Task, ArrayRecord], ArrayRecord]
OnError = Callable[[int, str], None]  # client, status


class Dispatcher:
    """Holds the tasks of the latest `configure`, by client, and in `log` a report of each: its bytes, status and reason.

    `travelling` returns the arrays of a model that are sent with a task. `timeout` is in seconds.
    """

    def __init__(
        self, registry: ClientRegistry, weight_cache: WeightCache, timeout: float, travelling: Travelling
    ) -> None:
        self.registry, self.weight_cache, self.timeout, self.travelling = registry, weight_cache, timeout, travelling
        self.tasks: dict[int, Task] = {}
        self.log: dict[int, ClientReport] = {}
        self.arrays = ArrayRecord()

    def configure(
        self,
        kind: str,
        tasks: Mapping[int, Task],
        arrays: ArrayRecord,
        reports: Mapping[int, ClientReport] | None = None,
        travelling: Travelling | None = None,
    ) -> Iterator[Message]:
        """Yield one message per client, built when it is sent. Clients whose frozen units did not arrive get none.

        `reports` are the reports for `log` if these exist already; `travelling` replaces the dispatcher's for these tasks.
        """
        self.tasks, self.arrays = dict(tasks), arrays
        self.log = {client: ClientReport(client, "", 0) for client in tasks} if reports is None else dict(reports)
        return self._messages(kind, travelling or self.travelling)

    def _messages(self, kind: str, travelling: Travelling) -> Iterator[Message]:
        for client, task in self.tasks.items():
            if client in self.weight_cache.unreached:
                continue
            content = RecordDict({"task": task.to_record(), "arrays": travelling(task, self.arrays)})
            self.log[client].bytes_down += content_bytes(content)
            self.log[client].reason = "no answer within messages.round-timeout"
            node = self.registry.members[client].node_id
            ttl = LIFE * self.timeout
            yield Message(content, dst_node_id=node, message_type=kind, group_id=str(task.round), ttl=ttl)

    def batches(self) -> Iterator[Iterator[Message]]:
        """Yield batches of messages with the frozen units that the tasks name."""
        return self.weight_cache.batches(self.tasks, self.arrays, self.log)

    def answers(self, replies: Iterable[Message], on_error: OnError) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (client, metrics) for each client that did its task. Malformed replies are skipped; errors go to `on_error`."""
        return ((client, metrics) for client, metrics, _ in self.contents(replies, on_error))

    def contents(
        self, replies: Iterable[Message], on_error: OnError
    ) -> Iterator[tuple[int, dict[str, Any], ArrayRecord]]:
        """Yield (client, metrics, arrays) for each client that did its task. Malformed replies and errors end in the log."""
        for message in replies:
            client = self.registry.client_of(message.metadata.src_node_id)
            if client is None or client not in self.log:
                continue
            report = self.log[client]
            if message.has_error():
                report.status = status_of(message.error)
                report.reason = f"error {message.error.code}: {message.error.reason}"[:LONGEST]
                on_error(client, report.status)
                continue
            with suppress(ValueError, TypeError, LookupError, ArithmeticError):
                report.bytes_up += content_bytes(message.content)
                outcome = Outcome.from_record(message.content.config_records["outcome"])
                metrics = dict(message.content.metric_records["metrics"])
                report.evaluation_peak = count(metrics, "measured-peak")
                report.evaluation_predicted = count(metrics, "predicted-peak")
                report.client_budget = count(metrics, "budget", self.tasks[client].budget)
                if outcome.status == "ok":
                    report.status, report.reason = "ok", ""
                    yield client, metrics, message.content.array_records["arrays"]
                else:
                    report.status, report.reason = outcome.status, outcome.reason[:LONGEST]
                    self.weight_cache.forget(client, outcome.missing)

    def reject(self, client: int, reason: str) -> None:
        """Record that a client's answer is invalid and does not count."""
        self.log[client].status, self.log[client].reason = "rejected", reason

    def account(self) -> dict[str, Any]:
        """Return as JSON values who answered, who did not and why, and what the clients used of their budgets."""
        rest = [report for report in self.log.values() if report.status != "ok"]
        budgets = {c: min(self.tasks[c].budget, r.client_budget or self.tasks[c].budget) for c, r in self.log.items()}
        peaks = [r.evaluation_peak / budgets[c] for c, r in self.log.items() if is_limit(budgets[c])]
        return {
            "asked": len(self.log),
            "answered": len(self.log) - len(rest),
            "peak_over_budget": max(peaks, default=None),
            "peaks": [
                {"client": c, "predicted": r.evaluation_predicted, "measured": r.evaluation_peak}
                for c, r in self.log.items()
                if r.evaluation_peak
            ],
            "others": [{"client": r.client, "status": r.status, "reason": r.reason} for r in rest],
        }

    def bytes(self) -> int:
        """Return the bytes, in both directions, of the messages of the latest `configure`."""
        return sum(report.bytes_down + report.bytes_up for report in self.log.values())

    def why_unanswered(self) -> str:
        """Return up to three reasons why clients did not answer the latest messages."""
        return "; ".join(sorted({report.reason for report in self.log.values()})[:3]) or "no client is connected"
