"""A run whose files were damaged goes on from the checkpoint before; nothing is thrown away, and errors name file and line."""

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_helpers import files_of_at_most
from flwr.app import Array, ArrayRecord
from helpers import TRIO, few_digits, model_of, run_local, same, tiny_settings
from typer.testing import CliRunner

from piecework.cli import app
from piecework.client_app.disk import StorageError
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.server_app.records import CheckpointError, RunDir
from piecework.training.settings import Settings

SETTINGS = TRIO | {"strategy": "fedavg", "num_rounds": 4}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Four rounds; checkpoints of rounds 1, 3 and 4."""
    return run_local(tmp_path_factory.mktemp("finished"), **SETTINGS)


@pytest.fixture
def run(finished: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(finished.path, tmp_path / "run")))


def resume(run: RunDir) -> RunDir:
    return run_local(run.path.parent, resume_from=str(run.path), **SETTINGS)


def lines(run: RunDir) -> list[bytes]:
    return run.rounds_file.read_bytes().splitlines()


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.slow
@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(
    run: RunDir, finished: RunDir, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run.checkpoints / "round-00004"
    spoil(newest / file)
    damaged = (newest / file).read_bytes()
    resume(run)
    assert [record["round"] for record in run.rounds()] == [1, 2, 3, 4]
    assert same(model_of(run), model_of(finished))
    assert f"{newest}" in caplog.text
    assert "is damaged" in caplog.text
    assert "the run continues from round 3" in caplog.text
    assert (run.checkpoints / "damaged-round-00004" / file).read_bytes() == damaged


def test_without_a_checkpoint_that_can_be_used_nothing_is_touched(run: RunDir) -> None:
    for checkpoint in run.checkpoint_paths():
        spoil(checkpoint / "arrays.safetensors")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(CheckpointError) as caught:
        resume(run)
    for name in ("round-00001", "round-00003", "round-00004"):
        assert f"{run.checkpoints / name} is damaged: arrays.safetensors does not match" in str(caught.value)
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


NO_RECORDS = {
    "garbage": b"\xff\x00garbage",
    "cut short": b'{"round":3,"stage":"","acc',
    "no object": b"[1,2]",
    "no round": b'{"stage":""}',
    "empty": b"",
}


@pytest.mark.parametrize("kind", NO_RECORDS)
def test_a_damaged_line_is_named_and_what_stands_before_it_is_recovered(
    run: RunDir, finished: RunDir, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = lines(run)
    spoiled = b"\n".join([*good[:2], NO_RECORDS[kind], good[3], b""])
    run.rounds_file.write_bytes(spoiled)
    where = f"{run.rounds_file}, line 3, is damaged"
    with pytest.raises(CheckpointError) as caught:
        run.rounds()
    assert where in str(caught.value)
    resume(run)
    assert where in caplog.text
    assert "the run continues from round 1" in caplog.text  # of the checkpoints 1, 3 and 4
    assert [record["round"] for record in run.rounds()] == [1, 2, 3, 4]
    assert lines(run)[0] == good[0]
    assert run.rounds_file.with_name("rounds.jsonl.damaged").read_bytes() == spoiled
    assert same(model_of(run), model_of(finished))
    kept = {path.name for path in run.checkpoints.iterdir()}
    assert {"unrecorded-round-00003", "unrecorded-round-00004"} <= kept
    assert run.summary()["status"] == "completed"


@pytest.mark.slow
def test_damaged_files_of_several_times_are_all_kept(run: RunDir) -> None:
    for number in (1, 2):
        run.rounds_file.write_bytes(b"\n".join([*lines(run)[:2], b"%d" % number, b""]))
        resume(run)
    names = ("rounds.jsonl.damaged", "rounds.jsonl.damaged-2")
    assert [run.rounds_file.with_name(name).read_bytes().splitlines()[2] for name in names] == [b"1", b"2"]


def test_records_that_two_processes_wrote_are_damaged(run: RunDir) -> None:
    run.rounds_file.write_bytes(b"\n".join([*lines(run), lines(run)[2], b""]))
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl, line 5, is damaged: round 3 follows round 4"):
        run.rounds()


def test_a_checkpoint_whose_record_was_lost_is_passed_over(run: RunDir, finished: RunDir) -> None:
    """A power cut may take the end of the records, though the checkpoint after it was written."""
    run.rounds_file.write_bytes(run.rounds_file.read_bytes()[:-20])
    resume(run)
    assert [record["round"] for record in run.rounds()] == [1, 2, 3, 4]
    assert same(model_of(run), model_of(finished))


def test_the_first_line_damaged_leaves_no_checkpoint(run: RunDir) -> None:
    run.rounds_file.write_bytes(b"x\n" + run.rounds_file.read_bytes())
    before = run.rounds_file.read_bytes()
    with pytest.raises(CheckpointError, match="has no usable checkpoint") as caught:
        resume(run)
    assert f"{run.rounds_file}, line 1, is damaged" in str(caught.value)
    assert run.rounds_file.read_bytes() == before


@pytest.mark.parametrize("command", ["report", "compare"])
def test_readers_name_file_and_line(run: RunDir, command: str) -> None:
    run.rounds_file.write_bytes(b"\n".join([*lines(run)[:1], b"{", b""]))
    done = CliRunner().invoke(app, [command, str(run.path)])
    assert done.exit_code == 2
    assert f"{run.rounds_file}, line 2, is damaged" in done.stderr


@pytest.mark.parametrize("name", ["summary.json", "final.json"])
def test_readers_name_a_damaged_document(run: RunDir, name: str) -> None:
    (run.path / name).write_text('{"status"')
    done = CliRunner().invoke(app, ["report", str(run.path)])
    assert done.exit_code == 2
    assert f"{run.path / name} is damaged" in done.stderr


# ---- a full disk


@pytest.mark.slow
def test_a_run_that_met_a_full_disk_says_where_and_goes_on(
    finished: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the checkpoint of round 2. What ended it is told, although no summary can be written either."""
    run, save = RunDir(tmp_path / "run"), RunDir.save_checkpoint
    with ExitStack() as until_freed, monkeypatch.context() as patch:

        def save_checkpoint(self: RunDir, arrays: Any, values: Any, kept: Any) -> None:
            if values["round"] == 2:
                until_freed.enter_context(files_of_at_most(100))
            save(self, arrays, values, kept)

        patch.setattr(RunDir, "save_checkpoint", save_checkpoint)
        own = SETTINGS | {"dataset": f"npz:{few_digits()}", "output_dir": str(tmp_path)}
        asked = dict(tiny_settings(**own).to_run_config().items() - Settings().to_run_config().items())
        done = CliRunner().invoke(app, ["run", *(f"--set={key}={value}" for key, value in asked.items())])
    assert done.exit_code == 1
    said = done.stderr
    assert f"{run.checkpoints / 'round-00002'} cannot be written: Error while serializing: I/O error: File too" in said
    assert "bytes are free there. Free some: old runs can be deleted, and `piecework clean` removes" in said
    assert f"The run can then be resumed: piecework run --set resume-from={run.path}" in said
    assert f"{run.path / 'summary.json'} cannot be written: [Errno 27] File too large" in caplog.text
    assert [path.name for path in run.checkpoints.iterdir()] == ["round-00001"]
    assert invoke("--set", f"resume-from={run.path}").exit_code == 0
    assert [record["round"] for record in run.rounds()] == [1, 2, 3, 4]
    assert same(model_of(run), model_of(finished))


