"""Runs of several seeds: what is printed of them, how their folders are called, and that a folder of runs can be compared."""

import json
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from piecework.cli import app
from piecework.report.run_folders import runs_at
from piecework.report.seeds import summarise_seeds
from piecework.server_app.records import CheckpointError, RunDir
from piecework.server_app.run_folder import resolve_run_dir
from piecework.training.settings import Settings

TINY = (
    "num-rounds=1",
    "clients-per-round=1",
    "training.local-epochs=1",
    "workers=1",
    "architecture.width=0.25",
    "fleet=unlimited",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeds") / "runs"


@pytest.fixture(scope="module")
def two_seeds(runs: Path) -> Result:
    sets = [f"--set={text}" for text in TINY]
    return CliRunner().invoke(app, ["run", "--seeds", "5,3", "--output-dir", str(runs), *sets])


def test_seeds_are_announced_and_summed_up(runs: Path, two_seeds: Result) -> None:
    assert two_seeds.exit_code == 0, two_seeds.output
    lines = [line.rstrip() for line in two_seeds.stdout.splitlines()]
    folders = [line.removeprefix("run folder: ") for line in lines if line.startswith("run folder: ")]
    first, second = lines.index("seed 5 (1 of 2)"), lines.index("seed 3 (2 of 2)")
    assert first < lines.index(f"run folder: {folders[0]}") < second < lines.index(f"run folder: {folders[1]}")
    assert [re.fullmatch(r"fedepth-digits-seed(\d)-\d{8}-\d{6}-[0-9a-f]{4}", Path(f).name)[1] for f in folders] == [
        "5",
        "3",
    ]  # type: ignore[index]
    found = [json.loads((Path(folder) / "summary.json").read_text("utf-8"))["accuracy"] for folder in folders]
    assert found[0] != found[1]
    both = f"accuracy {mean(found):.2%} ± {stdev(found):.2%}"
    assert lines[-1] == f"seeds 5, 3: {both} (mean ± sample standard deviation)"


def test_a_folder_of_runs_is_compared(runs: Path, two_seeds: Result) -> None:
    assert two_seeds.exit_code == 0
    (runs / "notes").mkdir()
    single = sorted(str(path.parent) for path in runs.glob("*/settings.toml"))
    assert len(single) == 2
    answers = [
        CliRunner().invoke(app, ["compare", "--json", *paths]) for paths in (single, [str(runs)], [str(runs), *single])
    ]
    assert json.loads(answers[0].stdout)["groups"][0]["seeds"] == [3, 5]
    assert answers[0].stdout == answers[1].stdout == answers[2].stdout
    empty = CliRunner().invoke(app, ["compare", str(runs / "notes")])
    assert empty.exit_code == 2
    assert (
        "notes is not the folder of a run (it has no settings.toml), and no folder in it or below is one"
        in empty.stderr
    )


def test_a_run_is_taken_before_what_lies_in_it(tmp_path: Path) -> None:
    for path in (tmp_path / "run", tmp_path / "run" / "old", tmp_path / "another"):
        RunDir(path).create(Settings())
    assert [found.path.name for found in runs_at(tmp_path / "run")] == ["run"]
    assert [found.path.name for found in runs_at(tmp_path)] == ["another", "run"]
    with pytest.raises(CheckpointError, match="nowhere is not the folder of a run"):
        runs_at(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("digits", "digits"),
        ("npz:/some/where/my tokens.npz", "my-tokens"),
        ("folder:/some/where/photos.v2", "photos.v2"),
    ],
)
def test_the_name_of_a_run_has_its_seed_and_no_path(tmp_path: Path, dataset: str, name: str) -> None:
    settings = Settings.from_run_config({"output-dir": str(tmp_path), "seed": 7, "dataset": dataset})
    assert re.fullmatch(rf"fedepth-{name}-seed7-\d{{8}}-\d{{6}}-[0-9a-f]{{4}}", resolve_run_dir(settings).path.name)


def summary(**values: Any) -> dict[str, Any]:
    return {"status": "completed", "accuracy": None} | values


@pytest.mark.parametrize(
    ("summaries", "said"),
    [
        (
            [summary(accuracy=a, adversarial_accuracy=b) for a, b in ((0.5, 0.2), (0.7, 0.4), (0.9, 0.6))],
            "seeds 1, 2, 3: accuracy 70.00% ± 20.00%, adversarial accuracy 40.00% ± 20.00% (mean ± sample standard deviation)",
        ),
        (
            [summary(accuracy=0.5), summary(status="failed"), summary(accuracy=0.7, autoattack_accuracy=0.25)],
            "seeds 1, 3: accuracy 60.00% ± 14.14%, accuracy under AutoAttack 25.00% "
            "(mean ± sample standard deviation; without seeds that failed: 2)",
        ),
        ([summary(status="failed")] * 3, "no run of seeds 1, 2, 3 completed"),
        ([summary()] * 3, "seeds 1, 2, 3: accuracy - (mean ± sample standard deviation)"),
    ],
)
def test_conclusion(summaries: list[dict[str, Any]], said: str) -> None:
    assert summarise_seeds([1, 2, 3], summaries) == said
