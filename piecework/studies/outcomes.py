"""How the process of a run ended, in words, and whether its failure is a result (failures.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from piecework.commands.runs import remove
from piecework.device_profiles.profile import format_percent
from piecework.device_profiles.units import format_seconds
from piecework.models.model_file import ModelFileError, description
from piecework.report.read_records import MODEL
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.run_folder import has_completed
from piecework.server_app.run_lock import writer
from piecework.studies.child import PROMPT
from piecework.studies.failures import reason_of, result_of
from piecework.studies.notes import beside
from piecework.studies.results import last_accuracy

TERMINATED = 143  # exit code after SIGTERM
ENDED_BY_SIGNAL = (130, TERMINATED)
HOW_TO_GO_ON = "resume it: "  # begins the last line of a run that did not complete (how_to_go_on in cli.py)


@dataclass(frozen=True)
class Outcome:
    """How a process ended, in words; if the run failed its reason, and whether that is a result (`final`)."""

    text: str
    failed: str = ""
    final: bool = False


def how_it_ended(
    folder: Path,
    code: int,
    before: tuple[int, int] | None,
    stopped: str,
    command: str = "run",
    *,
    keeps_models: bool = False,
) -> Outcome:
    """Return how the process of a run ended. `stopped` says why it was asked to end, if it was.

    `before` is the version of the summary that an earlier process left, `command` what goes on with the run. Of a completed run
    the clients' stores are removed, but with `keeps_models` not those that have the clients' own models.
    """
    run_dir = RunDir(folder)
    if has_completed(run_dir):
        stores = [path for path in (folder / "clients").glob("*") if path.is_dir()]
        if not (keeps_models and has_own_models(folder)):
            remove(stores)  # nothing will resume from them
        return Outcome(f"has completed: {figures(folder)}")
    after = f"after round {run_dir.last_complete_round()}"
    if stopped:
        return Outcome(f"was stopped {after}, because {stopped}; `{command}` goes on with it")
    if code < 0 or code in ENDED_BY_SIGNAL:
        return Outcome(f"was ended {after} by a signal (exit code {code}); the next `{command}` goes on with it")
    own = run_dir.summary_version() != before
    if own and (result := result_of(run_dir)):
        return Outcome(f"FAILED: {result}\n  log: {beside(folder, 'log')}", result, final=True)
    reason = (reason_of(run_dir) if own else "") or reason_in_log(folder) or f"exit code {code}"
    if f"{folder} is being written by" in reason or writer(folder) is not None:
        return Outcome(f"is left to another: {reason}")
    return Outcome(f"FAILED, which is no result: {reason}\n  log: {beside(folder, 'log')}", reason)


def has_own_models(folder: Path) -> bool:
    """Return whether the clients of a run have models of their own, which lie in their stores alone."""
    try:
        return bool(description(folder / MODEL).get("personal"))
    except ModelFileError:
        return False


def reason_in_log(folder: Path) -> str:
    """Return in a line why a run failed, by what its last process printed."""
    log = beside(folder, "log").read_text(encoding="utf-8", errors="replace")
    return reason_in(log.rpartition(PROMPT)[2].splitlines())


def reason_in(lines: Sequence[str]) -> str:
    """Return the last line that says that it is an error, else the last one that says more than how to go on; else nothing."""
    said = [line for line in lines if line.strip() and not line.startswith(HOW_TO_GO_ON)]
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    return (errors or said or [""])[-1]


def figures(folder: Path) -> str:
    """Return accuracy and time of a completed run in words."""
    try:
        accuracy = last_accuracy(folder, "accuracy")
    except CheckpointError as error:
        return str(error)
    return f"accuracy {format_percent(accuracy, 1)}, {format_seconds(RunDir(folder).seconds())}"
