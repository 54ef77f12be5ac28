"""A run's records as CSV and as TensorBoard's events."""

import csv
import json
from pathlib import Path

import pytest
from helpers import TRIO, fleet_json, run_local

from benchmarks.track_resume import tensorboard_curves
from piecework.exports.formats import ExportError, export_run
from piecework.exports.run_records import write_csv, write_tensorboard
from piecework.server_app.records import CheckpointError, RunDir

ONE = TRIO | {"fleet": fleet_json(rich=2.0, poor=0.01), "strategy": "fedavg", "training__local_iterations": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two rounds of three clients, of which one has too little memory; the second round is not evaluated."""
    return run_local(tmp_path_factory.mktemp("export"), **ONE, num_rounds=2, evaluation__every=2)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_tables_have_a_line_a_round_and_a_line_a_client(run: RunDir, tmp_path: Path) -> None:
    found = export_run(run.path, "csv", tmp_path / "out")
    assert (found.path, found.lines) == (tmp_path / "out", ("rounds.csv: 2 lines", "clients.csv: 6 lines"))
    records = run.rounds()
    rounds, clients = table(tmp_path / "out" / "rounds.csv"), table(tmp_path / "out" / "clients.csv")
    assert [(row["round"], row["asked"], row["failed"]) for row in rounds] == [("1", "3", "1"), ("2", "3", "1")]
    assert [row["accuracy"] for row in rounds] == ["", str(records[1]["accuracy"])]
    assert [row["answered_by_device/poor"] for row in rounds] == ["0", "0"]
    assert [float(row["seconds"]) for row in rounds] == [record["seconds"] for record in records]
    assert len(clients) == 6
    for row, client in zip(clients, [each for record in records for each in record["clients"]], strict=True):
        assert row.keys() == {"round", *client}
        assert (row["device"], row["status"], int(row["budget"])) == tuple(
            client[k] for k in ("device", "status", "budget")
        )
        assert json.loads(row["pieces"]) == client["pieces"]


def test_a_reason_is_no_formula(run: RunDir, tmp_path: Path) -> None:
    """A client words the reason of its failure, and a spreadsheet computes what begins like a formula."""
    changed = RunDir(tmp_path / "run")
    changed.path.mkdir()
    (changed.path / "settings.toml").write_bytes((run.path / "settings.toml").read_bytes())
    record = run.rounds()[0]
    record["clients"][0] |= {"reason": '=HYPERLINK("http://x.example")', "note": "-1"}
    changed.append_round(record)
    write_csv(changed.path, tmp_path)
    assert table(tmp_path / "clients.csv")[0]["reason"] == '\'=HYPERLINK("http://x.example")'
    assert table(tmp_path / "clients.csv")[0]["note"] == "'-1"


def test_events_have_the_curves_of_the_records(run: RunDir, tmp_path: Path) -> None:
    found = export_run(run.path, "tensorboard", tmp_path / "an out")
    assert found.lines == (f"2 rounds: tensorboard --logdir '{found.path}'",)
    curves, _ = tensorboard_curves(found.path)
    assert curves["accuracy"] == [(2, pytest.approx(run.rounds()[1]["accuracy"]))]
    assert [step for step, _ in curves["train_loss"]] == [1, 2]
    with pytest.raises(ExportError, match="has TensorBoard's events of this run already"):
        export_run(run.path, "tensorboard", tmp_path / "an out")


def test_what_is_no_run_or_has_no_round_is_refused(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        write_csv(tmp_path, tmp_path / "out")
    (tmp_path / "settings.toml").write_bytes((run.path / "settings.toml").read_bytes())
    with pytest.raises(ExportError, match="has no round yet"):
        write_tensorboard(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
