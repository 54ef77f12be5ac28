"""A run's records as reports and comparisons read them: what they need is there, and of the type that it should be.

Keys of a strategy's own have no declaration here: `with_details` says which one is wrong if a report of them fails.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piecework.device_profiles.documents import abbreviate
from piecework.models.model_file import ModelFileError, count_parameters, description
from piecework.server_app.records import CheckpointError, RunDir

MODEL = "model.safetensors"
Record = dict[str, Any]
Number = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e15)]
Share = Annotated[float, Field(ge=0, le=1)]
Loss = Annotated[float, Field(allow_inf_nan=True)] | None  # it may have diverged


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Client(_Row):
    client: Number
    device: str
    status: str
    reason: str
    budget: Number
    needed: Number
    allowed: Number | None = None
    predicted_peak: Number
    measured_peak: Number
    evaluation_peak: Number = 0
    examples: Number = 0
    trained: list[str] = []
    pieces: list[list[Number]] = []
    step: str = ""
    step_flops: Annotated[float, Field(ge=0, le=1e15)] = 1.0
    disk_read: Number = 0
    disk_written: Number = 0


class _Trained(_Row):
    part: str
    distilled: bool


class _Late(_Row):
    client: Number
    device: str
    examples: Number
    trained: list[str]


class _Answers(_Row):
    peak_over_budget: Annotated[float, Field(ge=0)] | None = None


class _Round(_Row):
    round: Number
    stage: str
    accuracy: Share | None
    loss: Loss
    train_loss: Loss
    client_accuracy: Share | None
    adversarial_accuracy: Share | None = None
    client_adversarial_accuracy: Share | None = None
    accuracy_by_device: dict[str, Share]
    asked: Number
    answered: Number
    failed: Number
    bytes_down: Number
    bytes_up: Number
    bytes_evaluation: Number
    bytes_query: Number = 0
    enforced: bool
    seconds: Seconds
    simulated_seconds: Seconds = 0.0
    lr: Annotated[float, Field(ge=0)] = 0.0
    lr_schedule: str = ""
    personal: bool = False
    modules: Number = 1
    batch_norm: str = "none"
    devices: dict[str, Number] = {}
    clients: list[_Client]
    trained: list[_Trained] = []
    evaluation: _Answers | None = None
    query: _Answers | None = None
    statistics: _Answers | None = None
    late_replies: list[Any] = []
    late_used: list[_Late] = []
    late_dropped: list[Any] = []


class _WithTrained(_Round):
    aggregated: bool
    examples: Annotated[int, Field(ge=1, lt=2**63)]


class _WithRate(_Round):
    lr_schedule: str


class _Model(_Row):
    accuracy: Share
    clients: Annotated[int, Field(ge=1, lt=2**63)]


class _Models(_Row):
    models: dict[str, _Model] = {}


class _Summary(_Models):
    status: str
    reason: str
    rounds: Number
    seconds: Seconds


class _AutoAttack(_Row):
    images: Number
    accuracy: Share
    clean_accuracy: Share
    after: dict[str, Share]
    warnings: list[str]


class _Final(_Row):
    accuracy: Share
    adversarial_accuracy: Share | None
    autoattack: _AutoAttack | None = None


class _FinalUnderAttack(_Final):
    attacked: Number
    attack_steps: Number


class _Coverage(_Row):
    says: str


def read_rounds(run_dir: RunDir) -> list[Record]:
    """Return the records of all rounds. Raises CheckpointError, which names the file, the line and the key."""
    rounds = run_dir.rounds()
    for number, record in enumerate(rounds, start=1):
        check_round(record, f"{run_dir.rounds_file}, line {number}")
    return rounds


def check_round(record: Record, where: str) -> None:
    """Raise CheckpointError, which names the key, unless a round's record is as a report needs it. `where` is its place."""
    kinds: list[type[_Row]] = [_Round]
    kinds += [_WithTrained] if record.get("trained") else []
    kinds += [_WithRate] if "lr" in record else []
    for kind in kinds:
        _require(kind, record, where)


def read_summary(run_dir: RunDir) -> Record | None:
    """Return how a run ended, or None. Raises CheckpointError."""
    return _check_present(_Summary, run_dir.summary(), run_dir, "summary.json")


def read_final(run_dir: RunDir) -> Record | None:
    """Return the evaluation of the trained model, or None. Raises CheckpointError."""
    found = run_dir.final()
    attacked = found is not None and found.get("adversarial_accuracy") is not None
    return _check_present(_FinalUnderAttack if attacked else _Final, found, run_dir, "final.json")


def read_size(run_dir: RunDir) -> int | None:
    """Return how many parameters the trained model has; None before it is saved, and where each client has its own.

    Raises CheckpointError for a file that cannot be read.
    """
    file = run_dir.path / MODEL
    try:
        return None if not file.is_file() or "personal" in description(file) else count_parameters(file)
    except ModelFileError as error:
        raise CheckpointError(str(error)) from error


def read_models(run_dir: RunDir) -> dict[str, Record]:
    """Return the evaluation of the models that devices deploy, by name. Raises CheckpointError."""
    found = run_dir.models()
    _require(_Models, {"models": found}, str(run_dir.path / "models.json"))
    return found


def read_coverage(run_dir: RunDir) -> Record | None:
    """Return which clients can train which part of the model, or None. Raises CheckpointError."""
    return _check_present(_Coverage, run_dir.coverage(), run_dir, "coverage.json")


@contextmanager
def with_details(run_dir: RunDir) -> Iterator[None]:
    """Turn a failure on records or settings that lack something, or have it in another form, into a CheckpointError."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(
            f"{run_dir.path}: the run's records or settings have no {error}, which its report needs"
        ) from error
    except (TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise CheckpointError(
            f"{run_dir.path}: the run's records or settings are not as Piecework writes them ({type(error).__name__}: {error})"
        ) from error


def _check_present(kind: type[_Row], found: Record | None, run_dir: RunDir, name: str) -> Record | None:
    if found is not None:
        _require(kind, found, str(run_dir.path / name))
    return found


def _require(kind: type[_Row], record: Record, where: str) -> None:
    try:
        kind.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = " ".join(map(str, first["loc"]))
        given = "is missing" if first["type"] == "missing" else f"= {abbreviate(first['input'])}: {first['msg']}"
        raise CheckpointError(f"{where}, is damaged, or of another version of Piecework: {place} {given}") from None
