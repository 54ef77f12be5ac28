"""A folder in which studies are run by processes that only leave files, for tests of studies."""

import tomllib
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from claims_harness import Process
from claims_helpers import finish
from click.testing import Result
from typer.testing import CliRunner

from piecework.cli import app
from piecework.server_app.records import RunDir
from piecework.studies import queue, runner

TWO = ["--strategies", "fedavg,heterofl", "--seeds", "1,2", "--rounds", "3"]
IN_ORDER = [(strategy, seed) for seed in (1, 2) for strategy in ("fedavg", "heterofl")]


class Here:
    """A folder in which studies are run by processes that only leave `accuracies`, by strategy and seed; None fails."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.words = folder, list[list[str]]()
        self.accuracies: dict[tuple[str, int], float | None] = {}
        monkeypatch.chdir(folder)
        monkeypatch.setattr(runner, "POLL", 0.0)
        monkeypatch.setattr(runner, "DYING", 0.0)
        monkeypatch.setattr(queue, "spawn", self.spawn)

    def spawn(self, words: list[str], log: Path) -> Any:
        self.words.append(words)
        run = log.with_name(log.name.removesuffix(".log"))
        given = tomllib.loads(run.with_name(f"{run.name}.toml").read_text("utf-8"))
        accuracy = self.accuracies.get((given["strategy"], given["seed"]), 0.5)
        log.write_text("error: no such data set\n", "utf-8")
        if accuracy is None:
            return Process(2)
        finish(run, [0.1, 0.2, accuracy], settings=given)
        return Process(0)

    def run(self, *words: str) -> Result:
        self.words.clear()
        return CliRunner().invoke(app, ["run", *words])

    def interrupt(self, run: str, *accuracies: float) -> Path:
        """Have a run, of this pattern below the studies, ended after rounds of these accuracies, and return its folder."""
        (folder,) = self.folder.glob(f"runs/{run}/")
        given = RunDir(folder).settings()
        rmtree(folder)
        finish(folder, accuracies, status="", settings=given)
        return folder

    @property
    def started(self) -> list[tuple[str, int]]:
        """The strategies and seeds of the runs that were started."""
        names = [Path(words[words.index("--preset") + 1]).name.split("-seed") for words in self.words]
        return [(strategy, int(rest.partition("-")[0])) for strategy, rest in names]
