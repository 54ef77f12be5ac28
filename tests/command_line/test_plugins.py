"""Plugins: what installed packages register by entry points is found by its name, and what is said where that goes wrong."""

import json
import logging
import re
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import fuse_dicts
from helpers import TRIO, run_local, tiny_settings
from plugin_helpers import installed
from typer.testing import CliRunner

from piecework.app_folder import TOP, app_folder
from piecework.cli import app
from piecework.commands.options import settings_from
from piecework.device_profiles.fleet import load_fleet
from piecework.device_profiles.plugins import PluginError, refuse_exit
from piecework.federated_data.datasets import DatasetError, load, prepare
from piecework.federation.errors import TooFewNodesError
from piecework.federation.registry import ClientRegistry
from piecework.models.zoo import build_blueprint, model_options
from piecework.report.compare import read_run
from piecework.server_app.callbacks import Callback, Callbacks
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.packages import packages_of_clients
from piecework.server_app.records import CheckpointError, RunDir
from piecework.training.methods import find_entry
from piecework.training.settings import SettingsError
from piecework.training.settings import run as run_settings
from piecework.training.settings.table import flat

METHOD = """
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.settings.table import NonNegative, Table, setting

class Own(Table):
    name = "own-words"
    mu: NonNegative = setting(0.5, "a number")
    kind: str = setting("", "a text")

class Words(FedAvg):
    name = "own-words"
    settings_class = Own
"""
WORDS = {"methods": {"own-words": "own_words:Words"}}
BROKEN = "raise RuntimeError('no such accelerator')"


def test_a_name_that_two_packages_have_is_an_error_that_names_both(tmp_path: Path) -> None:
    taken = {"methods": {"fedavg": "thief:A", "twice": "thief:B"}, "models": {"vit": "thief:C"}}
    own = {"methods": {"twice": "other:A"}}
    with installed(tmp_path / "a", "thief", taken), installed(tmp_path / "b", "other", own):
        for ask, said in (
            (lambda: find_entry("fedavg"), "strategy = 'fedavg' is registered by 2 packages, piecework and thief"),
            (lambda: find_entry("twice"), "by 2 packages, .*(thief|other) and (thief|other): uninstall one of them"),
            (lambda: build_blueprint("vit", num_classes=2, input_shape=(3, 32, 32)), "piecework and thief"),
        ):
            with pytest.raises(PluginError, match=said):
                ask()
        assert settings_from("", ["strategy=fedprox"]).strategy == "fedprox"  # others go on
        rows = json.loads(CliRunner().invoke(app, ["strategies", "--json"]).stdout)
        assert [row["caveat"] != "" for row in rows if row["family"] == "plugin"] == [True, True, True]


def test_a_plugin_is_imported_when_it_is_asked_for_and_not_before(tmp_path: Path) -> None:
    with installed(tmp_path, "half-done", {"methods": {"half": "half_done:A"}}, half_done=BROKEN):
        row = json.loads(CliRunner().invoke(app, ["strategies", "--json"]).stdout)[-1]
        assert (row["strategy"], row["about"]) == ("half", "Plugin of the package half-done 0.3")
        with pytest.raises(ValueError, match=r"unknown strategy 'halv': known are .*, half; .* did you mean 'half'"):
            find_entry("halv")
        assert "half_done" not in sys.modules
        done = CliRunner().invoke(app, ["run", "--strategy", "half"])
        assert done.exit_code == 2
        said = "of the package half-done 0.3 cannot be imported (half_done:A): RuntimeError: no such accelerator"
        assert said in " ".join(done.stderr.split())


def test_a_plugin_that_calls_exit_ends_no_command(tmp_path: Path) -> None:
    exits = {"methods": {"exits": "calls_exit:A"}, "models": {"exits": "calls_exit:net"}}
    with installed(tmp_path, "calls-exit", exits, calls_exit="import sys\nsys.exit(3)"):
        said = r"'exits' of the package calls-exit 0.3 cannot be imported .*: it calls sys.exit\(3\)"
        for ask in (
            lambda: find_entry("exits"),
            lambda: build_blueprint("exits", num_classes=2, input_shape=(3, 8, 8)),
        ):
            with pytest.raises(PluginError, match=said):
                ask()


