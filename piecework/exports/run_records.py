"""A run's records for other programs: tables of its rounds and of its clients as CSV, and its curves for TensorBoard."""

import csv
import json
import shlex
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from piecework.exports.formats import Exported, ExportError
from piecework.exports.target import filling
from piecework.report.read_records import read_rounds, read_summary, with_details
from piecework.server_app.records import RunDir
from piecework.server_app.trackers.scalars import parameters, round_scalars
from piecework.server_app.trackers.tensorboard import TensorBoard

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute; a client chooses the words of its reason


def write_csv(run: Path, folder: Path) -> Exported:
    """Write rounds.csv, a line a round, and clients.csv, a line a client and round, into a folder.

    A figure has the name that trackers have for it, and no value in a round that lacks it. Raises CheckpointError, and
    ExportError for a folder that cannot be written.
    """
    rounds = _rounds_of(RunDir(run))
    with with_details(RunDir(run)):
        of_rounds = [{"round": each["round"], "stage": each["stage"], **round_scalars(each)} for each in rounds]
        of_clients = [{"round": each["round"], **client} for each in rounds for client in each["clients"]]
    with filling(folder) as unchecked:
        _write_table(unchecked / "rounds.csv", of_rounds)
        _write_table(unchecked / "clients.csv", of_clients)
    lines = {"rounds.csv": len(of_rounds), "clients.csv": len(of_clients)}
    return Exported(folder, tuple(f"{name}: {count} lines" for name, count in lines.items()), {"lines": lines})


def write_tensorboard(run: Path, folder: Path) -> Exported:
    """Write a file of events into a folder, as a run with `run.track = tensorboard` does.

    Raises CheckpointError, or ExportError, also if the folder has events, which TensorBoard would mix with these.
    """
    if find_spec("tensorboard") is None:
        raise ExportError("the format tensorboard needs TensorBoard: pip install 'piecework[tensorboard]'")
    if any(folder.glob("events.out.tfevents.*")):
        raise ExportError(
            f"{folder} has TensorBoard's events of this run already: delete it, or name another folder (--out)"
        )
    run_dir = RunDir(run)
    rounds, summary = _rounds_of(run_dir), read_summary(run_dir)
    with with_details(run_dir), filling(folder) as unchecked:
        tracker = TensorBoard(unchecked)
        tracker.begin(parameters(run_dir.settings()))
        for record in rounds:
            tracker.round(record["round"], record)
        tracker.end(summary or {})
    command = shlex.join(["tensorboard", "--logdir", str(folder)])
    return Exported(folder, (f"{len(rounds)} rounds: {command}",), {"rounds": len(rounds)})


def _rounds_of(run_dir: RunDir) -> list[dict[str, Any]]:
    run_dir.settings()  # it is the folder of a run
    if not (rounds := read_rounds(run_dir)):
        raise ExportError(f"{run_dir.path} has no round yet, so there is nothing to export")
    return rounds


def _write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with the columns of all of them, in the order in which they appear first."""
    rows = list(rows)
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: Any) -> Any:
    """Return a value as a cell: a list as JSON, a number of no fraction without one, and a text that is only a text."""
    if isinstance(value, list | dict):
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
