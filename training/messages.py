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
from piecework.federated_data.own_data import Expected
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.training import parcels
from piecework.training.evaluation_step import EvaluationStep

EXPECTED = "expected"
AS_JSON = ("costs", "frozen", "void", "variant", "own")  # Flower's records hold neither mappings nor lists of lists
IN_RECORDS = {"discarded_rounds": "void", "config": "own"}  # fields with another name there


@dataclass(frozen=True)
class Task:
    """A server's request to a client in a round."""

    experiment_id: str
    round: int
    state_round: int  # the newest round whose client state may be used
    strategy: str
    budget: int  # the bytes that the server assumes the client may use
    reference: int  # the bytes of a reference step, of which emulated ratio budgets are fractions
    lr: float
    state_dir: str
    enforced: bool = True  # the accounting holds the client to the costs, which are true bytes
    costs: dict[WorkItem, int] = field(default_factory=dict)  # bytes
    frozen: dict[str, str] = field(
        default_factory=dict
    )  # content hashes of units that no client trains any more, not sent
    discarded_rounds: list[list[int]] = field(
        default_factory=list
    )  # pairs (first, last); client states of them are invalid
    kept_round: int = 0  # the server may go back to it: its client state is kept, or the newest before it
    personal: bool = False  # evaluation is on the client's part of the test split, not on its validation data
    adversarial: bool = False  # the client trains on adversarial examples; its training config has the attack
    atoms: list[int] = field(default_factory=list)  # of the served model, if its batch norms are to be measured
    head: str = ""  # of the served model
    variant: Variant = field(default_factory=Variant)  # the network that the client builds from the run's model
    config: dict[str, Any] = field(default_factory=dict)  # the strategy's own fields
    evaluation: list[EvaluationStep] = field(
        default_factory=list
    )  # ways to evaluate or to answer a query, preferred first

    def to_record(self) -> ConfigRecord:
        """Return the task as a Flower record; values that it cannot hold become JSON strings."""
        names = {f.name: IN_RECORDS.get(f.name, f.name.replace("_", "-")) for f in dataclass_fields(self)}
        fields = {names[name]: getattr(self, name) for name in names}
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
        mappings = {key: json.loads(str(record[key])) for key in AS_JSON}
        costs = {WorkItem.from_values(item): int(cost) for item, cost in mappings["costs"]}
        mappings |= {"variant": Variant.from_values(mappings["variant"]), "costs": costs}
        mappings["evaluation"] = [EvaluationStep(*step) for step in json.loads(str(record.get("evaluation", "[]")))]
        names = {key: field for field, key in IN_RECORDS.items()}
        return cls(**{names.get(key, key.replace("-", "_")): value for key, value in {**record, **mappings}.items()})

    @cached_property
    def _steps(self) -> dict[WorkItem, list[WorkItem]]:
        """The listed work items by the item with a plain step."""
        found: dict[WorkItem, list[WorkItem]] = {}
        for item in self.costs:
            found.setdefault(item.plain, []).append(item)
        return found

    def needed_bytes(self, item: WorkItem) -> int | None:
        """Return the bytes that a work item needs at least, or None if the server does not list it."""
        return min((self.costs[each] for each in self._steps.get(item, ())), default=None)

    def refusal(self, item: WorkItem, allowed: int, doing: str) -> MemoryBudgetExceededError:
        """Return the error for an item of which no listed step fits; it names the smallest. `doing` says what did not fit."""
        smallest = min(self._steps.get(item, [item]), key=lambda each: self.costs.get(each, 0))
        step = f" ({smallest.step})" if smallest.step else ""
        return MemoryBudgetExceededError(self.costs.get(smallest, 0) or self.reference, allowed, doing + step)

    def fit_item(self, item: WorkItem, allowed: int) -> WorkItem:
        """Return a work item with the first listed step that takes at most `allowed` bytes, or as it is if there is none."""
        return next((each for each in self._steps.get(item, ()) if self.costs[each] <= allowed), item)

    def choose_evaluation(self, allowed: int, doing: str) -> EvaluationStep:
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
        return cls(**task.config)

    def to_values(self) -> dict[str, Any]:
        """Return the fields as values for `Task.config`."""
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


def expected_record(expected: Expected) -> ConfigRecord:
    """Return what a run expects of a node's own data as a record for a message's content, under EXPECTED."""
    return ConfigRecord({"data": expected.to_text()})


def read_expected(content: RecordDict) -> Expected | None:
    """Return what a message says of that, or None."""
    record = content.config_records.get(EXPECTED)
    return None if record is None else Expected.from_text(str(record["data"]))


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