def test_every_file_of_a_run_is_named_where_it_cannot_be_written(run: RunDir) -> None:
    """And what was there before stays."""
    arrays = ArrayRecord({"w": Array(np.zeros(1000, dtype=np.float32))})
    writes: dict[str, Callable[[], None]] = {
        "rounds.jsonl": lambda: run.append_round({"round": 5}),
        "model.safetensors": lambda: run.save_model(arrays, {}),
        "final.json": lambda: run.write_final({"accuracy": 0.5}),
        "coverage.json": lambda: run.write_coverage({"parts": 4}),
        "models.json": lambda: run.write_models({}),
    }
    before = run.rounds(), (run.path / "model.safetensors").read_bytes(), run.coverage(), run.final()
    for name, write in writes.items():
        with files_of_at_most(0), pytest.raises(StorageError) as caught:
            write()
        assert str(caught.value).startswith(f"{run.path / name} cannot be written: "), name
        assert "bytes are free there" in str(caught.value)
    assert (run.rounds(), (run.path / "model.safetensors").read_bytes(), run.coverage(), run.final()) == before


def test_a_client_whose_disk_is_full_says_where(tmp_path: Path) -> None:
    class Full(LocalGrid):
        """Client 1 has room for small files only."""

        def _run_here(self) -> None:
            node = pickle.loads(next(iter(self._waiting.values()))).metadata.dst_node_id
            with files_of_at_most(500) if node == FIRST_NODE + 1 else nullcontext():
                super()._run_here()

    run = run_local(tmp_path, Full, **SETTINGS | {"num_rounds": 1})
    reasons = {each["client"]: each["reason"] for each in run.rounds()[0]["clients"] if each["status"] == "failed"}
    assert reasons.keys() == {1}
    (store,) = (run.path / "clients").glob("*/1")
    assert reasons[1].startswith(f"the client's store {store} cannot be written: ")
    assert "bytes are free there. Free some: old runs can be deleted" in reasons[1]


