"""What a client answers: an outcome, figures and arrays. Every number that it may send has its range here.

Back come a ConfigRecord `outcome`, an ArrayRecord `arrays` of parcels (training/parcels.py) and a MetricRecord `metrics`; a
node's answer to the first query also has a ConfigRecord `node`. A refusal for memory is a normal reply, because Flower's Error
carries only a code and a text.

The server reads all answers with `read_answer`. A reader of answers catches UNUSABLE, and nothing else.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, NamedTuple, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError

from piecework.device_profiles.profile import ENDLESS, UNLIMITED
from piecework.models.work_item import WorkItem
from piecework.training.parcels import ParcelError, unpack
from piecework.training.readable import first_of

Status = Literal["ok", "memory", "failed"]
Metrics = dict[str, float | int | list[int]]


class AnswerError(ValueError):
    """A client's answer is unusable. The message is the reason for the records."""


def reason_of(error: BaseException) -> str:
    """Return for the records why an answer is unusable."""
    return str(error) if isinstance(error, AnswerError) else f"{type(error).__name__}: {error}"


LONGEST = 500  # characters of a client's text that are kept
LARGEST = 1e30  # of figures without a range of their own: sums and products of them are still finite
MOST_CLIENTS = 2**20
MOST_EXAMPLES = 10**8  # of a client
MOST_ITEMS = 10**6  # entries of a list
# The figures of training that a client of a private run tells its server: of the device, and how many examples it went through.
TOLD_IN_PRIVATE = frozenset(
    {
        *("predicted-peak", "rss-peak", "rss-growth", "disk-read", "disk-written", "seconds"),
        *("num-examples", "seen", "widths"),
    }
)
MOST_TEXT = 2**18  # characters of a list of work items


def printable(text: str) -> str:
    """Return a client's text as it may enter a record or a terminal: without control characters, at most LONGEST characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:LONGEST])


def finite(value: Any) -> Any:
    """Return a strategy's own figure, or list of figures. Raises ValueError if one of them is not finite, or too large."""
    found = value if isinstance(value, list) else [value]
    if len(found) > MOST_ITEMS or not all(isinstance(n, int | float) and abs(n) <= LARGEST for n in found):
        raise ValueError(
            f"it must be a finite number of at most {LARGEST:g}, or a list of at most {MOST_ITEMS:,} of them"
        )
    return value


Text = Annotated[str, Field(strict=True), AfterValidator(printable)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=ENDLESS)]
Budget = Annotated[int, Field(strict=True, ge=0, le=UNLIMITED)]
Examples = Annotated[int, Field(strict=True, ge=0, le=MOST_EXAMPLES)]
Number = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Hashes = Annotated[list[Annotated[str, Field(strict=True)]], Field(strict=True, max_length=MOST_ITEMS), FailFast()]


class Figures(BaseModel):
    """The figures in an answer to any message. Units are bytes, seconds, FLOP/s and bytes/s; accuracies are from 0 to 1.

    A strategy's own figures need no declaration: they are finite numbers, or lists of them, of a magnitude of at most LARGEST.
    The strategy checks what else it expects of them. `seen` are the examples that each work item was trained on, over all
    epochs. An evaluated `fresh` or `density` is SpaFL's.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, alias_generator=lambda name: name.replace("_", "-")
    )
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(finite)]]

    message_bytes: Bytes = 0
    budget: Budget = 0
    predicted_peak: Bytes = 0
    measured_peak: Bytes = 0
    gpu_peak: Bytes = 0
    rss_peak: Bytes = 0
    disk_read: Bytes = 0
    disk_written: Bytes = 0
    rss_growth: Annotated[int, Field(ge=-ENDLESS, le=ENDLESS)] = 0
    num_examples: Examples = 0
    seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    seen: Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=MOST_ITEMS), FailFast()] = []
    train_loss: Number = 0.0
    val_loss: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0
    val_accuracy: Fraction = 0.0
    val_adversarial_accuracy: Fraction = 0.0
    val_examples: Examples = 0
    density: Fraction = 0.0
    # of a node's answer to the first query
    partition_id: Annotated[int, Field(ge=0, lt=MOST_CLIENTS)] = 0
    num_partitions: Annotated[int, Field(ge=1, le=MOST_CLIENTS)] = 1
    num_validation: Examples = 0
    num_test: Examples = 0
    own_data: Annotated[int, Field(ge=0, le=1)] = 0  # 1: they were not exported from the server's
    memory_available: Annotated[float, Field(ge=0, le=ENDLESS)] = 0.0  # a device may be at its limit for a moment
    flops_per_second: Annotated[float, Field(ge=1e3, le=1e21)] = 1e3
    disk_bandwidth: Annotated[float, Field(ge=1, le=1e15)] = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a task ended. For a refusal for memory, `needed` (0 if unknown) and `allowed` are bytes.

    `done` are the work items that were trained, in order. `reason` says why a task was refused or failed. `note` is a remark
    on a task that succeeded nevertheless, such as a damaged file in the store. `missing` are the content hashes of
    requested frozen units that the client does not hold.
    """

    status: Status
    needed: Bytes = 0
    allowed: Budget = 0
    reason: Text = ""
    note: Text = ""
    missing: Hashes = field(default_factory=list)
    done: tuple[WorkItem, ...] = ()

    def to_record(self) -> ConfigRecord:
        """Return the fields as a Flower record."""
        done = json.dumps([item.to_values() for item in self.done], separators=(",", ":"))
        return ConfigRecord({**asdict(replace(self, done=())), "done": done})


