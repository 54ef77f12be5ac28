"""A short form of every benchmark runs: the same code as the whole measurement, on less, and in this process."""

import importlib
import io
import json
import multiprocessing.dummy as threads
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TRIO, run_local
from typer.testing import CliRunner

from benchmarks import boards, container_piece, containers, durations, prism_step, simulation
from piecework.cli import app
from piecework.commands.options import settings_from
from piecework.engines.processes import Connection

DOCS = Path(__file__).resolve().parents[2] / "docs"
Say = Callable[..., str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a benchmark with these words, its own processes inside of this one; what it prints."""

    def run(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words])
        importlib.import_module(f"benchmarks.{name}").main()
        return capsys.readouterr().out

    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    return run


def run_here(command: list[str], check: bool = False, **_: Any) -> subprocess.CompletedProcess[str]:
    """Do what a command of this Python would do: one of our own, or a program in a string."""
    assert command[0] == sys.executable
    if command[1] == "-c":
        with redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["-c", *command[3:]])
            exec(command[2], {})
        return subprocess.CompletedProcess(command, 0, out.getvalue(), "")
    assert command[1:3] == ["-m", "piecework.cli"]
    done = CliRunner().invoke(app, command[3:])
    if check and done.exit_code:
        raise AssertionError(done.output)
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Random images in the shape of Fashion-MNIST's: 120 to train on."""
    rng, file = np.random.default_rng(0), tmp_path / "random.npz"
    drawn = {"train": 120, "test": 40}
    arrays = {f"x_{part}": rng.integers(0, 256, (count, 28, 28), dtype=np.uint8) for part, count in drawn.items()}
    np.savez(file, **arrays, y_train=np.arange(120) % 10, y_test=np.arange(40) % 10)
    return file


def test_engines_beside_a_plain_loop(said: Say, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation.mp, "get_context", lambda kind: threads)
    small = "--dataset", f"npz:{images}", "--clients", "2", "--processes", "1"
    (line,) = said("simulation", *small, "--engines", "local", "--epochs", "1", "--rounds", "1").splitlines()
    found = json.loads(line)
    assert found.keys() == {"epochs", "plain", "local", "local speed", "local first", "local MB"}
    assert min(found.values()) > 0


def test_memory_of_a_server_that_distils(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simulation.DISTILS, "feddf.server-iterations", 2)
    work = simulation.Load(f"npz:{images}", "", 2, 1, 1)
    found = simulation.server_memory("local", work, str(tmp_path), "feddf")
    assert found.keys() == {"start", "growth", "seconds_a_client", "server_peak"}


@pytest.mark.slow
def test_memory_with_fit(said: Say, tmp_path: Path) -> None:
    small = "--models", "lenet5", "--batch", "2"
    assert re.match(r"batch 2 .*\nlenet5 .* MB .*x .*t", said("fit", *small, "--seconds"))
    picture = tmp_path / "fit.svg"
    lines = [line.strip() for line in said("fit_curves", str(picture), *small).splitlines()]
    assert [line.split(":")[0] for line in lines] == 3 * ["lenet5", "fedepth", "fedprophet", "profl"]
    assert all("t (" in line or "does not fit" in line or "1.00t" in line for line in lines if "whole:" in line)
    assert "lenet5, whole" in picture.read_text("utf-8")


def test_the_picture_in_the_readme_is_the_demos_plan(said: Say, tmp_path: Path) -> None:
    files = [tmp_path / f"overview.{ending}" for ending in ("svg", "png")]
    said("overview", *map(str, files))
    drawn, shown = (
        re.findall(r"<text[^>]*>([^<]*)", path.read_text("utf-8"))
        for path in (files[0], DOCS / "pictures/overview.svg")
    )
    assert drawn == shown
    assert {"conv1", "conv5", "head", "board-a", "board-d", "1..4"} <= set(drawn)
    sizes = [
        int.from_bytes(path.read_bytes()[16:24]) for path in (files[1], DOCS / "pictures/overview.png")
    ]  # width and height
    assert sizes[0] == sizes[1]


def test_steps_of_small_models(said: Say) -> None:
    rows = json.loads(said("spafl_step", "--densities", "0.5", "--steps", "1", "--batch-size", "8", "--json"))
    assert [row["form"] for row in rows] == ["dense", "masked", "compact"]
    assert rows[2]["bytes"] < rows[1]["bytes"]
    found = json.loads(said("prism_step", "--steps", "1", "--width", "0.125", "--json"))
    assert found["keep"].keys() == {str(keep) for keep in prism_step.KEEPS}


def test_sub_models_of_prism(said: Say, tmp_path: Path) -> None:
    run = run_local(tmp_path, **TRIO | {"clients": 1}, strategy="prism", fleet="unlimited")
    lines = said("prism_sub_models", str(run.path), "--images", "20", "--draws", "1").splitlines()
    assert [line.split()[0].strip(",") for line in lines[1:]] == ["1", "1", "0.2", "0.4", "0.6", "0.8"]


def test_seconds_of_plans(said: Say) -> None:
    lines = said("plans", "--models", "lenet5", "--strategies", "fedavg,fedepth").splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("2 plans; ")


@pytest.mark.slow
def test_seconds_of_paged_steps(said: Say, tmp_path: Path) -> None:
    """The step that reads ahead, on a disk of 10 MB/s, is followed by the one that does not."""
    asked = ("--models", "lenet5", "--batch", "2", "--repeats", "1", "--folder", str(tmp_path), "--slow", "1e7")
    head, ahead, alone, tight = said("paging", *asked, "--budgets", "0.95,0.8").splitlines()
    assert head.split()[-3:] == ["predicted", "measured", "ratio"]
    for line in (ahead, alone, tight):
        assert float(line.split()[9]) > 0
        assert "pages through " in line
    assert [line.endswith("reads ahead") for line in (ahead, alone, tight)] == [True, False, False]
    assert list(tmp_path.iterdir()) == []


def test_duration_of_a_preset(said: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "WORKERS", 1)
    monkeypatch.setattr(durations, "SPEED", 1e6)  # every preset would take long: random data stand for its own
    assert re.search(r"^prism-femnist .*\(random data\)$", said("durations", "prism-femnist"))


def test_a_piece_in_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"settings": {"model": "lenet5", "training.batch-size": 2}, "steps": 1, "atoms": [1], "budget": 10**9}
    container_piece.train(task | {"micro_batch": 1, "recompute": []}, tmp_path)
    assert json.loads(capsys.readouterr().out)["done"] > 0


