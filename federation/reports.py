"""What the records say of one client in one round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """One client in one round, as it goes into the records. Bytes, seconds, FLOPs; peaks are of training memory, and
    `gpu_peak` of what torch's allocator gave out of a GPU.

    `status`: ok; memory (refused, or stopped at its budget: `needed` and `allowed` tell); failed (it raised an exception);
    crashed (its process died); gone (its node left); timeout (no answer within messages.round-timeout); rejected (an update
    that may not enter the model). `note` is what else there is to say, also of an ok. `trained` names the parts of the model
    that the client trained, and `pieces` the atoms of each of its work items. `counted_bits` and `counted_flops` are by the
    rules of SpaFL's Table 2.
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
    evaluation_peak: int = 0
    gpu_peak: int = 0
    rss_peak: int = 0
    rss_growth: int = 0
    pieces: list[list[int]] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
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
        """Add what a client says, which may be of any length, to what there is."""
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
        """FLOPs and simulated seconds of the work items that a client has `done`, each on so many examples (`seen`). It
        executed the fraction `executed` of their FLOPs.

        Raises UpdateRejectedError for work items that it was not asked for.
        """
        if unknown := [item for item in done if item not in task.costs]:
            raise UpdateRejectedError(f"work item {unknown[0].to_values()} was not in the task's cost list")
        if not 0 < len(done) <= len(task.costs):
            raise UpdateRejectedError(f"{len(done)} work items, {len(task.costs)} are in the task's cost list")
        self.pieces = [list(item.learns or item.atoms) for item in done]
        parts = [policy.part(item) for item in done]
        self.flops = work_flops(cost_model, parts, seen, executed)
        self.counted_bits = bits(*policy.values(parts))
        dense = sum(dense_flops(p.forward_flops / 2, n) for p, n in zip(parts, seen, strict=True))
        self.counted_flops = executed * dense
        wire = self.bytes_down, self.bytes_up
        self.simulated_seconds = work_seconds(policy, cost_model, parts, seen, state, wire, executed)

    def read(self, metrics: Mapping[str, Any]) -> None:
        """Take over what a client says of itself. Raises UpdateRejectedError, ValueError or TypeError for nonsense."""
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
    """On how many of at most `maximum` validation examples a client evaluated, and what it found. Raises UpdateRejectedError.

    A client that has none says nothing.
    """
    if not (examples := count(metrics, "val-examples")):
        return 0, {}
    if examples > maximum:
        raise UpdateRejectedError(f"val-examples is {examples}: the client has {maximum}")
    found = {}
    for key in keys:
        value = finite(metrics, key)
        if value is None or value < 0 or (value > 1 and not key.endswith("loss")):
            share = "a density" if key == "density" else "an accuracy"
            raise UpdateRejectedError(f"{key} is {value!r}: it must be a loss of 0 or more, or {share} from 0 to 1")
        found[key] = value
    return examples, found


def count(metrics: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A number of things or bytes that a client sent. Raises UpdateRejectedError, TypeError or OverflowError."""
    if (value := int(metrics.get(key, default))) < 0:
        raise UpdateRejectedError(f"{key} is {value}: it must not be negative")
    return value


def finite(metrics: Mapping[str, Any], key: str) -> float | None:
    """A metric that a client sent, or None where it did not. Raises UpdateRejectedError."""
    value = metrics.get(key)
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise UpdateRejectedError(f"{key} is {value!r}: it must be a finite number")
    return value
