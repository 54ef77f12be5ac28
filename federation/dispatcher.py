"""Send a strategy's tasks to clients and read their answers, for training, evaluation and pre-round queries alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Message, RecordDict

from piecework.device_profiles.profile import is_limit
from piecework.federation.aggregation import share_bytes
from piecework.federation.registry import ClientRegistry
from piecework.federation.reports import ClientReport
from piecework.federation.transport import MESSAGE_LIFETIME
from piecework.federation.weight_cache import WeightCache, without_units
from piecework.planning.assignment import ArrayFilter, everything
from piecework.training.answers import Answer
from piecework.training.messages import Task, content_bytes
from piecework.training.parcels import pack

Read = TypeVar("Read")
Reader = Callable[[ClientReport, Answer], Read]


class Dispatcher:
    """Holds the tasks of the latest `configure`, by client, and in `log` a report of each: its bytes, status and reason.

    `timeout` is in seconds. `note_crash` is told of each client whose process died, and of the round of its task.
    """

    def __init__(
        self, registry: ClientRegistry, cache: WeightCache, timeout: float, note_crash: Callable[[int, int], None]
    ) -> None:
        self.registry, self.weight_cache, self.timeout, self.note_crash = registry, cache, timeout, note_crash
        self.tasks: dict[int, Task] = {}
        self.log: dict[int, ClientReport] = {}
        self.arrays = ArrayRecord()

    def configure(
        self,
        kind: str,
        tasks: Mapping[int, Task],
        arrays: ArrayRecord,
        sends: Mapping[int, ArrayFilter],
        reports: Mapping[int, ClientReport] | None = None,
    ) -> Iterator[Message]:
        """Yield one message per client, built when it is sent. Clients whose frozen units did not arrive get none.

        `sends` selects the arrays of the model that a client is sent, all by default; its task's frozen units are left out.
        `reports` are the reports for `log` if these exist already.
        """
        self.tasks, self.arrays = dict(tasks), arrays
        self.log = {client: ClientReport(client, "", 0) for client in tasks} if reports is None else dict(reports)
        return self._messages(kind, sends)

    def _messages(self, kind: str, sends: Mapping[int, ArrayFilter]) -> Iterator[Message]:
        before, parcels = ArrayRecord(), ArrayRecord()  # of the last client: the next often gets the same
        for client, task in self.tasks.items():
            if client in self.weight_cache.unreached:
                continue
            sent = without_units(sends.get(client, everything)(self.arrays), task.frozen)
            member = self.registry.members[client]
            if not share_bytes(sent, before):
                before, parcels = sent, pack([*sent.items()])
            content = RecordDict({"task": task.to_record(), "arrays": ArrayRecord({**parcels})})
            if member.own_data:
                content.update(self.registry.first_content())
            self.log[client].bytes_down += content_bytes(content)
            self.log[client].reason = "no answer within messages.round-timeout"
            node = member.node_id
            ttl = MESSAGE_LIFETIME * self.timeout
            yield Message(content, dst_node_id=node, message_type=kind, group_id=str(task.round), ttl=ttl)

    def batches(self) -> Iterator[Iterator[Message]]:
        """Yield batches of messages with the frozen units that the tasks name."""
        return self.weight_cache.batches(self.tasks, self.arrays, self.log)

    def _receive(self, replies: Iterable[Message]) -> Iterator[tuple[ClientReport, Answer | None]]:
        """Yield each client's report, and its answer; None if an error came instead, or if it is unusable."""
        for reply in replies:
            client = self.registry.client_of(reply.metadata.src_node_id)
            if client is None or client not in self.log:
                continue
            report = self.log[client]
            answer = report.take(reply)
            if reply.has_error() and report.status == "crashed":
                self.note_crash(client, self.tasks[client].round)
            yield report, answer

    def note_delivered(self, replies: Iterable[Message]) -> None:
        """Record from clients' replies which frozen units arrived."""
        for report, answer in self._receive(replies):
            if answer is not None:
                report.add_note(answer.outcome.note)
                self.weight_cache.note(report.client, answer.outcome.missing)

    def answers(
        self, replies: Iterable[Message], read: Reader[Read], note: Reader[None] = ClientReport.read
    ) -> Iterator[tuple[ClientReport, Read]]:
        """Yield (report, what `read` makes of its answer) for each client that did its task (`read` below)."""
        for report, answer in self._receive(replies):
            if answer is not None and (found := self.read(report, answer, read, note)) is not None:
                yield report, found

    def read(
        self, report: ClientReport, answer: Answer, read: Reader[Read], note: Reader[None] = ClientReport.read
    ) -> Read | None:
        """Return what `read` makes of the answer of a client that did its task; None if it did not, or the answer is rejected.

        Each figure of an answer is in range. `note` is given every answer. What `note` and `read` raise of UNUSABLE rejects it.
        """
        outcome = answer.outcome
        with report.rejecting():
            note(report, answer)
            if outcome.status == "ok":
                found = read(report, answer)
                report.end("ok")
                return found
            report.end(outcome.status, outcome.reason)
            report.needed, report.allowed = outcome.needed, outcome.allowed
            self.weight_cache.forget(report.client, outcome.missing)
        return None

    def reject(self, client: int, reason: str) -> None:
        """Record that a client's answer is invalid and does not count."""
        self.log[client].end("rejected", reason)

    def account(self) -> dict[str, Any]:
        """Return as JSON values who answered, who did not and why, and what the clients used of their budgets."""
        rest = [report for report in self.log.values() if report.status != "ok"]
        budgets = {c: min(self.tasks[c].budget, r.client_budget or self.tasks[c].budget) for c, r in self.log.items()}
        peaks = [r.measured_peak / budgets[c] for c, r in self.log.items() if is_limit(budgets[c])]
        return {
            "asked": len(self.log),
            "answered": len(self.log) - len(rest),
            "peak_over_budget": max(peaks, default=None),
            "peaks": [
                {"client": c, "predicted": r.predicted_peak, "measured": r.measured_peak}
                for c, r in self.log.items()
                if r.measured_peak
            ],
            "others": [{"client": r.client, "status": r.status, "reason": r.reason} for r in rest],
        }

    def bytes(self) -> int:
        """Return the bytes, in both directions, of the messages of the latest `configure`."""
        return sum(report.bytes_down + report.bytes_up for report in self.log.values())

    def why_unanswered(self) -> str:
        """Return up to three reasons why clients did not answer the latest messages."""
        return "; ".join(sorted({report.reason for report in self.log.values()})[:3]) or "no client was asked"