@dataclass(frozen=True)
class NodeInfo:
    """A node's answer to the first query: its software, and its device's name, which is `auto` if it measures itself."""

    device: Text
    software: Text

    def to_record(self) -> ConfigRecord:
        """Return the fields as a Flower record."""
        return ConfigRecord(asdict(self))


class Answer(NamedTuple):
    """A client's answer of which each part is in range. `metrics` has the figures that were sent, by name."""

    outcome: Outcome
    metrics: Metrics
    arrays: ArrayRecord


OUTCOME, NODE = TypeAdapter(Outcome), TypeAdapter(NodeInfo)


def read_answer(content: RecordDict) -> Answer:
    """Read a client's answer; its arrays are views of it.

    Raises one of UNUSABLE, which names the first field that is missing, unknown or out of range.
    """
    outcome = read_outcome(content.config_records["outcome"])
    figures = read_figures(content.metric_records["metrics"])
    try:
        return Answer(outcome, figures, unpack(content.array_records["arrays"]))
    except ParcelError as error:
        raise AnswerError(str(error)) from None


def read_outcome(record: ConfigRecord) -> Outcome:
    """Read an outcome. Raises one of UNUSABLE."""
    values = cast(dict[str, Any], dict(record))
    done = values.pop("done", "[]")
    if not isinstance(done, str) or len(done) > MOST_TEXT:
        raise AnswerError(f"outcome done is {done!r:.100}: expected a text of at most {MOST_TEXT:,} characters")
    items = json.loads(done)
    if not isinstance(items, list):
        raise AnswerError(f"outcome done is {done!r:.100}: expected a list")
    _require_known(values, "outcome", Outcome)
    try:
        return replace(OUTCOME.validate_python(values), done=tuple(map(WorkItem.from_values, items)))
    except ValidationError as error:
        raise AnswerError(f"outcome {first_of(error)}") from None


def read_node(record: ConfigRecord) -> NodeInfo:
    """Read what a node says of itself. Raises one of UNUSABLE."""
    values = dict(record)
    _require_known(values, "node", NodeInfo)
    try:
        return NODE.validate_python(values)
    except ValidationError as error:
        raise AnswerError(f"node {first_of(error)}") from None


def read_figures(record: MetricRecord) -> Metrics:
    """Return the figures that a client sent, each within its range. Raises AnswerError."""
    sent = dict(record)
    try:
        figures = Figures.model_validate(sent).model_dump(by_alias=True)
    except ValidationError as error:
        raise AnswerError(first_of(error)) from None
    return {name: figures[name] for name in sent}


def _require_known(values: dict[str, Any], record: str, kind: type[Outcome | NodeInfo]) -> None:
    if unknown := sorted(set(values) - {each.name for each in fields(kind)}):
        raise AnswerError(f"the {record} has no {unknown[0]!r:.100}")


def reply(message: Message, outcome: Outcome, metrics: Metrics, arrays: ArrayRecord | None = None) -> Message:
    """Return the reply to a message; `arrays` are in parcels, none if none are given."""
    content = RecordDict({"outcome": outcome.to_record(), "metrics": MetricRecord(cast(dict, metrics))})  # type: ignore[type-arg]
    content["arrays"] = arrays if arrays is not None else ArrayRecord()
    return Message(content, reply_to=message)
