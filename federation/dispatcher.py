"""Send a strategy's tasks to clients and read their answers, for training, evaluation and pre-round queries alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Message, RecordDict

from piecework.device_profiles.profile import is_limit
from piecework.federation.registry import ClientRegistry
from piecework.federation.reports import ClientReport
from piecework.federation.transport import MESSAGE_LIFETIME
from piecework.federation.weight_cache import WeightCache
from piecework.training.answers import Answer
from piecework.training.messages import Task, content_bytes
from piecework.training.parcels import pack

Select = Callable[[int, Task, ArrayRecord], ArrayRecord]  # client, its task, the model -> what is sent
OnError = Callable[[int, str], None]  # client, status
Read = TypeVar("Read")


class Dispatcher:
    """Holds the tasks of the latest `configure`, by client, and in `log` a report of each: its bytes, status and reason.

    `timeout` is in seconds.
    """

    def __init__(self, registry: ClientRegistry, weight_cache: WeightCache, timeout: float) -> None:
        self.registry, self.weight_cache, self.timeout = registry, weight_cache, timeout
        self.tasks: dict[int, Task] = {}
        self.log: dict[int, ClientReport] = {}
        self.arrays = ArrayRecord()

    def configure(
        self,
        kind: str,
        tasks: Mapping[int, Task],
        arrays: ArrayRecord,
        select: Select,
        reports: Mapping[int, ClientReport] | None = None,
    ) -> Iterator[Message]:
        """Yield one message per client, built when it is sent. Clients whose frozen units did not arrive get none.

        `select` returns the arrays of the model that are sent with a task. `reports` are the reports for `log` if these exist
        already.
        """
        self.tasks, self.arrays = dict(tasks), arrays
        self.log = {client: ClientReport(client, "", 0) for client in tasks} if reports is None else dict(reports)
        return self._messages(kind, select)

    def _messages(self, kind: str, select: Select) -> Iterator[Message]:
        for client, task in self.tasks.items():
            if client in self.weight_cache.unreached:
                continue
            content = RecordDict({"task": task.to_record(), "arrays": pack(select(client, task, self.arrays).items())})
            self.log[client].bytes_down += content_bytes(content)
            self.log[client].reason = "no answer within messages.round-timeout"
            node = self.registry.members[client].node_id
            ttl = MESSAGE_LIFETIME * self.timeout
            yield Message(content, dst_node_id=node, message_type=kind, group_id=str(task.round), ttl=ttl)

    def batches(self) -> Iterator[Iterator[Message]]:
        """Yield batches of messages with the frozen units that the tasks name."""
        return self.weight_cache.batches(self.tasks, self.arrays, self.log)

    def answers(
        self, replies: Iterable[Message], on_error: OnError, read: Callable[[int, Answer], Read]
    ) -> Iterator[tuple[int, Read]]:
        """Yield (client, what `read` makes of its answer) for each client that did its task; the log tells of the others.

        `read` gets the client and its answer, of which each figure is in range. What it raises of UNUSABLE rejects the answer.
        Errors also go to `on_error`.
        """
        for message in replies:
            client = self.registry.client_of(message.metadata.src_node_id)
            if client is None or client not in self.log:
                continue
            report = self.log[client]
            if message.has_error():
                report.fail(message.error)
                on_error(client, report.status)
                continue
            if (found := report.take(message, partial(self._read, report, read))) is not None:
                yield client, found[0]

    def _read(self, report: ClientReport, read: Callable[[int, Answer], Read], answer: Answer) -> tuple[Read] | None:
        metrics: dict[str, Any] = dict(answer.metrics)
        report.evaluation_peak = metrics.get("measured-peak", 0)
        report.evaluation_predicted = metrics.get("predicted-peak", 0)
        report.client_budget = metrics.get("budget", self.tasks[report.client].budget)
        if answer.outcome.status != "ok":
            report.end(answer.outcome.status, answer.outcome.reason)
            self.weight_cache.forget(report.client, answer.outcome.missing)
            return None
        found = read(report.client, answer)
        report.end("ok")
        return (found,)

    def reject(self, client: int, reason: str) -> None:
        """Record that a client's answer is invalid and does not count."""
        self.log[client].end("rejected", reason)

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
