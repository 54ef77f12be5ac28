"""The folder that a run writes to: a new one with a unique name, or that of the run to resume; whether a run is finished."""

import logging
import time
import uuid
from pathlib import Path

from piecework.planning.cut import trains_adversarially
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.recovery import Recovery
from piecework.server_app.run_lock import LOCK_FILE
from piecework.strategies import find_method
from piecework.training.settings import Settings, check_resume

BEFORE_SETTINGS = {LOCK_FILE, "settings.toml.tmp"}  # what a run writes before its settings
LOG = logging.getLogger("piecework")
COMPLETED = "completed"  # status of a run whose model, and evaluation if one is due, are written
STOPPED = "stopped"  # status of a run that a signal ended


def resolve_run_dir(settings: Settings) -> RunDir:
    """Return the folder of this run. Raises ValueError if there is no run to resume, or a new run's name is taken."""
    output_dir = Path(settings.output_dir)
    if settings.resume_from == "auto":
        return newest_run(output_dir, settings)
    if settings.resume_from:
        if not (Path(settings.resume_from) / "settings.toml").is_file():
            raise ValueError(f"resume-from = {settings.resume_from!r}: not the folder of a run")
        return RunDir(Path(settings.resume_from))
    if settings.run_name:
        run_dir = RunDir(output_dir / settings.run_name)
        require_new(run_dir)
        return run_dir
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    strategy = settings.strategy.rpartition(":")[2]
    return RunDir(output_dir / f"{strategy}-{short_name(settings.dataset)}-seed{settings.seed}-{now}")


def require_new(run_dir: RunDir) -> None:
    """Raise ValueError if a folder holds a run already, unless that ended before its first checkpoint, or files of others."""
    name, path = f"run-name = {run_dir.path.name!r}", run_dir.path
    if run_dir.has_begun() and not left_nothing(run_dir):
        raise ValueError(
            f"{name}: {path.parent} has this run already; choose a new name or continue it with resume-from"
        )
    others = sorted({each.name for each in path.glob("*")} - BEFORE_SETTINGS)
    if others and not run_dir.has_begun():
        raise ValueError(
            f"{name}: the folder {path} holds {others[0]!r}, but no settings.toml, so it is not a new run's to delete; choose "
            "a new name, or move what the folder holds"
        )


def left_nothing(run_dir: RunDir) -> bool:
    """Return whether a folder's run was killed or stopped before its first checkpoint, or failed before its first record."""
    status, records = summary_status(run_dir) or STOPPED, run_dir.rounds_file
    failed_at_once = status == "failed" and not (records.is_file() and records.stat().st_size)
    any_checkpoint = any(path.suffix != ".tmp" for path in run_dir.checkpoints.glob("*"))
    return not any_checkpoint and (status == STOPPED or failed_at_once)


def short_name(dataset: str) -> str:
    """Return a data set's name for use in a folder name; for the user's own data, that of the file or folder."""
    _, colon, source = dataset.partition(":")
    name = Path(source).name.removesuffix(".npz") if colon else dataset
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def newest_run(output_dir: Path, settings: Settings) -> RunDir:
    """Return the run in `output_dir` with these settings that was started or resumed last, an unfinished one if there is any.

    A completed run that had fewer rounds than these settings ask for is unfinished. Raises ValueError if there is no run.
    """
    found = []
    for path in output_dir.glob("*/settings.toml"):
        run_dir = RunDir(path.parent)
        try:
            old = Settings.from_run_config(run_dir.settings())
        except ValueError:
            continue  # a run of another version cannot be resumed
        if old.hash() == settings.hash() and bool(old.run.superlink) == bool(settings.run.superlink):
            unfinished = not has_completed(run_dir) or settings.num_rounds > old.num_rounds
            found.append((unfinished, path.stat().st_mtime, run_dir.path))
    if not found:
        raise ValueError(f"resume-from = 'auto': no run with these settings in {output_dir.resolve()}")
    unfinished, _, chosen = max(found)
    if not unfinished:
        LOG.warning("resume-from = 'auto': every run with these settings in %s has completed", output_dir.resolve())
    return RunDir(chosen)


def has_completed(run_dir: RunDir) -> bool:
    """Return whether a run's summary says that it has completed; a damaged one says nothing."""
    return summary_status(run_dir) == COMPLETED


def summary_status(run_dir: RunDir) -> object:
    """Return the status in a run's summary; None if it has no summary, and `damaged` if that cannot be read."""
    try:
        return (run_dir.summary() or {}).get("status")
    except CheckpointError:
        return "damaged"


def nothing_left(run_dir: RunDir, settings: Settings, recovery: Recovery) -> bool:
    """Return whether a run has completed and is intact, and these settings ask for no more of it; then the log says so.

    Raises SettingsError if a resumed run may not have these settings.
    """
    damaged = recovery.records_damage or recovery.damaged or recovery.unrecorded
    model = run_dir.path / "model.safetensors"
    if recovery.checkpoint is None or damaged or not has_completed(run_dir) or not model.is_file():
        return False
    check_resume(recovery.checkpoint.values["settings"], settings)
    old = Settings.from_run_config(run_dir.settings())
    attacked = settings.evaluation.autoattack_examples in (0, old.evaluation.autoattack_examples)
    if settings.num_rounds > old.num_rounds or not attacked:
        return False
    last = run_dir.last_complete_round()
    LOG.info(
        "nothing was left to do in %s: it has completed, after round %s (more rounds: --rounds, and with a schedule of rates "
        "--set training.lr-rounds)",
        run_dir.path,
        last,
    )
    return True


def all_written(run_dir: RunDir) -> bool:
    """Return whether a run that has begun wrote its model and, if one is due, the final evaluation, which come last.

    One is due under attack, where the last round was not evaluated, and where all clients measured the batch norms anew because
    the run ended early. All are withdrawn when a run starts or resumes.
    """
    settings, last = Settings.from_run_config(run_dir.settings()), (run_dir.rounds() or [{}])[-1]
    early = last.get("batch_norm") == "static" and last["round"] < settings.num_rounds
    unevaluated = bool(last) and not last.get("personal") and (last["accuracy"] is None or early)
    attacked = (
        trains_adversarially(find_method(settings.strategy).can, settings) or settings.evaluation.autoattack_examples
    )
    return (run_dir.path / "model.safetensors").is_file() and (
        not (attacked or unevaluated) or run_dir.final() is not None
    )
