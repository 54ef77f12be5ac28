"""The report of one client in one round, for the records."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import UpdateRejectedError
from piecework.federation.faults import status_of
from piecework.models.step import Step, with_step
from piecework.models.work_item import WorkItem
from piecework.planning.counts import bits, dense_flops
from piecework.planning.cut import Cut
from piecework.planning.timing import local_work, made_between, work_flops, work_seconds
from piecework.training.answers import Answer, printable, read_answer, reason_of
from piecework.training.messages import Task, content_bytes
from piecework.training.readable import UNUSABLE


@dataclass
class ClientReport:
    """One client in one round, as the records store it. Units are bytes, seconds and FLOPs.

    `status`: ok; memory (it refused, or stopped at its budget: see `needed` and `allowed`); failed (it raised an exception);
    crashed (its process died); gone (its node left); timeout (no answer within messages.round-timeout); late (no answer by its
    deadline, or before enough others had answered: faults.deadline-factor, faults.over-sample); rejected (its update may not
    enter the model). `note` holds further remarks, also for status ok. `trained` names the parts of the model that the client
    trained, and `pieces` lists the atoms of each of its work items. `step` says how its steps fit (`memory.fit`), which
    takes `step_flops` times the FLOPs of plain steps. Paged steps read `disk_read` bytes and write `disk_written`.
    Peaks are of training memory, and `evaluation_predicted` and `evaluation_peak` of that in the round's evaluation on clients;
    `gpu_peak` is that of torch's allocator on a GPU.
    `waited_seconds` is how long the round awaited its answer, and `deadline_seconds` how long it would have at most, None
    without a deadline of its own. On real devices both begin when its task is sent; where clients are emulated, both are
    simulated.
    `counted_bits` and `counted_flops` are counted as in SpaFL's Table 2 (planning/counts.py).
    """

    client: int
    device: str
    budget: int
    bytes_down: int = 0
    status: str = "timeout"
    reason: str = "not sent within messages.round-timeout"
    note: str = ""
    bytes_up: int = 0
    client_budget: int = 0
    message_bytes: int = 0
    needed: int = 0
    allowed: int = 0
    predicted_peak: int = 0
    measured_peak: int = 0
    evaluation_predicted: int = 0
    evaluation_peak: int = 0
    gpu_peak: int = 0
    rss_peak: int = 0
    rss_growth: int = 0
    pieces: list[list[int]] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    step: str = ""
    step_flops: float = 1.0
    disk_read: int = 0
    disk_written: int = 0
    examples: int = 0
    train_loss: float | None = None
    val_accuracy: float | None = None
    val_examples: int = 0
    flops: float = 0.0
    counted_bits: float = 0.0
    counted_flops: float = 0.0
    seconds: float = 0.0
    simulated_seconds: float = 0.0
    deadline_seconds: float | None = None
    waited_seconds: float = 0.0

    def add_note(self, note: str) -> None:
        """Append a client's remark to `note`, without control characters."""
        self.note = "; ".join(filter(None, (self.note, printable(note))))

    def end(self, status: str, reason: str = "") -> None:
        """Set the status and its reason, without control characters."""
        self.status, self.reason = status, printable(reason)

    def take(self, reply: Message) -> Answer | None:
        """Return a client's answer; None if an error came instead, or it is unusable: status and reason then say so.

        All answers of clients are read here, or when a node is admitted (ClientRegistry): what they hold is in range.
        """
        if reply.has_error():
            self.end(status_of(reply.error), f"error {reply.error.code}: {reply.error.reason}")
            return None

        with self.rejecting():
            self.bytes_up += content_bytes(reply.content)
            return read_answer(reply.content)
        return None

    @contextmanager
    def rejecting(self) -> Iterator[None]:
        """Reject the client's answer if what is done here raises an error of UNUSABLE."""
        try:
            yield
        except UNUSABLE as error:
            self.end("rejected", reason_of(error))

    def account(
        self,
        done: Sequence[WorkItem],
        seen: list[int],
        task: Task,
        state: DeviceState,
        cut: Cut,
        executed: float = 1.0,
    ) -> None:
        """Fill in FLOPs and simulated seconds of the work items `done`, each on that many examples (`seen`).

        The client executed the fraction `executed` of their FLOPs. Raises UpdateRejectedError for work items that are not in
        the task's cost list, and for more examples than the client has in its epochs.
        """
        if unknown := [item for item in done if item not in task.costs]:
            raise UpdateRejectedError(f"work item {unknown[0].to_values()} was not in the task's cost list")
        if not 0 < len(done) <= len(task.costs):
            raise UpdateRejectedError(
                f"{len(done)} work items were done, but the task's cost list has {len(task.costs)}"
            )
        if not self.examples:
            raise UpdateRejectedError("num-examples is 0: it must be a positive integer")
        _, most = local_work(cut.settings, self.examples)
        if strange := [n for n in seen if n > most]:
            raise UpdateRejectedError(
                f"seen is {strange[0]}: a work item trains on at most {most} of {self.examples} examples"
            )
        self.pieces = [list(item.learns or item.atoms) for item in done]
        parts = [cut.part(item) for item in done]
        # Clean rounds of adversarial training cost steps without an attack.
        cost_model = cut.cost_model if task.adversarial else cut.cost_model.unattacked
        self.step = "; ".join(dict.fromkeys(filter(None, (part.step for part in parts))))
        steps = work_flops(cost_model, parts, seen, executed)
        self.flops = steps + made_between(cut.settings, parts, self.examples).flops
        if self.step:
            plain = [with_step(part, Step()) for part in parts]
            self.step_flops = steps / work_flops(cost_model, plain, seen, executed)
        self.counted_bits = bits(*cut.traffic(parts).values)
        dense = sum(dense_flops(p.forward_flops / 2, n) for p, n in zip(parts, seen, strict=True))
        self.counted_flops = executed * dense
        message_bytes = self.bytes_down, self.bytes_up
        self.simulated_seconds = work_seconds(
            cut, cost_model, parts, seen, self.examples, state, message_bytes, executed
        )

    def read(self, answer: Answer) -> None:
        """Copy the remark and the metrics of an answer, which are in range."""
        self.add_note(answer.outcome.note)
        metrics: Mapping[str, Any] = answer.metrics
        self.client_budget = metrics.get("budget", self.budget)
        self.budget = min(self.budget, self.client_budget)
        self.message_bytes, self.measured_peak = metrics.get("message-bytes", 0), metrics.get("measured-peak", 0)
        self.predicted_peak, self.gpu_peak = metrics.get("predicted-peak", 0), metrics.get("gpu-peak", 0)
        self.disk_read, self.disk_written = metrics.get("disk-read", 0), metrics.get("disk-written", 0)
        self.rss_peak, self.rss_growth = metrics.get("rss-peak", 0), metrics.get("rss-growth", 0)
        self.examples, self.seconds = metrics.get("num-examples", 0), metrics.get("seconds", 0.0)
        self.train_loss, self.val_accuracy = metrics.get("train-loss"), metrics.get("val-accuracy")
        self.val_examples = metrics.get("val-examples", 0)


def require_at_most(metrics: Mapping[str, Any], name: str, known: int) -> None:
    """Raise UpdateRejectedError if a client counts more examples than it has, by what it said when it connected."""
    if metrics.get(name, 0) > known:
        raise UpdateRejectedError(f"{name} is {metrics[name]}: the client has {known}")


def verdict(metrics: Mapping[str, Any], keys: tuple[str, ...], maximum: int) -> tuple[int, dict[str, float]]:
    """Return the number of examples that a client evaluated on, at most `maximum`, and its metrics of the given keys.

    A client without such examples gives (0, {}). Raises UpdateRejectedError for a number or a metric out of range.
    """
    if not (examples := metrics.get("val-examples", 0)):
        return 0, {}
    require_at_most(metrics, "val-examples", maximum)
    for key in keys:
        value = metrics.get(key)
        if not isinstance(value, int | float) or value < 0 or (value > 1 and not key.endswith("loss")):
            figure = "a density" if key == "density" else "an accuracy"
            raise UpdateRejectedError(f"{key} is {value!r}: it must be a loss of 0 or more, or {figure} from 0 to 1")
    return examples, {key: metrics[key] for key in keys}
