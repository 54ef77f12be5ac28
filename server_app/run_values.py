"""What a run remembers from round to round besides its arrays and the state of its strategy: values of its checkpoint."""

import uuid
from typing import Any

from piecework.server_app.records import Checkpoint
from piecework.server_app.round_record import RoundRecord
from piecework.training.settings import Settings, check_resume


def first_values(settings: Settings) -> dict[str, Any]:
    """What a run begins with, as JSON values."""
    return {
        "experiment-id": uuid.uuid4().hex,
        "round": 0,
        "empty-rounds": 0,
        "best": None,
        "since-best": 0,
        "lr-rounds": settings.training.lr_rounds or settings.num_rounds,
    }


def resumed_values(checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """What a checkpoint remembers, for a run with these settings. Raises SettingsError where they do not go together."""
    check_resume(checkpoint.values["settings"], settings)
    return checkpoint.values | ({"lr-rounds": settings.training.lr_rounds} if settings.training.lr_rounds else {})


def note_round(values: dict[str, Any], record: RoundRecord) -> None:
    """Take note of what decides when to stop."""
    values["empty-rounds"] = 0 if record.aggregated else values["empty-rounds"] + 1
    accuracy, best = record.accuracy, values["best"]
    if accuracy is not None:
        better = best is None or accuracy > best
        values["best"] = accuracy if better else best
        values["since-best"] = 0 if better else values["since-best"] + 1


def ends_early(values: dict[str, Any], record: RoundRecord, settings: Settings) -> bool:
    """Whether a run ends before its last round: at `evaluation.target-accuracy`, or when `evaluation.patience` is over."""
    accuracy = record.accuracy or 0.0
    return (
        0 < settings.evaluation.target_accuracy <= accuracy or 0 < settings.evaluation.patience <= values["since-best"]
    )
