"""Messages from the server to a client: a ConfigRecord `task`, and an ArrayRecord `arrays` of parcels (training/parcels.py).

What comes back is in training/answers.py.
"""

import json
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Self, cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import ConfigDict, Field, TypeAdapter

from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import ENDLESS, UNLIMITED
from piecework.federated_data.own_data import Expected
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.training import parcels
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.readable import MessageError, checked, parse

EXPECTED = "expected"
AS_JSON = ("costs", "frozen", "void", "variant", "own")  # Flower's records hold neither mappings nor lists of lists
IN_RECORDS = {"discarded_rounds": "void", "config": "own"}  # fields with another name there
Strict = Field(strict=True)
Round = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=ENDLESS)]
Name = Annotated[str, Field(strict=True, pattern=r"^[\w-]+$", max_length=200)]  # of a folder
Unit = Annotated[str, Field(strict=True, pattern=r"^[\w.]*$", max_length=200)]  # which names a file


@dataclass(frozen=True)
class Task:
    """A server's request to a client in a round."""

    experiment_id: Name
    round: Annotated[int, Field(strict=True, ge=1, lt=2**31)]  # a state of round 0 would pass for none
    state_round: Round  # the newest round whose client state may be used
    strategy: Annotated[str, Strict]
    budget: Annotated[
        int, Field(strict=True, ge=0, le=UNLIMITED)
    ]  # the bytes that the server assumes the client may use
    reference: Annotated[
        int, Field(strict=True, ge=1, le=ENDLESS)
    ]  # the bytes of a reference step, of which emulated ratio budgets are fractions
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    state_dir: Annotated[str, Strict]
    enforced: Annotated[bool, Strict] = True  # the accounting holds the client to the costs, which are true bytes
    costs: dict[WorkItem, Bytes] = field(default_factory=dict)
    frozen: dict[Unit, Annotated[str, Strict]] = field(
        default_factory=dict
    )  # content hashes of units that no client trains any more, not sent
    discarded_rounds: list[Annotated[list[Annotated[int, Strict]], Field(min_length=2, max_length=2)]] = field(
        default_factory=list
    )  # pairs (first, last); client states of them are invalid
    kept_round: Round = 0  # the server may go back to it: its client state is kept, or the newest before it
    personal: Annotated[bool, Strict] = (
        False  # evaluation is on the client's part of the test split, not on its validation data
    )
    adversarial: Annotated[bool, Strict] = (
        False  # the client trains on adversarial examples; its training config has the attack
    )
    atoms: list[Annotated[int, Field(strict=True, ge=0)]] = field(
        default_factory=list
    )  # of the served model, if its batch norms are to be measured
    head: Unit = ""  # of the served model
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
        """Read a task. Raises MessageError, which names the first field that is missing, unknown or out of range."""
        names = {key: field for field, key in IN_RECORDS.items()}
        values = {names.get(key, key.replace("-", "_")): value for key, value in record.items()}
        for key, read in READERS.items():
            if key in record:
                values[names.get(key, key)] = parse(key, record[key], read)
            elif key in AS_JSON:
                raise MessageError(f"the task has no {key}")
        if unknown := sorted(set(values) - {each.name for each in dataclass_fields(cls)}):
            raise MessageError(f"the task has no {unknown[0]!r:.100}")
        return checked(TASK, values, "the task")

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


def read_costs(listed: Any) -> dict[WorkItem, int]:
    """Return the bytes of work items from their list in a record."""
    return {WorkItem.from_values(item): cost for item, cost in listed}


def read_steps(listed: Any) -> list[EvaluationStep]:
    """Return the ways to evaluate from their list in a record."""
    return [STEP.validate_python(asdict(EvaluationStep(*step))) for step in listed]


def as_sent(values: Any) -> Any:
    """Return the values of a field whose type `Task` declares."""
    return values


READERS = {
    "costs": read_costs,
    "frozen": as_sent,
    "void": as_sent,
    "variant": Variant.from_values,
    "own": as_sent,
    "evaluation": read_steps,
}
TASK, STEP = TypeAdapter(Task), TypeAdapter(EvaluationStep)


class TaskConfig:
    """Base of the dataclasses that hold a strategy's own fields of a task."""

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)  # of a plugin's own

    @classmethod
    def of(cls, task: Task) -> Self:
        """Return the own fields of a task. Raises MessageError for one that is missing, unknown or of another type."""
        if unknown := sorted(task.config.keys() - {each.name for each in dataclass_fields(cast(Any, cls))}):
            raise MessageError(f"the task has no {unknown[0]!r:.100} of {cls.__name__}")
        return checked(
            cast(TypeAdapter[Self], _adapter(cast(Any, cls))), task.config, f"what the task says for {cls.__name__}"
        )

    def to_values(self) -> dict[str, Any]:
        """Return the fields as values for `Task.config`."""
        return asdict(cast(Any, self))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@dataclass(frozen=True)
class Question:
    """A query of the frozen units that a client holds: `wanted` are content hashes. The message may also carry units."""

    experiment_id: Name
    state_dir: Annotated[str, Strict]
    wanted: list[Annotated[str, Strict]]

    def to_record(self) -> ConfigRecord:
        """Return the fields as a Flower record."""
        return ConfigRecord(asdict(self))

    @classmethod
    def from_record(cls, record: ConfigRecord) -> "Question":
        """Read a query. Raises MessageError for a field that is missing, unknown or of another type."""
        if unknown := sorted(set(record) - {each.name for each in dataclass_fields(cls)}):
            raise MessageError(f"the question has no {unknown[0]!r:.100}")
        return checked(QUESTION, dict(record), "the question")


QUESTION = TypeAdapter(Question)


def expected_record(expected: Expected) -> ConfigRecord:
    """Return what a run expects of a node's own data as a record for a message's content, under EXPECTED."""
    return ConfigRecord({"data": expected.to_text()})


def read_expected(content: RecordDict) -> Expected | None:
    """Return what a message says of that, or None. Raises MessageError."""
    record = content.config_records.get(EXPECTED)
    return None if record is None else parse("data", record.get("data"), Expected.from_values)


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
