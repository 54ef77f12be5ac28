"""The page of a study, also of what has no result; and where a study lies."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from claims_harness import NOBODY, Process
from claims_helpers import finish
from flwr.app import Array, ArrayRecord
from studies_helpers import TWO, Here
from typer.testing import CliRunner

import piecework
from piecework.cli import app
from piecework.server_app.records import RunDir
from piecework.studies import queue


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(tmp_path, monkeypatch)


def page_of(here: Here) -> str:
    return (here.folder / "runs/s/compare.html").read_text("utf-8")


def test_runs_without_a_result_stand_in_the_page_with_the_reason(here: Here) -> None:
    here.accuracies = {("fedavg", 1): None}
    done = here.run("--study", "s", *TWO)
    assert "strategy=fedavg seed=1 failed: no such data set" in done.stdout
    (failed,) = (here.folder / "runs/s").glob("fedavg-seed1-*.log")
    row = f"<tr><td>failed</td><td>strategy=fedavg seed=1</td><td>no such data set ({failed.name})</td></tr>"
    assert row in page_of(here)
    assert '<p class="says">3 of 4 runs done, 1 failed.</p>' in page_of(here)
    assert page_of(here).index("<h2>Runs</h2>") < page_of(here).index("<h2>Runs without a result</h2>")

    run = here.interrupt("s/heterofl-seed2-*", 0.1)
    (other,) = (here.folder / "runs/s").glob("fedavg-seed2-*/")
    for path in (other, *(other.with_name(f"{other.name}.{kind}") for kind in ("json", "toml", "log"))):
        path.rename(here.folder / path.name)
    study = piecework.Study(here.folder / "runs/s")
    study.write_page()
    page = page_of(here)
    rows = [
        row,
        "<tr><td>missing</td><td>strategy=fedavg seed=2</td><td>no round of it is finished</td></tr>",
        f"<tr><td>interrupted</td><td>strategy=heterofl seed=2</td><td>after round 1 of 3 ({run.name}.log)</td></tr>",
    ]
    assert "".join(rows) in page
    shown = CliRunner().invoke(app, ["study", "s"]).stdout
    assert "strategy=heterofl seed=2 interrupted: after round 1 of 3" in shown
    assert "strategy=fedavg seed=2" not in shown, "those that are missing are only counted"
    assert "1 of 4 runs done, 1 interrupted, 1 failed, 1 missing" in shown

    here.accuracies = {}
    here.run("--study", "s")
    assert "Runs without a result" not in page_of(here)


def test_a_study_without_any_result_has_a_page_too(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(words: list[str], log: Path) -> Any:
        finish(log.with_name(log.name.removesuffix(".log")), [], status="failed", reason=NOBODY)
        return Process(1)

    monkeypatch.setattr(queue, "spawn", nobody)
    done = here.run("--study", "s", "--strategies", "exclusivefl", "--seeds", "1,2")
    assert f"page: {here.folder / 'runs/s/compare.html'}" in done.stdout
    assert page_of(here).count(f"<td>{NOBODY}") == page_of(here).count("<td>failed</td>") == 2
    assert '<p class="says">0 of 2 runs done, 2 failed.</p>' in page_of(here)


def test_without_plotly_the_page_has_its_tables(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plotly", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)
    done = here.run("--study", "s", *TWO)
    assert done.exit_code == 0
    assert "the page has no figures: figures need plotly: pip install 'piecework[report]'" in done.stderr
    assert "<h2>Paired by seed</h2>" in page_of(here)
    assert "<script" not in page_of(here)


def test_a_study_lies_in_the_output_dir_or_at_its_path(here: Here) -> None:
    for words, folder in (
        (("s", "--output-dir", "out"), "out/s"),
        (("out/t",), "out/t"),
        (("out/u", "--output-dir", "out"), "out/u"),
        (("./v",), "v"),
    ):
        done = here.run("--study", *words, *TWO)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[-1] == f"study folder: {here.folder / folder}"
        assert json.loads(CliRunner().invoke(app, ["study", folder, "--json"]).stdout)["done"] == 4


@pytest.mark.parametrize("path", ["elsewhere/s", "./s", "out/deeper/s"])
def test_a_path_outside_of_the_output_dir_is_refused(here: Here, path: str) -> None:
    done = here.run("--study", path, "--output-dir", "out", *TWO)
    assert (done.exit_code, here.words) == (2, [])
    assert (
        f"--study '{path}' is a path, and not in output-dir = out: give the path alone, or --study s for a folder of this name "
        "in the output-dir"
    ) in " ".join(done.stderr.split())
    assert not list(here.folder.iterdir())


def test_a_row_is_one_group_where_its_data_have_moved(here: Here) -> None:
    for seeds, place in (("1", "here"), ("1,2", "there")):
        (here.folder / place).mkdir()
        done = here.run(
            "--study", "s", "--strategies", "fedavg,heterofl", "--seeds", seeds, "--set", f"data-dir={place}"
        )
    assert done.stdout.splitlines()[1:3] == ["A: strategy=fedavg", "B: strategy=heterofl"]
    assert [pair["seeds"] for pair in piecework.Study("runs/s").pairs] == [[1, 2]]


def test_clients_own_models_stay_until_they_are_cleaned_away(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other stores only serve to resume a run, and go with its end."""

    def leave(words: list[str], log: Path) -> Any:
        process, run = here.spawn(words, log), log.with_suffix("")
        (run / "clients" / ("0" * 32)).mkdir(parents=True)
        described = {"format": 3} | ({"personal": True} if run.name.startswith("spafl") else {})
        RunDir(run).save_model(ArrayRecord({"tau": Array(np.zeros(1, np.float32))}), described)
        return process

    monkeypatch.setattr(queue, "spawn", leave)
    done = here.run("--study", "s", "--strategies", "spafl,fedavg", "--seeds", "1")
    assert done.exit_code == 0, done.output
    (kept,) = here.folder.glob("runs/s/*/clients/*")
    assert kept.parents[1].name.startswith("spafl-seed1-")
    assert json.loads(CliRunner().invoke(app, ["clean", "--json"]).stdout)["removed"] == [
        str(kept.relative_to(here.folder))
    ]
    assert not kept.exists()