def test_a_signal_ends_code_that_may_not_call_exit() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit, match="143"), refuse_exit():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_its_settings_go_to_flower_beside_those_of_the_app(tmp_path: Path) -> None:
    """Which takes only settings that an app's pyproject.toml lists."""
    with installed(tmp_path / "a", "own-words", WORDS, own_words=METHOD):
        words = ["own-words.mu=0.25", "own-words.kind=7", "engine=ray"]
        settings = settings_from("", words, named={"strategy": "own-words"})
        values = settings.to_run_config()
        assert (values["own-words.mu"], values["own-words.kind"]) == (0.25, "7")
        assert "own-words.mu" in CliRunner().invoke(app, ["settings", "own-words"]).stdout
        with pytest.raises(SettingsError, match=r"own-words\.mu"):
            settings_from("", ["own-words.mu=-1"], named={"strategy": "own-words"})
    plain = tiny_settings().to_run_config()
    assert app_folder(tmp_path / "none", plain) == TOP
    project = tomllib.loads((app_folder(tmp_path / "app", values) / "pyproject.toml").read_text("utf-8"))
    listed = flat(project["tool"]["flwr"]["app"]["config"])
    assert fuse_dicts(listed, values) == values  # it raises for a key that is not listed
    assert (tmp_path / "app" / "client_app" / "app.py").is_file()


def test_a_node_without_the_package_says_so_and_the_server_names_it(tmp_path: Path) -> None:
    with installed(tmp_path, "own-words", WORDS, own_words=METHOD):
        settings = tiny_settings(strategy="own-words", clients=2)
        needed = packages_of_clients(settings)
        values = settings.to_run_config()
    install = "each node needs: pip install own-words==0.3; "
    for lacks, said in (
        (values, f"{install}.*unknown strategy 'own-words'"),
        (tiny_settings(clients=2, model="own-net").to_run_config(), f"{install}.*model = 'own-net' is not known"),
        (tiny_settings(clients=2, dataset="own-data").to_run_config(), f"{install}.*unknown data set 'own-data'"),
        (tiny_settings(clients=2, dataset="npz:no.npz").to_run_config(), "error 2: (?!each node needs)"),
    ):
        registry = ClientRegistry(load_fleet("demo"), 1, 2, settings.memory, packages=needed)
        with LocalGrid(2, lacks, 1) as grid, pytest.raises(TooFewNodesError, match=said):
            registry.wait_for_clients(grid, 0.0)
        assert registry.members == {}