# ---- a run's own settings


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run for 30 clients with a preset's worth of settings that are not the defaults."""
    changes: dict[str, Any] = {"clients": 30, "strategy": "fedavg", "training__lr": 0.03, "run_name": "thirty"}
    return run_local(tmp_path_factory.mktemp("thirty"), **changes)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["run", "--json", *arguments])


def test_resume_from_alone_takes_all_settings_from_the_run(thirty: RunDir, tmp_path: Path) -> None:
    run = RunDir(Path(shutil.copytree(thirty.path, tmp_path / "run")))
    done = invoke("--set", f"resume-from={run.path}", "--set", "num-rounds=2")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 2
    changed = {key: value for key, value in run.settings().items() if thirty.settings()[key] != value}
    assert changed.keys() == {"resume-from", "num-rounds"}


def test_only_what_is_given_is_compared(thirty: RunDir) -> None:
    done = invoke("--set", f"resume-from={thirty.path}", "--set", "training.lr=0.5", "--nodes", "20")
    assert done.exit_code == 2
    assert "setting clients = 20 differs from 30 of the run to resume" in done.stderr
    done = invoke("--set", f"resume-from={thirty.path}", "--set", "training.lr=0.5")
    assert "setting training.lr = 0.5 differs from 0.03 of the run to resume" in done.stderr


def test_a_run_of_another_version_is_named(thirty: RunDir, tmp_path: Path) -> None:
    run = RunDir(Path(shutil.copytree(thirty.path, tmp_path / "run")))
    settings = run.path / "settings.toml"
    settings.write_text("xyzzy = 1\n" + settings.read_text("utf-8"))
    done = invoke("--set", f"resume-from={run.path}")
    assert done.exit_code == 2
    assert (
        f"{str(run.path)!r}: this version of Piecework cannot read its settings: unknown setting 'xyzzy'" in done.stderr
    )


def test_a_run_with_the_clients_of_a_superlink_needs_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (run.path / "settings.toml").write_text('engine = "deployment"\n')
    done = invoke("--set", f"resume-from={run.path}")
    assert done.exit_code == 2
    assert "--superlink HOST:PORT" in done.stderr
