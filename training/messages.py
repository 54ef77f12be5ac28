"""Messages from the server to a client: a ConfigRecord `task`, and an ArrayRecord `arrays` of parcels (training/parcels.py).

What comes back is in training/answers.py.
"""

import json
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any, Self, cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.training import parcels
from piecework.training.evaluation_step import EvaluationStep

AS_JSON = ("costs", "frozen", "void", "variant", "own")  # Flower's records hold neither mappings nor lists of lists


@dataclass(frozen=True)
class Task:
    """A server's request to a client in a round.

    `budget` is the bytes that the server assumes the client may use. `reference` is the bytes of a reference step, of which
    emulated ratio budgets are fractions. `state_round` is the newest round whose client state may be used. `costs` maps work
    items to bytes; `enforced` says whether these are true bytes, to which the accounting holds the client. `frozen` maps the
    units that are not in this message, because no client trains them any more, to their content hashes. `variant` is the
    network that the client builds from the run's model. `own` are the strategy's own fields.

    A server may go back to an earlier model. Client states of the rounds in `void`, pairs of a first and a last round, are
    then invalid. The state of `kept_round`, or the newest before it, is kept because the server may go back to it.

    `evaluation` are the ways to evaluate the model, or to answer the query, that the client may choose from, preferred first.

    `adversarial`: the client trains on adversarial examples; its training config has the attack. `personal`: evaluation is on
    the client's own part of the test split, not on its validation data. `atoms` and `head` are the served model, if its batch
    norms are to be measured.
    """

    experiment_id: str
    round: int
    state_round: int
    strategy: str
    budget: int
    reference: int
    lr: float
    state_dir: str
    enforced: bool = True
    costs: dict[WorkItem, int] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    void: list[list[int]] = field(default_factory=list)
    kept_round: int = 0
    personal: bool = False
    adversarial: bool = False
    atoms: list[int] = field(default_factory=list)
    head: str = ""
    variant: Variant = field(default_factory=Variant)
    own: dict[str, Any] = field(default_factory=dict)
    evaluation: list[EvaluationStep] = field(default_factory=list)

    def to_record(self) -> ConfigRecord:
        """Return the task as a Flower record; values that it cannot hold become JSON strings."""
        fields = {f.name.replace("_", "-"): getattr(self, f.name) for f in dataclass_fields(self)}
        fields["variant"] = self.variant.to_values()
        fields["costs"] = [[item.to_values(), cost] for item, cost in self.costs.items()]
        mappings = {key: json.dumps(fields[key], separators=(",", ":")) for key in AS_JSON}
        del fields["evaluation"]
        if self.evaluation:  # tasks of training have none
            mappings["evaluation"] = json.dumps([step.to_values() for step in self.evaluation], separators=(",", ":"))
        return ConfigRecord({**fields, **mappings})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> "Task":
        """Read a task. Raises TypeError or KeyError for a missing or unknown field, ValueError for a bad value of a variant."""
        fields = {key.replace("-", "_"): value for key, value in record.items()}
        mappings = {key: json.loads(str(record[key])) for key in AS_JSON}
        costs = {WorkItem.from_values(item): int(cost) for item, cost in mappings["costs"]}
        mappings |= {"variant": Variant.from_values(mappings["variant"]), "costs": costs}
        mappings["evaluation"] = [EvaluationStep(*step) for step in json.loads(str(record.get("evaluation", "[]")))]
        return cls(**{**fields, **mappings})

    @cached_property
    def _steps(self) -> dict[WorkItem, list[WorkItem]]:
        """The listed work items by the item with a plain step."""
        found: dict[WorkItem, list[WorkItem]] = {}
        for item in self.costs:
            found.setdefault(item.plain, []).append(item)
        return found

    def needed(self, item: WorkItem) -> int | None:
        """Return the bytes that a work item needs at least, or None if the server does not list it."""
        return min((self.costs[each] for each in self._steps.get(item, ())), default=None)

    def refused(self, item: WorkItem, allowed: int, doing: str) -> MemoryBudgetExceededError:
        """Return the error for an item of which no listed step fits; it names the smallest. `doing` says what did not fit."""
        smallest = min(self._steps.get(item, [item]), key=lambda each: self.costs.get(each, 0))
        step = f" ({smallest.step})" if smallest.step else ""
        return MemoryBudgetExceededError(self.costs.get(smallest, 0) or self.reference, allowed, doing + step)

    def fitted(self, item: WorkItem, allowed: int) -> WorkItem:
        """Return a work item with the first listed step that takes at most `allowed` bytes, or as it is if there is none."""
        return next((each for each in self._steps.get(item, ()) if self.costs[each] <= allowed), item)

    def evaluated(self, allowed: int, doing: str) -> EvaluationStep:
        """Return the first listed step of an evaluation that takes at most `allowed` bytes; if nothing is enforced, the first.

        Raises MemoryBudgetExceededError if none does; `doing` says what did not fit.
        """
        if not self.enforced:
            return self.evaluation[0] if self.evaluation else EvaluationStep(0)
        for step in self.evaluation:
            if step.bytes <= allowed:
                return step
        raise MemoryBudgetExceededError(
            min((step.bytes for step in self.evaluation), default=self.reference), allowed, doing
        )


class TaskConfig:
    """Base of the dataclasses that hold a strategy's own fields of a task."""

    @classmethod
    def of(cls, task: Task) -> Self:
        """Return the own fields of a task. Raises TypeError for a missing or unknown field."""
        return cls(**task.own)

    def to_values(self) -> dict[str, Any]:
        """Return the fields as values for `Task.own`."""
        return asdict(cast(Any, self))


@dataclass(frozen=True)
class Question:
    """A query of the frozen units that a client holds: `wanted` are content hashes. The message may also carry units."""

    experiment_id: str
    state_dir: str
    wanted: list[str]

    def to_record(self) -> ConfigRecord:
        """Return the fields as a Flower record."""
        return ConfigRecord(asdict(self))

    @classmethod
    def from_record(cls, record: ConfigRecord) -> "Question":
        """Read a query. Raises TypeError for a missing or unknown field."""
        return cls(**cast(dict[str, object], dict(record)))  # type: ignore[arg-type]


def content_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's records as Flower counts them. Empty values, which Flower cannot count, take none.

    Arrays count as they would by themselves: parcels are taken for what is in them.
    """
    return sum(map(_record_bytes, content.values()))


def _record_bytes(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    if isinstance(record, ArrayRecord):
        return parcels.count_bytes(record)
    if isinstance(record, MetricRecord):
        return record.count_bytes()
    counted = ConfigRecord({key: value for key, value in record.items() if value not in ("", b"", [])})
    return counted.count_bytes() + sum(len(key) for key in record if key not in counted)
