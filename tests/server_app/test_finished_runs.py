"""Runs that are resumed: which one `auto` takes, what is left to do, how long all processes took, and the last moment."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import TRIO, run_local, tiny_settings
from typer.testing import CliRunner

import piecework.engines.launch as launching
from piecework.cli import app
from piecework.commands.options import settings_from
from piecework.engines.launch import SuperLinkLostError
from piecework.federation.errors import RunAbortedError
from piecework.server_app import experiment, rounds
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import RunDir
from piecework.server_app.run_folder import has_completed, newest_run, resolve_run_dir
from piecework.server_app.summary import how_stopped
from piecework.training.settings import SettingsError

FEDAVG = TRIO | {"strategy": "fedavg", "num_rounds": 2}


def a_run(path: Path, when: int, status: str = "", **settings: Any) -> Path:
    """A run's folder without rounds, started at second `when`."""
    run_dir = RunDir(path)
    run_dir.create(tiny_settings(**settings))
    os.utime(path / "settings.toml", (when, when))
    if status:
        run_dir.write_summary({"status": status})
    return run_dir.path


def test_auto_takes_the_newest_unfinished_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted, longer = tiny_settings(seed=1, num_rounds=2), tiny_settings(seed=1, num_rounds=3)
    first = a_run(tmp_path / "a", 1, "completed", seed=1, num_rounds=2)
    second = a_run(tmp_path / "b", 2, "completed", seed=1, num_rounds=2)
    assert newest_run(tmp_path, wanted).path == second
    assert f"every run with these settings in {tmp_path.resolve()} has completed" in caplog.text
    caplog.clear()
    stopped = a_run(tmp_path / "c", 0, "stopped", seed=1, num_rounds=2)
    a_run(tmp_path / "d", 9, "stopped", seed=2)
    assert newest_run(tmp_path, wanted).path == stopped
    assert newest_run(tmp_path, longer).path == second  # which has rounds to go
    killed = a_run(tmp_path / "e", 1, "", seed=1, num_rounds=2)
    assert newest_run(tmp_path, wanted).path == killed
    assert not caplog.text
    (second / "summary.json").write_text("{")
    assert not has_completed(RunDir(second))
    (first / "settings.toml").write_text("xyzzy = 1")
    with pytest.raises(ValueError, match="no run with these settings"):
        resolve_run_dir(tiny_settings(seed=3, resume_from="auto", output_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="not the folder of a run"):
        resolve_run_dir(tiny_settings(resume_from=str(tmp_path), output_dir=str(tmp_path)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run_local(tmp_path_factory.mktemp("finished"), **FEDAVG)


def content(run: RunDir) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file() and p.name != "lock"}


def test_of_a_finished_run_nothing_is_left(finished: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    before = content(finished)
    caplog.set_level("INFO")
    run_local(finished.path.parent, resume_from=str(finished.path), **FEDAVG)
    assert f"nothing was left to do in {finished.path}: it has completed, after round 2" in caplog.text
    assert content(finished) == before
    with pytest.raises(SettingsError, match=r"training.lr = 0\.25 differs"):
        run_local(finished.path.parent, resume_from=str(finished.path), training__lr=0.25, **FEDAVG)


def test_the_command_says_so_and_starts_no_engine(finished: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "run_attempts", None)
    before = content(finished)
    words = ["run", "--json", "--set", f"resume-from={finished.path}", "--engine", "ray"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 2
    assert "nothing was left to do" in done.stderr
    assert content(finished) == before


def test_auto_does_not_take_a_superlinks_run_for_one_of_this_machine(tmp_path: Path) -> None:
    there = tiny_settings(run__superlink="host:9093", run_name="there", output_dir=str(tmp_path))
    RunDir(tmp_path / "there").create(there)
    asked = {"resume_from": "auto", "output_dir": str(tmp_path)}
    with pytest.raises(ValueError, match="no run with these settings"):
        resolve_run_dir(tiny_settings(**asked))
    assert resolve_run_dir(tiny_settings(**asked, run__superlink="other:9093")).path.name == "there"


def test_auto_is_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another process, the ServerApp's, writes the run."""
    words = ["--strategy=fedavg", "--rounds=2", "--set=workers=1", "--output-dir", str(tmp_path)]
    run_dir = RunDir(tmp_path / "one")
    run_dir.create(
        settings_from("", ["workers=1"], output_dir=str(tmp_path), named={"strategy": "fedavg", "num-rounds": 2})
    )
    asked = []
    monkeypatch.setattr(launching, "launch", lambda settings, run, *_: asked.append((settings.resume_from, run.path)))
    CliRunner().invoke(app, ["run", "--set=resume-from=auto", *words])
    assert asked == [(str(run_dir.path), run_dir.path)]


def test_seconds_are_those_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000, 100_000, 10))
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: float(next(clock)))
    run = run_local(tmp_path, **FEDAVG | {"num_rounds": 1})
    first = (run.summary() or {})["seconds"]
    assert first > 0
    at_checkpoint = json.loads((run.checkpoint_paths()[-1] / "state.json").read_text("utf-8"))["seconds"]
    assert 0 < at_checkpoint < first
    run_local(tmp_path, **FEDAVG, resume_from=str(run.path))
    second = (run.summary() or {})["seconds"]
    assert second > first
    assert second - first < 2 * first  # one more process, and not the sum of its sums
    (run.path / "summary.json").unlink()  # as if it had been killed at the end
    at_checkpoint = json.loads((run.checkpoint_paths()[-1] / "state.json").read_text("utf-8"))["seconds"]
    assert first < run.seconds() == at_checkpoint < second


def test_a_run_gives_up_its_name_only_if_it_left_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new one of its name, whose name was free when that looked, is refused; one after a stop at the start begins at zero."""
    run = run_local(tmp_path, **FEDAVG | {"num_rounds": 1})
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"run-name = 'run': {tmp_path} has this run already"):
        run_local(tmp_path, **FEDAVG | {"num_rounds": 1})
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    shutil.rmtree(run.checkpoints)
    run.write_summary((run.summary() or {}) | {"status": "stopped", "seconds": 1e6})
    run_local(tmp_path, **FEDAVG | {"num_rounds": 1})
    assert f"{run.path}: its run ended before its first checkpoint, and begins again" in caplog.text
    assert (run.summary() or {})["seconds"] < 1e6
    assert [record["round"] for record in run.rounds()] == [1]


@pytest.mark.parametrize(
    "name", ["clients/thesis.txt", "checkpoint/round-00003/x", "rounds.jsonl", "model.safetensors"]
)
def test_a_new_run_takes_no_folder_that_holds_something_else(tmp_path: Path, name: str) -> None:
    """Neither before it starts nor when it holds the lock; what a run writes before its settings is no hindrance."""
    settings = tiny_settings(run_name="mine", output_dir=str(tmp_path))
    (tmp_path / "mine").mkdir()
    for early in ("lock", "settings.toml.tmp"):
        (tmp_path / "mine" / early).write_text("{}")
    run_dir, mine = resolve_run_dir(settings), tmp_path / "mine" / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("precious")
    refusal = f"run-name = 'mine': the folder {tmp_path / 'mine'} holds {Path(name).parts[0]!r}, but no settings.toml"
    with pytest.raises(ValueError, match=refusal):
        resolve_run_dir(settings)
    with LocalGrid(3, settings.to_run_config()) as grid, pytest.raises(ValueError, match=refusal):
        experiment.run_experiment(grid, settings, run_dir)
    assert mine.read_text() == "precious"


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunDir, "save_model", lambda *_: interrupted(_))


def after_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    save = RunDir.save_model
    monkeypatch.setattr(RunDir, "save_model", lambda *arguments: interrupted(save(*arguments)))


def in_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: RunDir, summary: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "write_summary", write)


def after_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RunDir.write_summary
    monkeypatch.setattr(RunDir, "write_summary", lambda *arguments: interrupted(write(*arguments)))


@pytest.mark.parametrize(
    ("when", "status", "code"),
    [
        (before_the_model, "stopped", 130),
        (after_the_model, "completed", 0),
        (in_the_summary, "completed", 0),
        (after_the_summary, "completed", 0),
    ],
)
def test_ctrl_c_in_the_last_moment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[[pytest.MonkeyPatch], None],
    status: str,
    code: int,
) -> None:
    when(monkeypatch)
    sets = ["clients=3", "clients-per-round=1", "training.local-iterations=1", "fleet=unlimited", "workers=1"]
    words = ["run", "--json", "--strategy", "fedavg", "--rounds", "1", "--output-dir", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, *(f"--set={text}" for text in sets)])
    monkeypatch.undo()
    assert (json.loads(done.stdout)["status"], done.exit_code) == (status, code), done.stderr
    (run,) = [RunDir(path.parent) for path in tmp_path.glob("*/settings.toml")]
    assert (run.summary() or {})["status"] == status
    assert ("resume it: " in done.stderr) == (status == "stopped")


def test_ctrl_c_leaves_the_other_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_summary(monkeypatch)
    sets = ["clients=3", "clients-per-round=1", "training.local-iterations=1", "fleet=unlimited", "workers=1"]
    words = ["run", "--strategy=fedavg", "--rounds=1", "--seeds=4,5,6", "--output-dir", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, *(f"--set={text}" for text in sets)])
    assert done.exit_code == 130
    assert "interrupted: not run: seed 5, 6" in done.stderr
    assert len(list(tmp_path.glob("*/settings.toml"))) == 1


@pytest.mark.parametrize(
    ("last", "final", "ended"),
    [
        ({"accuracy": 0.5}, False, "completed"),
        ({"accuracy": None}, False, "stopped"),
        ({"accuracy": None}, True, "completed"),
        ({"accuracy": None, "personal": True}, False, "completed"),
        ({"accuracy": 0.5, "batch_norm": "static"}, False, "stopped"),
        ({"accuracy": 0.5, "batch_norm": "static"}, True, "completed"),
        ({"accuracy": 0.5, "batch_norm": "static", "round": 2}, False, "completed"),
    ],
)
def test_a_signal_before_the_final_evaluation_stops_the_run(
    last: dict[str, Any], final: bool, ended: str, tmp_path: Path
) -> None:
    """That is due if the last round was not evaluated, as of stages that end early, and if a run of static batch norms ended
    early, because clients then measure them again. Clients' own models have none.
    """
    run = RunDir(tmp_path)
    run.create(tiny_settings(strategy="fedavg", num_rounds=2))
    for server_round in range(1, last.get("round", 1) + 1):
        run.append_round({"round": server_round, "personal": False} | last | {"round": server_round})
    (tmp_path / "model.safetensors").touch()
    if final:
        run.write_final({"accuracy": 0.5})
    assert how_stopped(run)[0] == ended


@pytest.mark.parametrize(
    ("error", "resumed"),
    [
        (RunAbortedError("the server was unplugged"), True),
        (SuperLinkLostError("no answer from host:1, where run 1 may go on: look after it"), False),
    ],
)
def test_a_run_that_failed_after_a_checkpoint_says_how_to_go_on(
    error: Exception, resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not one that may still be going on elsewhere."""
    plain = rounds.Run.one_round

    def fail_in_the_second(run: rounds.Run, server_round: int) -> Any:
        if server_round == 2:
            raise error
        return plain(run, server_round)

    monkeypatch.setattr(rounds.Run, "one_round", fail_in_the_second)
    sets = ["clients=3", "clients-per-round=1", "training.local-iterations=1", "fleet=unlimited", "workers=1"]
    words = ["run", "--strategy", "fedavg", "--rounds", "3", "--output-dir", str(tmp_path)]
    done = CliRunner(env={"COLUMNS": "1000"}).invoke(app, [*words, *(f"--set={text}" for text in sets)])
    (path,) = [each.parent for each in tmp_path.glob("*/settings.toml")]
    assert done.exit_code == 1
    said = [f"failed: {error}"] + [f"resume it: piecework run --set resume-from={path}"] * resumed
    assert done.stderr.splitlines()[-len(said) :] == said
