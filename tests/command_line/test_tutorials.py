"""The tutorials, typed in as they stand, in one folder and in their order, with fewer rounds."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from document_helpers import ROOT
from typer.testing import CliRunner

from benchmarks.docs import commands_of, why_not
from piecework.cli import app
from piecework.server_app.records import RunDir

TUTORIALS = ("model", "data", "devices", "deploy")
ELSEWHERE = ("--engine ray", "--engine deployment")  # whose tests are in tests/engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tutorials")


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_does_what_it_says(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PIECEWORK_DATA", raising=False)
    text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text("utf-8")
    for file, code in re.findall(r"```(?:python|toml)\n# (\w+\.(?:py|toml))\n(.*?)```", text, re.DOTALL):
        (folder / file).write_text(code, encoding="utf-8")
    typed = [each for each in commands_of(text) if not why_not(each) and not any(word in each for word in ELSEWHERE)]
    assert len(typed) >= 3
    for command in typed:
        words = shlex.split(re.sub(r"--rounds \d+", "--rounds 1", command).partition(" > ")[0])
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], check=True)
            continue
        words += ["--set", "workers=1"] if words[1] == "run" else []
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, (command, done.stderr)
        shown = re.findall(r"^    (?!piecework|python|docker)(.*)$", text, re.MULTILINE) if words[1] == "plan" else []
        pieces = [line.split()[0] for line in shown if line.startswith("0_")]
        assert all(piece in done.stdout for piece in pieces) or "--strategy fedepth" not in command


def test_the_devices_tutorial_names_the_figures_of_its_runs(folder: Path) -> None:
    """After the tutorial above: what its tables say is what the runs recorded."""
    text = (ROOT / "docs" / "tutorials" / "devices.md").read_text("utf-8")
    (record,) = RunDir(folder / "runs" / "pieces").rounds()
    peaks = {client["device"]: client["measured_peak"] for client in record["clients"]}
    for device, peak in peaks.items():
        assert re.search(rf"{device} +2 .*{peak / 1000:.1f} kB", text), (device, peak)
    (record,) = RunDir(folder / "runs" / "whole").rounds()
    assert {client["status"] for client in record["clients"]} == {"ok"}
