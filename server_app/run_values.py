"""The values of a checkpoint that a run keeps from round to round, in addition to arrays and the strategy's state."""

import json
import logging
import uuid
from typing import Any

from piecework.client_app.disk import write_atomically
from piecework.federation.privacy import Privacy
from piecework.server_app.records import Checkpoint, RunDir, read_object
from piecework.server_app.round_record import RoundRecord
from piecework.training.settings import Settings, check_resume

LEDGER = "privacy.json"  # of a private run
LOG = logging.getLogger("piecework")


def first_values(settings: Settings) -> dict[str, Any]:
    """Return the values of a new run, as JSON values."""
    return {
        "experiment-id": uuid.uuid4().hex,
        "round": 0,
        "empty-rounds": 0,
        "best": None,
        "since-best": 0,
        "late": [],
        "pace": {},
        "stragglers": [],
        "lr-rounds": settings.training.lr_rounds or settings.num_rounds,
    }


def resume_values(checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """Return the values of a checkpoint for a run with these settings. Raises SettingsError if they are incompatible."""
    check_resume(checkpoint.values["settings"], settings)
    return (
        {"late": [], "pace": {}, "stragglers": []}
        | checkpoint.values
        | ({"lr-rounds": settings.training.lr_rounds} if settings.training.lr_rounds else {})
    )


def note_round(values: dict[str, Any], record: RoundRecord) -> None:
    """Update the values that decide when the run stops: empty rounds, the best accuracy, and evaluations since then."""
    values["empty-rounds"] = 0 if record.aggregated else values["empty-rounds"] + 1
    accuracy, best = record.accuracy, values["best"]
    if accuracy is not None:
        better = best is None or accuracy > best
        values["best"] = accuracy if better else best
        values["since-best"] = 0 if better else values["since-best"] + 1


def ends_early(values: dict[str, Any], record: RoundRecord, settings: Settings) -> bool:
    """Return whether a run ends early: at `evaluation.target-accuracy`, or when `evaluation.patience` is exhausted."""
    accuracy = record.accuracy or 0.0
    return (
        0 < settings.evaluation.target_accuracy <= accuracy or 0 < settings.evaluation.patience <= values["since-best"]
    )


def known_privacy(values: dict[str, Any], run_dir: RunDir, settings: Settings) -> dict[str, Any]:
    """Return what a private run kept of its privacy: in a checkpoint, and what it has released since; nothing for a new run.

    A round that was shown and is repeated counts twice and gets other noise, because clients may answer otherwise. With a
    known seed nothing is private, and a resumed run is the unbroken one. Raises CheckpointError.
    """
    known: dict[str, Any] = values.get("privacy", {})
    if settings.privacy.seed:
        return known
    ledger = read_object(run_dir.path / LEDGER) or {}
    return known | {"releases": max(known.get("releases", 0), int(ledger.get("releases", 0)))}


def note_releases(run_dir: RunDir, privacy: Privacy | None) -> None:
    """Write how many models a private run has released, before the last of them is shown. No new start forgets it."""
    if privacy is not None:
        write_atomically(run_dir.path / LEDGER, json.dumps({"releases": privacy.releases}).encode())


def is_spent(privacy: Privacy | None, server_round: int) -> bool:
    """Return whether a private run ends before a round, because that would spend more than its limit, and log it."""
    if privacy is None or not privacy.exhausted:
        return False
    LOG.warning(
        "the run ends before round %d: it has spent epsilon = %.4g of privacy.epsilon = %g, and this round would bring that to "
        "%.4g",
        server_round,
        privacy.spent,
        privacy.limit,
        privacy.epsilon(privacy.releases + 1),
    )
    return True
