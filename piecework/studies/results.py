"""The accuracies of a run that has ended, from its folder."""

from collections.abc import Sequence
from pathlib import Path

from piecework.report.read_records import Record, read_final, read_rounds, read_summary
from piecework.server_app.records import CheckpointError, RunDir

Evaluations = list[tuple[int, float]]  # round, accuracy


def evaluations(rounds: Sequence[Record], final: Record | None, measure: str) -> Evaluations:
    """Return the evaluated rounds with their accuracies by `measure`.

    The evaluation of the trained model, `final`, is that of the last round, in whose place it stands.
    """
    found = {record["round"]: record[measure] for record in rounds if record.get(measure) is not None}
    if rounds and final is not None and final.get(measure) is not None:
        found[rounds[-1]["round"]] = final[measure]
    return sorted(found.items())


def whole_rounds(run_dir: RunDir) -> list[Record]:
    """Return the records of all rounds of a run that has ended. Raises CheckpointError if some are damaged or missing."""
    rounds, summary = read_rounds(run_dir), read_summary(run_dir)
    if summary is not None and len(rounds) != summary["rounds"]:
        raise CheckpointError(
            f"{run_dir.rounds_file} is damaged: it has the records of {len(rounds)} rounds, and the run's summary counts "
            f"{summary['rounds']}. Move the run's folder away, and `run` starts it again"
        )
    return rounds


def last_accuracy(folder: Path, measure: str) -> float | None:
    """Return the accuracy of the last evaluation of a run that has ended, or None without one. Raises CheckpointError."""
    run_dir = RunDir(folder)
    found = evaluations(whole_rounds(run_dir), read_final(run_dir), measure)
    return found[-1][1] if found else None
