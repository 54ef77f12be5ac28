"""`piecework compare`: where it finds runs, which files it writes, and what it refuses."""

import json
import logging
import os
from pathlib import Path

import pytest
from click.testing import Result
from report_helpers import make_run, two_rounds
from typer.testing import CliRunner

import piecework
from piecework.cli import app
from piecework.report.page import ReportError
from piecework.report.run_folders import runs_at


def compare(*words: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def names(done: Result) -> list[str]:
    return [run["run"] for group in json.loads(done.stdout)["groups"] for run in group["runs"]]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run, a study of two runs, and further below a run with another in its folder."""
    for seed, name in enumerate(("single", "study/one", "study/two", "old/2025/three", "old/2025/three/clients/no")):
        make_run(tmp_path / name, two_rounds(0.5), seed=seed)
    (tmp_path / "study" / "study.toml").write_text("seeds = [1]\n")
    (tmp_path / "study" / ".locks" / "one").mkdir(parents=True)
    return tmp_path


def test_runs_are_found_in_studies_and_further_below_each_once(runs: Path) -> None:
    assert names(compare("--json", runs)) == ["single", "one", "two", "three"], "by their seeds"
    assert names(compare("--json", runs / "study")) == ["one", "two"]
    assert names(compare("--json", runs, runs / "study", runs / "study" / "one")) == ["single", "one", "two", "three"]
    assert [run.path.name for run in runs_at(runs)] == ["three", "single", "one", "two"], "by their paths"


def test_links_are_followed_to_runs_alone(runs: Path) -> None:
    (runs / "chosen").mkdir()
    (runs / "chosen" / "link").symlink_to(runs / "single", target_is_directory=True)
    (runs / "chosen" / "circle").symlink_to(runs, target_is_directory=True)
    assert [run.path for run in runs_at(runs / "chosen")] == [(runs / "single").resolve()]
    assert names(compare("--json", runs)) == ["single", "one", "two", "three"]


def test_a_folder_that_cannot_be_read_is_warned_about(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "study":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with caplog.at_level(logging.WARNING, "piecework"):
        assert [run.path.name for run in runs_at(runs)] == ["three", "single"]
    assert f"{runs / 'study'} is left out, because it cannot be read: Permission denied" in caplog.text


@pytest.mark.parametrize("name", ["x.txt", "x", "x.html.bak", "folder/"])
def test_a_page_has_the_name_of_a_page(runs: Path, tmp_path: Path, name: str) -> None:
    done = compare(runs, "--curves", f"{tmp_path}/{name}")
    assert done.exit_code == 2
    path = str(tmp_path / name)
    assert f"'{path}': what is written is a web page: give a file whose name ends in .html or .htm" in done.stderr
    assert not Path(path).exists()
    with pytest.raises(ReportError, match=r"ends in \.html or \.htm"):
        piecework.compare(runs).draw_curves(path)


@pytest.mark.parametrize("name", ["x.html", "x.HTM"])
def test_a_page_with_figures_or_without(runs: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert compare(runs, "--curves", path).exit_code == 0
    assert "Plotly.newPlot(" in path.read_text("utf-8")
    assert compare(runs, "--curves", path, "--without-plotly").exit_code == 0
    page = path.read_text("utf-8")
    assert len(page) < 30_000
    assert "<script" not in page
    assert "<h2>Runs</h2>" in page
    assert (
        "<p>Figures that this page leaves out (--without-plotly): Accuracy over rounds, Accuracy over bytes, Accuracy against "
        "memory, Accuracy against simulated time.</p>"
    ) in page
    assert piecework.compare(runs).draw_curves(path, plotly=False).read_text("utf-8") == page


def test_without_plotly_needs_a_page(runs: Path) -> None:
    done = compare(runs, "--without-plotly")
    assert done.exit_code == 2
    assert "--without-plotly is about the page: give --curves FILE.html too" in " ".join(done.stderr.split())
