"""What the command line says of a run that cannot begin, and does with one that has ended."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TRIO, run_local
from typer.testing import CliRunner

import piecework
from piecework.cli import app
from piecework.commands.runs import stores
from piecework.server_app.run_folder import resolve_run_dir
from piecework.training.settings import Settings


def test_json_of_what_can_be_done_with_a_run(tmp_path: Path) -> None:
    folders = [run_local(tmp_path, run_name=f"run-{seed}", seed=seed, **TRIO).path for seed in (1, 2)]

    def said(*arguments: object) -> Any:
        done = CliRunner().invoke(app, [str(each) for each in arguments])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert said("compare", "--json", *folders)["groups"][0]["seeds"] == [1, 2]
    assert Path(said("report", "--json", folders[0])["report"]).is_file()
    assert piecework.load(folders[0])(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert len(said("clean", "--json", "--output-dir", tmp_path)["removed"]) == 2
    assert list((folders[0] / "clients").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            ["--set", "strategy=fedsgd"],
            [
                "strategy",
                "'fedsgd'",
                "fedepth, fedet, fedpm, fedprophet, fedprox, fedrbn, fedrolex, fjord, heterofl, jfat, local, m-fedepth",
            ],
        ),
        (["--set", "model=alexnet"], ["model", "'alexnet'", "preresnet20"]),
        (["--model", "resnet19", "--dataset", "cifar10"], ["'resnet19'", "did you mean 'resnet18'"]),
        (["--set", "dataset=mnist3"], ["mnist3", "fashion-mnist"]),
        (["--set", "fleet=nowhere"], ["nowhere", "fedepth-fair"]),
        (["--set", "training.lr=fast"], ["training.lr", "'fast'", "number"]),
        (["--set", "training.lr=-1"], ["training.lr", "-1", "greater than 0"]),
        (["--set", "batchsize=3"], ["batchsize", "training.batch-size"]),
        (["--set", "dataset=fashion-mnist", "--set", "data-dir=empty"], ["data-dir", "empty"]),
        (["--set", "resume-from=nothing"], ["resume-from", "nothing"]),
        (["--set", "clients=5000"], ["5000 clients", "1 to 1438"]),
        (
            ["--set", "data.partition=pathological", "--set", "data.partition-classes=11"],
            ["data.partition-classes", "11", "1 to 10"],
        ),
        (["--seeds", "1,a"], ["1,a", "whole numbers"]),
        *(
            (["--set", f"run-name={name}"], [f"run-name = {name!r} must be the name of one folder"])
            for name in ("../x", "..", ".", "/x", "a/b", "a\\b", "C:x", "x/", "a\x1b[2J")
        ),
        (["--preset", "fedepth-fmnist"], ["no shipped preset", "did you mean 'fedepth-vit-fmnist'?"]),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], messages: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "--json", *arguments])
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "failed"
    for message in messages:
        assert message in done.stderr


def test_broken_fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('name = "mine"\n[[device]]\nname = "a"\nmemory = -3\n', encoding="utf-8")
    done = CliRunner().invoke(app, ["run", "--set", "fleet=mine.toml"])
    assert done.exit_code == 2
    assert "mine.toml" in done.stderr
    assert "-3" in done.stderr


def test_clean_takes_only_what_clients_of_ended_runs_left(tmp_path: Path) -> None:
    ours, other, running = tmp_path / "ours", tmp_path / "project", tmp_path / "running"
    for folder in (ours, other, running):
        for store in ("0" * 32, "data"):
            (folder / "clients" / store).mkdir(parents=True)
    (ours / "summary.json").write_text("{}")
    for folder in (ours, running):
        (folder / "settings.toml").write_text("")
    assert stores(tmp_path) == [ours / "clients" / ("0" * 32)]


def test_a_name_is_not_taken_twice(tmp_path: Path) -> None:
    """Unless its run ended before its first checkpoint: a kill leaves no summary, and a half-written one is no checkpoint."""
    settings = Settings.from_run_config({"output-dir": str(tmp_path), "run-name": "once"})
    run_dir = resolve_run_dir(settings)
    run_dir.create(settings)
    (run_dir.checkpoints / "round-00001.tmp").mkdir(parents=True)
    assert resolve_run_dir(settings).path == run_dir.path
    for status in ("stopped", "failed"):
        run_dir.write_summary({"status": status})
        assert resolve_run_dir(settings).path == run_dir.path
    run_dir.append_round({"round": 1})
    run_dir.write_summary({"status": "stopped"})
    assert resolve_run_dir(settings).path == run_dir.path
    for status, checkpoint in (("failed", ""), ("completed", ""), ("stopped", "damaged-round-00001")):
        run_dir.write_summary({"status": status})
        (run_dir.checkpoints / checkpoint).mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="run-name = 'once'"):
            resolve_run_dir(settings)
    unnamed = Settings.from_run_config({"output-dir": str(tmp_path)})
    assert resolve_run_dir(unnamed).path != resolve_run_dir(unnamed).path
