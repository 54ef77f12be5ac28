"""The report of one client in one round, for the records."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from piecework.device_profiles.profile import DeviceState
from piecework.federation.aggregation import UpdateRejectedError
from piecework.models.work_item import WorkItem
from piecework.planning.costs import CostModel
from piecework.planning.counts import bits, dense_flops
from piecework.planning.partition_policy import PartitionPolicy
from piecework.planning.timing import work_flops, work_seconds
from piecework.training.messages import Task

LONGEST = 500  # characters of a client's text that are kept


@dataclass
class ClientReport:
    """One client in one round, as the records store it. Units are bytes, seconds and FLOPs.

    `status`: ok; memory (it refused, or stopped at its budget: see `needed` and `allowed`); failed (it raised an exception);
    crashed (its process died); gone (its node left); timeout (no answer within messages.round-timeout); rejected (its update
    may not enter the model). `note` holds further remarks, also for status ok. `trained` names the parts of the model that the
    client trained, and `pieces` lists the atoms of each of its work items. `step` says how its steps fit (`memory.fit`), which
    takes `step_flops` times the FLOPs of plain steps. Peaks are of training memory, and `evaluation_predicted` and
    `evaluation_peak` of that in the round's evaluation on clients; `gpu_peak` is that of torch's allocator on a GPU.
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
    examples: int = 0
    train_loss: float | None = None
    val_accuracy: float | None = None
    val_examples: int = 0
    flops: float = 0.0
    counted_bits: float = 0.0
    counted_flops: float = 0.0
    seconds: float = 0.0
    simulated_seconds: float = 0.0

    def add_note(self, note: str) -> None:
        """Append a client's remark to `note`, cut to LONGEST characters."""
        self.note = "; ".join(filter(None, (self.note, note[:LONGEST])))

    def account(
        self,
        done: Sequence[WorkItem],
        seen: list[int],
        task: Task,
        state: DeviceState,
        policy: PartitionPolicy,
        cost_model: CostModel,
        executed: float = 1.0,
    ) -> None:
        """Fill in FLOPs and simulated seconds of the work items `done`, each on that many examples (`seen`).

        The client executed the fraction `executed` of their FLOPs. Raises UpdateRejectedError for work items that are not in
        the task's cost list.
        """
        if unknown := [item for item in done if item not in task.costs]:
            raise UpdateRejectedError(f"work item {unknown[0].to_values()} was not in the task's cost list")
        if not 0 < len(done) <= len(task.costs):
            raise UpdateRejectedError(
                f"{len(done)} work items were done, but the task's cost list has {len(task.costs)}"
            )
        self.pieces = [list(item.learns or item.atoms) for item in done]
        parts = [policy.part(item) for item in done]
        self.step = "; ".join(dict.fromkeys(filter(None, (part.step for part in parts))))
        self.flops = work_flops(cost_model, parts, seen, executed)
        if self.step:
            plain = [replace(part, micro_batch=0, recompute=()) for part in parts]
            self.step_flops = self.flops / work_flops(cost_model, plain, seen, executed)
        self.counted_bits = bits(*policy.values(parts))
        dense = sum(dense_flops(p.forward_flops / 2, n) for p, n in zip(parts, seen, strict=True))
        self.counted_flops = executed * dense
        wire = self.bytes_down, self.bytes_up
        self.simulated_seconds = work_seconds(policy, cost_model, parts, seen, state, wire, executed)

    def read(self, metrics: Mapping[str, Any]) -> None:
        """Copy the metrics that a client reported. Raises ValueError, TypeError or OverflowError for invalid values."""
        self.client_budget = count(metrics, "budget", self.budget)
        self.budget = min(self.budget, self.client_budget)
        self.message_bytes = count(metrics, "message-bytes")
        self.measured_peak = count(metrics, "measured-peak")
        self.predicted_peak, self.gpu_peak = count(metrics, "predicted-peak"), count(metrics, "gpu-peak")
        self.rss_peak, self.rss_growth = count(metrics, "rss-peak"), int(metrics.get("rss-growth", 0))
        self.examples, self.seconds = count(metrics, "num-examples"), finite(metrics, "seconds") or 0.0
        self.train_loss, self.val_accuracy = finite(metrics, "train-loss"), finite(metrics, "val-accuracy")
        self.val_examples = count(metrics, "val-examples")


def verdict(metrics: Mapping[str, Any], keys: tuple[str, ...], maximum: int) -> tuple[int, dict[str, float]]:
    """Return the number of examples that a client evaluated on, at most `maximum`, and its metrics of the given keys.

    A client without such examples gives (0, {}). Raises UpdateRejectedError for a number or a metric out of range.
    """
    if not (examples := count(metrics, "val-examples")):
        return 0, {}
    if examples > maximum:
        raise UpdateRejectedError(f"val-examples is {examples}: the client has {maximum}")
    found = {}
    for key in keys:
        value = finite(metrics, key)
        if value is None or value < 0 or (value > 1 and not key.endswith("loss")):
            figure = "a density" if key == "density" else "an accuracy"
            raise UpdateRejectedError(f"{key} is {value!r}: it must be a loss of 0 or more, or {figure} from 0 to 1")
        found[key] = value
    return examples, found


def count(metrics: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return a non-negative integer metric that a client sent. Raises UpdateRejectedError if it is negative.

    Raises ValueError, TypeError or OverflowError if it is not a finite number.
    """
    if (value := int(metrics.get(key, default))) < 0:
        raise UpdateRejectedError(f"{key} is {value}: it must not be negative")
    return value


def finite(metrics: Mapping[str, Any], key: str) -> float | None:
    """Return a metric that a client sent, or None if it is missing. Raises UpdateRejectedError if it is not a finite number."""
    value = metrics.get(key)
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise UpdateRejectedError(f"{key} is {value!r}: it must be a finite number")
    return value