def test_the_whole_model_in_pages_in_a_container(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = {
        "settings": {"model": "lenet5", "training.batch-size": 2},
        "steps": 2,
        "atoms": [0, 1],
        "budget": 10**9,
    }
    found = []
    for number, step in enumerate(({}, {"pages": [[0, 1], [1, 2]], "spilled": True})):
        (folder := tmp_path / str(number)).mkdir()
        container_piece.train(task | step, folder)
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["weights"] == found[0]["weights"]
    assert found[1]["done"] < found[0]["done"]


def test_pieces_in_containers(said: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[dict[str, Any]] = []

    def contain(image: str, limit: int, task: dict[str, Any]) -> tuple[str, dict[str, float]]:
        tasks.append(task)
        return containers.TRAINED, {"floor": 1e8, "anonymous": 2e8, "kernel": 1e6, "done": 1e8, "seconds": 1.0}

    monkeypatch.setattr(containers, "run_container", contain)
    with pytest.raises(SystemExit) as ended:
        said("containers", "--limits", "512MB", "--models", "lenet5", "--batch-size", "2")
    assert ended.value.code == 0
    assert {"settings", "atoms", "steps", "budget", "micro_batch", "recompute"} <= tasks[1].keys()


def test_a_board(tmp_path: Path) -> None:
    """Its container needs Docker; its settings are ones."""
    words = boards.settings_of("lenet5", tmp_path / "random.npz", 2)
    assert settings_from("", words[1::2], connection=Connection("superlink:8000", None)).strategy == "fedepth"
