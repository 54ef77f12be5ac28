"""`piecework new` writes an app whose package, once installed, is planned and trained."""

import io
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_files
from plugin_helpers import installed
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.options import read_preset, settings_from
from piecework.commands.own_app import find_app
from piecework.server_app.records import RunDir
from piecework.training.settings import SettingsError

ROOT = Path(__file__).resolve().parents[2]


def call(*words: str) -> Any:
    return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a new app, installed as its pyproject.toml says."""
    folder = tmp_path_factory.mktemp("new") / "Try-Out"
    done = call("new", str(folder))
    assert done.exit_code == 0, done.stderr
    assert "pip install -e . && piecework run" in done.stdout
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    points = {group.removeprefix("piecework."): named for group, named in project["entry-points"].items()}
    assert points.keys() == {"methods", "models", "datasets", "callbacks"}
    with installed(folder, project["name"], points):
        yield folder


def test_a_round_is_trained_as_it_was_planned(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(fresh)
    planned = json.loads(call("plan", "--json").stdout)
    assert (planned["strategy"], planned["fleet"]["participation"]) == ("try-out", 1.0)
    few = ["--set=num-rounds=1", "--set=workers=1", "--set=run-name=run", "--output-dir", str(tmp_path)]
    done = call("run", *few, "--set=try-out.mu=0.3", "--nodes=4")
    assert done.exit_code == 0, done.output
    run = RunDir(tmp_path / "run")
    assert [run.settings()[key] for key in ("strategy", "model", "callbacks", "try-out.mu")] == [*["try-out"] * 3, 0.3]
    (record,) = run.rounds()
    for client in record["clients"]:
        assert (client["status"], client["predicted_peak"]) == ("ok", planned["modules"][0]["memory_bytes"])
        assert client["measured_peak"] <= client["predicted_peak"]
    (tmp_path / "pyproject.toml").write_text("[tool.flwr]\napp = 1\n")
    with pytest.raises(SettingsError, match=r"pyproject.toml: it has no table \[tool.flwr.app.config\]"):
        read_preset(str(tmp_path / "pyproject.toml"))
    assert (run.path / "accuracy.csv").read_text() == f"round,accuracy\n1,{record['accuracy']}\n"


def test_only_a_flower_app_of_piecework_brings_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in this project itself, whose settings are the defaults, and in a folder with any other pyproject.toml."""
    monkeypatch.chdir(ROOT)
    assert find_app({}) == ""
    monkeypatch.chdir(tmp_path)
    app = '[project]\nname = "other"\n[tool.flwr.app.components]\nserverapp = "{}:app"\n'
    for text in ("", "x = ", app.format("other.server"), "[tool]\nflwr = 1"):
        (tmp_path / "pyproject.toml").write_text(text)
        assert find_app({}) == ""
    (tmp_path / "pyproject.toml").write_text(app.format("piecework.flower_server"))
    assert find_app({}) == "pyproject.toml"
    assert find_app({"resume-from": "runs/x"}) == ""


def test_an_app_that_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("new", str(tmp_path / "fresh-one")).exit_code == 0
    monkeypatch.chdir(tmp_path / "fresh-one")
    said = f"the app fresh-one in this folder registers it, and is not installed, .* pip install -e {Path.cwd()}"
    for asked in ({}, {"strategy": "fresh-one"}, {"strategy": "fedavg"}, {"strategy": "fedavg", "model": "cnn"}):
        with pytest.raises(SettingsError, match=said):
            settings_from("", [], named=asked)
    others = {"strategy": "fedavg", "model": "cnn", "dataset": "digits", "callbacks": ""}
    assert find_app(others) == "pyproject.toml"


def test_commands_name_a_folder_with_a_space_as_a_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "all apps" / "fresh-two"
    assert f"next: cd '{folder}' && pip install" in call("new", str(folder)).stdout
    monkeypatch.chdir(folder)
    with pytest.raises(SettingsError, match=f"pip install -e '{folder}'"):
        find_app({})


@pytest.mark.slow
def test_its_own_test_and_the_checks_pass(fresh: Path) -> None:
    """mypy checks the files where they lie in this project; only names change."""
    for words in (["ruff", "check"], ["ruff", "format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", *words, "."], cwd=fresh, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
    texts = [path.read_text("utf-8") for path in fresh.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    assert len(texts) >= 9
    assert not [text for text in texts if re.search("my.app", text, re.IGNORECASE)]
    assert pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(fresh), str(fresh / "tests")]) == 0


def test_flower_takes_the_app(fresh: Path) -> None:
    (fresh / "runs").mkdir(exist_ok=True)
    (fresh / "runs" / "settings.toml").write_text("")
    bundle, _ = build_fab_from_files(
        {str(path.relative_to(fresh)): path for path in fresh.rglob("*") if path.is_file()}
    )
    own = [f"try_out/{name}.py" for name in ("__init__", "callback", "data", "method", "model")]
    names = [name for name in zipfile.ZipFile(io.BytesIO(bundle)).namelist() if "/" in name and ".info" not in name]
    assert sorted(names) == sorted([*own, "try_out/fleet.toml"])


def test_a_folder_that_cannot_be_made_is_refused_and_left_alone(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "own.py").write_text("1")
    for folder, said in (
        (full, "exists and is not empty"),
        (full / "own.py", "exists and is not empty"),
        (tmp_path / "torch", "there is a module 'torch' already"),
        (tmp_path / "json", "there is a module 'json' already"),
        (tmp_path / "2nd", "cannot be the name of a package"),
        (tmp_path / "a b", "cannot be the name of a package"),
        (tmp_path / "x-", "cannot be the name of a package"),
        (tmp_path / "class", "cannot be the name of a package"),
    ):
        done = call("new", str(folder))
        assert (done.exit_code, said in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "own.py"]