def test_a_run_whose_package_is_gone_says_what_to_install(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with installed(tmp_path / "a", "own-words", WORDS, own_words=METHOD):
        run.create(tiny_settings(strategy="own-words"))
        assert read_run(run).settings["strategy"] == "own-words"
    for known in (run_settings.fields, run_settings.tables, run_settings.method_tables, run_settings._validate):
        known.cache_clear()  # as in another process
    said = r"needs strategy = 'own-words' of the package own-words 0.3, .* not installed: pip install own-words==0.3"
    with pytest.raises(CheckpointError, match=said):
        read_run(run)
    with pytest.raises(SettingsError, match=said):
        settings_from("", [f"resume-from={run.path}"])
    (run.path / "packages.json").unlink()  # as a run of before has none
    with pytest.raises(CheckpointError, match=r"another version of Piecework: .*unknown strategy 'own-words'"):
        read_run(run)


MODELS = """
from functools import partial
from torch import nn
from piecework.models.cascade import Atom, Blueprint

def net(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))

def cascade(num_classes, input_shape, width=1.0, batch_norm="running", hidden: int = 8):
    size = int(hidden * width)
    atoms = (Atom("fc", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, size), nn.ReLU()), (size,)),)
    return Blueprint("own-cascade", input_shape, num_classes, atoms, partial(nn.Linear, size, num_classes), batch_norm)

def wrong(num_classes, input_shape):
    return cascade(num_classes, input_shape)
"""


def test_a_model_is_a_torch_module_or_a_cascade(tmp_path: Path) -> None:
    names = {"own-net": "own_models:net", "own-cascade": "own_models:cascade", "own-wrong": "own_models:wrong"}
    asked: Any = {"num_classes": 3, "input_shape": (1, 8, 8)}
    with installed(tmp_path, "own-models", {"models": names}, own_models=MODELS):
        whole, half = (build_blueprint("own-net", width=width, **asked) for width in (1.0, 0.5))
        assert [atom.name for atom in whole.atoms] == ["1"]
        sizes = [sum(p.numel() for p in model.build_unit("atoms.0").parameters()) for model in (whole, half)]
        assert sizes == [65 * 8, 65 * 4]
        found = build_blueprint("own-cascade", width=0.5, hidden="16", **asked)
        assert found.build_unit("head").in_features == 8
        assert (model_options("own-cascade"), model_options("own-net")) == (("hidden",), ())
        with pytest.raises(ValueError, match="a function that returns a Blueprint takes width and batch_norm too"):
            build_blueprint("own-wrong", **asked)
        settings = settings_from("", ["model=own-net", "engine=deployment"])  # by name it is allowed on every engine
        assert packages_of_clients(settings) == ("own-models==0.3",)


READERS = """
import numpy as np
from piecework.federated_data.sources import Source

def source(x, y, **more):
    return Source(x, y, x, y, 2, **more)

x, y = np.zeros((4, 2, 2, 1), np.uint8), np.array([0, 1, 0, 1])
def file(folder, download):
    return source(np.full((4, 2, 2, 1), int(folder.read_text()), np.uint8), y)
def nothing(folder, download): return None
def fails(folder, download): raise KeyError("x")
def exits(folder, download): raise SystemExit("no data")
def channels(folder, download): return source(x.transpose(0, 3, 1, 2).repeat(9, 3), y)
def doubles(folder, download): return source(x / 1.0, y)
def labels(folder, download): return source(x, y + 1)
def short(folder, download): return source(x, y[:3])
def infinite(folder, download): return source(np.full(x.shape, np.inf, np.float32), y)
def groups(folder, download): return source(x, y, groups=y[:2])
def other(folder, download): return Source(x, y, x[:, :1], y, 2)
"""
WRONG = {
    "nothing": "returned a NoneType: expected a Source",
    "fails": "failed for .*: KeyError: 'x'",
    "exits": r"failed for .*: it calls sys.exit\('no data'\)",
    "channels": r"inputs are uint8 \(4, 1, 2, 18\): expected images \(N, H, W, C\)",
    "doubles": r"inputs are float64 \(4, 2, 2, 1\)",
    "labels": "have labels 1 to 2: expected from 0 to below the 2 classes",
    "short": r"have labels int64 \(3,\): expected int64 of shape \(4,\)",
    "infinite": "have values that are not finite",
    "groups": "groups are int64 .*: expected int64 of 4",
    "other": "they must have the same type, and examples of the same shape",
}


def test_a_data_set_is_what_its_reader_reads(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    names = {f"own-{name}": f"own_readers:{name}" for name in ("file", *WRONG)}
    with installed(tmp_path, "own-readers", {"datasets": names}, own_readers=READERS):

        def pixel(text: str) -> int:
            (tmp_path / "n.txt").write_text(text)
            found = load(prepare("own-file:n.txt", data_dir=str(tmp_path), cache_dir=cache))
            return int(found.inputs.max())

        assert [pixel("7"), pixel("7"), pixel("123")] == [7, 7, 123]  # a changed file is read again
        for name, said in WRONG.items():
            with pytest.raises(DatasetError, match=f"the reader of the data set 'own-{name}'.*{said}"):
                prepare(f"own-{name}", data_dir="", cache_dir=cache)
        with pytest.raises(DatasetError, match="unknown data set 'own-file:'"):
            prepare("own-file:", data_dir="", cache_dir=cache)


class Diary(Callback):
    """Notes what it is told."""

    told: list[Any] = []  # noqa: RUF012

    def start(self, settings: Any, folder: Path, resumed: bool) -> None:
        self.told.append(("start", settings["num-rounds"], (folder / "settings.toml").is_file(), resumed))

    def round(self, number: int, record: dict[str, Any]) -> None:
        self.told.append((number, dict(record)))
        record.clear()

    def end(self, summary: dict[str, Any]) -> None:
        self.told.append(("end", summary))


class Fragile(Callback):
    """Fails in the first round."""

    def round(self, number: int, record: dict[str, Any]) -> None:
        raise LookupError(f"no tracker in round {number}")


class Exits(Callback):
    """Ends its process, or would."""

    def start(self, settings: Any, folder: Path, resumed: bool) -> None:
        sys.exit("no tracker")


def test_a_callback_that_calls_exit_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = Callbacks(tiny_settings(callbacks=f"{__name__}:Exits"), {}, tmp_path)
    with caplog.at_level(logging.WARNING, "piecework"):
        callbacks.start()
        callbacks.end({})
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "failed in 'start'" in warning
    assert warning.endswith("it calls sys.exit('no tracker'), which would end this process")


def test_callbacks_are_told_of_a_run_and_cannot_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Diary.told.clear()
    points = {"callbacks": {"own-diary": f"{__name__}:Diary"}}
    asked = TRIO | {"fleet": "unlimited", "strategy": "fedavg", "training__local_iterations": 1}
    both = {"callbacks": f"own-diary, {__name__}:Fragile"}
    with installed(tmp_path / "a", "own-diary", points), caplog.at_level(logging.WARNING, "piecework"):
        run = run_local(tmp_path, num_rounds=2, **asked | both)
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith(
            f"the callback '{__name__}:Fragile' failed in 'round' and is told no more of this run"
        )
        assert warning.endswith("LookupError: no tracker in round 1")
        assert Diary.told == [
            ("start", 2, True, False),
            *((record["round"], record) for record in run.rounds()),
            ("end", run.summary()),
        ]
        Diary.told.clear()
        again = asked | {"num_rounds": 3, "training__lr_rounds": 2, "callbacks": "own-diary"}
        run_local(tmp_path, resume_from=str(run.path), **again)
        assert [each[0] for each in Diary.told] == ["start", 3, "end"]
        assert Diary.told[0] == ("start", 3, True, True)
        fresh = tmp_path / "fresh"
        for name, said in (("own-diry", "did you mean 'own-diary'"), (f"{__name__}:TRIO", "cannot be made")):
            with pytest.raises(ValueError, match=said):
                run_local(fresh, callbacks=name, **asked)
        assert not (fresh / "run" / "settings.toml").exists()
    with pytest.raises(SettingsError, match="names your own code, and other engines do not have it"):
        settings_from("", [f"callbacks={__name__}:Diary", "engine=ray"])


def test_a_fleet_may_lie_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "own_fleets"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('nothing is imported for a fleet')")
    device = '[[device]]\nname = "board"\nmemory = "1MB"\nflops = 1e9\nbandwidth = 1e6\ndisk-bandwidth = 1e7\n'
    (package / "mine.toml").write_text(f'name = "mine"\nassignment = "round-robin"\n{device}')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [each.name for each in load_fleet("own_fleets/mine.toml").devices] == ["board"]
    for missing in ("own_fleets/other.toml", "no_package/mine.toml", "__main__/mine.toml", "/no/mine.toml"):
        with pytest.raises(ValueError, match=f"there is no file {re.escape(missing)} "):
            load_fleet(missing)
