"""Changed files to whatever reads them: success, or an error of the project's own, in one sentence that names the file.

The true files are those of a run of two rounds and of small data. Each is given, changed, to the function by which a command
reads it. What an error may be is what commands turn into a sentence and exit code 2.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
import tomli_w

from benchmarks.fuzz_formats import spoil
from benchmarks.fuzz_messages import HangError, limit
from benchmarks.hostile import small_digits
from piecework.client_app.seal import seal
from piecework.commands.options import settings_from
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.fleet_file import FleetError
from piecework.federated_data.datasets import load, prepare
from piecework.federated_data.sources import DatasetError
from piecework.models.init_weights import read_pretrained
from piecework.models.model_file import ModelFileError
from piecework.models.trained_model import load_model
from piecework.report.run_page import report_html
from piecework.server_app.experiment import open_run, run_experiment
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.records import CheckpointError, RunDir
from piecework.studies.notes import Note, NoteError
from piecework.studies.study import Study
from piecework.training.settings import Settings, SettingsError
from piecework.training.setup import blueprint_for, dataset_of

SECONDS = 20  # for one file
LONGEST = 1500  # characters of an error
FLEET = {
    "name": "two",
    "assignment": "round-robin",
    "device": [
        {"name": "a", "memory": "100MB", "flops": 1e9, "bandwidth": 1e6, "disk-bandwidth": 1e7},
        {"name": "b", "memory-ratio": 0.5, "flops": 2e9, "bandwidth": 2e6, "disk-bandwidth": 1e7, "cpus": 2},
    ],
}
STUDY = {
    "seeds": [1, 2],
    "sweep": {"training.lr": [0.1, 0.2], "strategy": ["fedavg", "prism"]},
    "settings": {"clients": 4},
}
PRESET = {
    "strategy": "fedepth",
    "num-rounds": 3,
    "training": {"lr": 0.1, "local-epochs": 1},
    "evaluation": {"every": 2},
    "faults": {"allow-untrained": True},
    "fleet": "demo",
}
NOTE = {
    "hash": "ab",
    "strategy": "fedavg",
    "commits": ["a"],
    "machines": ["b"],
    "failed": "",
    "final": False,
    "watched": 1.5,
}
TINY = {
    "strategy": "fedepth",
    "clients": 2,
    "clients-per-round": 2,
    "num-rounds": 2,
    "training.local-epochs": 1,
    "training.lr-schedule": "constant",
    "faults.allow-untrained": True,
    "workers": 1,
    "run-name": "run",
}


class World:
    """The true files, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, small_digits(folder)
        values = TINY | {"dataset": f"npz:{self.data}", "output-dir": str(folder)}
        self.settings = Settings.from_run_config(values)
        self.run = RunDir(folder / "run")
        with LocalGrid(self.settings.clients, self.settings.to_run_config(), 1) as grid:
            run_experiment(grid, self.settings, self.run)
            self.grid = grid
        shutil.rmtree(self.run.checkpoint_paths()[0])  # else a damaged one is passed over for it
        self.again = self.settings.with_values({"resume-from": str(self.run.path), "num-rounds": 3})
        self.blueprint = blueprint_for(self.settings, dataset_of(self.settings))
        (folder / "preset.toml").write_text(tomli_w.dumps(PRESET), encoding="utf-8")
        (folder / "fleet.toml").write_text(tomli_w.dumps(FLEET), encoding="utf-8")
        (folder / "fleet.json").write_text(json.dumps(FLEET), encoding="utf-8")
        (folder / "study").mkdir()
        (folder / "study" / "study.toml").write_text(tomli_w.dumps(STUDY), encoding="utf-8")
        (folder / "noted.json").write_text(json.dumps(NOTE), encoding="utf-8")
        self.cached = shutil.copytree(
            prepare(f"npz:{self.data}", data_dir="", cache_dir=folder / "first"), folder / "cached"
        )

    def resume(self, sealed: bool) -> None:
        """Begin to resume the run, up to where it would write."""
        if sealed:
            seal(self.run.checkpoint_paths()[-1])
        open_run(self.grid, self.again, self.run)

    def weights(self) -> object:
        """Read the run's model as initial weights."""
        return read_pretrained(self.run.path / "model.safetensors", self.blueprint)


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it is in the world, its format, and what reads it."""

    path: str
    form: str
    read: Callable[[World], object]
    names: bool = True  # an error names the file, or a setting


def _prepare(world: World) -> None:
    shutil.rmtree(world.folder / "cache", ignore_errors=True)
    prepare(f"npz:{world.data}", data_dir="", cache_dir=world.folder / "cache")


LAST = "run/checkpoint/round-00002/"
KINDS = {
    "preset": Kind("preset.toml", "toml", lambda world: settings_from(str(world.folder / "preset.toml"), []), names=False),
    "fleet": Kind("fleet.toml", "toml", lambda world: load_fleet(str(world.folder / "fleet.toml"))),
    "fleet as a setting": Kind(
        "fleet.json", "json", lambda world: load_fleet((world.folder / "fleet.json").read_text("utf-8", "replace")), names=False
    ),
    "study": Kind("study/study.toml", "toml", lambda world: Study.read(world.folder / "study").rows, names=False),
    "note": Kind("noted.json", "json", lambda world: Note.read(world.folder / "noted")),
    "settings of a run": Kind("run/settings.toml", "toml", lambda world: settings_from(
        "", [f"resume-from={world.run.path}", "num-rounds=4"]
    )),
    "rounds": Kind("run/rounds.jsonl", "jsonl", lambda world: report_html(world.run, plotly=False)),
    "summary": Kind("run/summary.json", "json", lambda world: report_html(world.run, plotly=False)),
    "coverage": Kind("run/coverage.json", "json", lambda world: report_html(world.run, plotly=False)),
    "state": Kind(f"{LAST}state.json", "json", lambda world: world.resume(sealed=False)),
    "state, sealed again": Kind(f"{LAST}state.json", "json", lambda world: world.resume(sealed=True)),
    "manifest": Kind(f"{LAST}manifest.json", "json", lambda world: world.resume(sealed=False)),
    "checkpoint, sealed again": Kind(f"{LAST}arrays.safetensors", "safetensors", lambda world: world.resume(sealed=True)),
    "model": Kind("run/model.safetensors", "safetensors", lambda world: load_model(world.run.path)),
    "weights": Kind("run/model.safetensors", "safetensors", lambda world: world.weights()),
    "archive": Kind("small-digits.npz", "npz", _prepare),
    "array": Kind("cached/train-images.npy", "npy", lambda world: load(world.cached)),
    "description of data": Kind("cached/meta.json", "json", lambda world: load(world.cached)),
}  # fmt: skip
CLEAR = (SettingsError, FleetError, DatasetError, CheckpointError, NoteError, ModelFileError)
# What a plain ValueError of the project's own begins with.
OWN_TEXTS = ("training.init-weights = ", "the strategy's state in the checkpoint has ")

NAMED = ("setting ", "unknown setting ", "unknown fleet ")  # of a file of settings an error names the setting


@dataclass
class Reader:
    """Reads changed files of one kind. `wrong` says what should not have happened, with the number of the file."""

    kind: str
    world: World
    came: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder, self.what = self.world.folder, KINDS[self.kind]
        self.file = self.folder / self.what.path
        self.true = self.file.read_bytes()
        self.what.read(self.world)
        self.others = {path: path.read_bytes() for path in self.file.parent.glob("*") if path.is_file()}
        self.known = self._present()

    def _present(self) -> set[Path]:
        # what data are prepared into is meant to stay: one folder for each content, which is removed here
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        return {path for path in self.folder.rglob("*") if "__pycache__" not in path.parts}

    def attack(self, files: int, seed: int = 1) -> int:
        """Have that many changed files read. Returns by how many bytes the process grew after a fifth of them."""
        process, before = psutil.Process(), 0
        for number in range(files):
            content = spoil(self.what.form, self.true, Random(f"{seed} {self.kind} {number}"))
            self.file.write_bytes(content)
            self._read(number)
            left = self._present() - self.known
            if left or self.known - self._present():
                self.wrong.append(f"file {number} leaves {sorted(map(str, left))[:3]}, or removes files")
            for path, held in self.others.items():  # a manifest is made anew
                path.write_bytes(held)
            if number == files // 5:
                before = process.memory_info().rss
        return process.memory_info().rss - before

    def _read(self, number: int) -> None:
        try:
            with limit(SECONDS):
                self.what.read(self.world)
            self.came["read"] += 1
        except CLEAR as error:
            self.came["refused"] += 1
            said = str(error)
            named = self.file.name in said or str(self.file.parent) in said or said.startswith(NAMED)
            if len(said) > LONGEST or (self.what.names and not named):
                self.wrong.append(
                    f"file {number}: the error does not name it, or is long: {type(error).__name__}: {said:.300}"
                )
        except ValueError as error:
            self.came["refused"] += 1
            if not str(error).startswith(OWN_TEXTS):
                self.wrong.append(f"file {number}: {type(error).__name__}: {error!s:.300}")
        except (Exception, HangError) as error:
            self.wrong.append(f"file {number}: {type(error).__name__}: {error!s:.300}")
